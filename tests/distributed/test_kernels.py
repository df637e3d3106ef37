"""The engine's optimizers by zerolite's kernels: against torch's own implementation, stage against stage, and through
everything that happens to an optimizer between two steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.cases import kernels as cases
from tests.ops.cases import needs_fma
from tests.toolkit import models
from tests.toolkit.compare import EPSILON, assert_same_bits
from tests.toolkit.configs import PARTITIONED, Optimizer, config, dynamic_fp16
from tests.toolkit.pool import Pools
from zerolite.zero.spans import sub_groups

CASES = "tests.distributed.cases.kernels"
CLIP = 0.4  # below the norm of most steps
EXACT: dict[str, Optimizer] = {  # the kernels do torch's operations in torch's order
    "SGD": ("SGD", {"lr": 0.05}),
    "SGD momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD dampening": ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    "SGD nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD maximize": ("SGD", {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.01, "maximize": True}),
    "Lion": ("Lion", {"lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 0.1}),
}
CLOSE: dict[str, Optimizer] = {  # torch's square root may be off by a unit in the last place
    "Adam": ("Adam", {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}),
    "Adam L2": ("Adam", {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}),
    "AdamW": ("AdamW", {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}),
    "AdamW maximize": ("AdamW", {"lr": 1e-3, "maximize": True}),
    "Adagrad": (
        "Adagrad",
        {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.1},
    ),
}
ALL = {**EXACT, **CLOSE}
TORCH_NAMES = {"Adam": "AdamW"}  # of the config: decoupled weight decay unless it says otherwise
STAGES = (0, 1, 2, 3)
# A step of Adam is lr at most; where a gradient nearly cancels, regrouping the batch moves it by a share of that.
ADAM_SHARE = 0.02
NEAR_SHARE = 0.002  # of lr, where the batch is not regrouped
FLIPPED = 0.005  # share of 16-bit values that may be rounded the other way
LATE = [  # by step, the ways of two ranks: b comes at step 2, c at step 3 and on one rank; each is left out at times
    ["a", "a"],
    ["a", "a"],
    ["ab", "a"],
    ["b", "bc"],
    ["ab", "ab"],
    ["ac", "a"],
    ["abc", "bc"],
]
LATE_COUNTS = {"a": 6, "b": 4, "c": 3, "never": 0}


def some(*fast: str, slow: Any = ()) -> list[Any]:
    """Parameters: these are fast, and those of ``slow`` that are not among them are marked."""
    return [*fast, *(pytest.param(name, marks=pytest.mark.slow) for name in slow if name not in fast)]


def own(optimizer: Optimizer) -> tuple[str, dict[str, Any]]:
    """Class and arguments for torch of what a config's optimizer means."""
    name, params = optimizer
    params = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    decoupled = params.pop("adam_w_mode", True)
    return (TORCH_NAMES.get(name, name) if decoupled else name), params


def plain(optimizer: Optimizer, world: int, steps: int, model: str = "OddModel", **more: Any) -> tuple[Any, Any]:
    """The model and the optimizer after plain PyTorch's training on the joint batch."""
    torch.set_num_threads(1)
    groups = more.pop("groups", None)
    module = cases.make_model(model)
    cls, params = own(optimizer)
    made = cases.CLASSES[cls](cases.grouped(module, groups), **params)
    cases.plain_steps(module, made, model, range(steps), world, **more)
    return module, made


def assert_close(parameters: dict[str, Tensor], module: torch.nn.Module, optimizer: Optimizer, what: str) -> None:
    """Parameters that differ by the grouping of sums, at most."""
    lr = optimizer[1]["lr"]
    bound = 1e-6 if optimizer[0] == "SGD" else ADAM_SHARE * lr
    for name, wanted in module.named_parameters():
        if not wanted.numel():
            continue
        difference = (parameters[name].float() - wanted.detach()).abs().max()
        assert difference <= bound, f"{what}, {name}: {difference} > {bound}"


def assert_near(parameters: dict[str, Tensor], wanted: dict[str, Tensor], name: str) -> None:
    """Parameters that have been updated by kernels and by torch from the same gradients: the same bits, or apart by a
    few roundings and what they do to later gradients."""
    if name in EXACT:
        assert_same_bits(parameters, wanted, name)
    for key, value in wanted.items():
        message = f"{name}, {key}"
        torch.testing.assert_close(
            parameters[key],
            value,
            rtol=1e-6,
            atol=NEAR_SHARE * ALL[name][1]["lr"],
            msg=lambda m, w=message: f"{w}: {m}",
        )


def assert_same_states(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]], what: str) -> None:
    assert sorted(one) == sorted(other), what
    for name, state in one.items():
        assert_same_bits(state, other[name], f"{what}: states of {name}")


def stage_runs(optimizer: Optimizer, precision: str = "fp32", **more: Any) -> dict[str, dict[str, Any]]:
    """One run per stage; stage 3 releases every parameter after its use, unless the model is one whose ranks differ."""
    options = {key: more.pop(key) for key in ("model", "steps", "groups", "ways", "changes", "own") if key in more}
    moving = {} if "ways" in options else PARTITIONED["moving"]
    made = {}
    for stage in STAGES:
        setting = config(stage, precision, optimizer=optimizer, zero=moving if stage == 3 else None, **more)
        if "own" in options:
            del setting["optimizer"]
        made[str(stage)] = {"config": setting, **options}
    return made


def assert_stages_agree(ranks: list[dict[str, Any]], names: list[str]) -> None:
    """Equal bits between the runs of these names, all by kernels, on all ranks."""
    first = ranks[0][names[0]]
    for result in ranks:
        for name in names:
            assert result[name]["method"] == "FlatUpdate"
            assert result[name]["skipped"] == 0
            assert_same_bits(result[name]["parameters"], first["parameters"], f"{names[0]} and {name}")


# -------------------------------------------------------------------- torch's own, where the user names it


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "foreach": True}),
        ("AdamW", {"lr": 1e-3, "foreach": True}),
        ("AdamW", {"lr": 1e-3, "fused": True}),
        ("AdamW", {"lr": 1e-3, "amsgrad": True}),
    ],
    ids=["SGD foreach", "AdamW foreach", "AdamW fused", "AdamW amsgrad"],
)
def test_an_implementation_of_torchs_that_the_user_names_runs(pools: Pools, optimizer: Optimizer) -> None:
    module, _ = plain(optimizer, 2, 4)
    for precision in ("fp32", "bf16"):
        results = pools(2).run(f"{CASES}:train_many", {"runs": stage_runs(optimizer, precision)})[1]
        for stage in STAGES:
            assert results[str(stage)]["method"] == "PiecewiseUpdate"
            if precision == "fp32":
                assert_close(results[str(stage)]["parameters"], module, optimizer, f"stage {stage}")
            if not optimizer[1].get("fused"):  # whose bits depend on where an element lies
                assert_same_bits(results["0"]["parameters"], results[str(stage)]["parameters"], f"stages 0 and {stage}")


# -------------------------------------------------------------------- kernels against torch


@pytest.mark.slow
@needs_fma
@pytest.mark.parametrize("name", some("SGD dampening", "Lion", slow=EXACT))
def test_kernels_give_the_bits_of_torchs_foreach(pools: Pools, name: str) -> None:
    """Through the engine, with clipping and accumulation, and at world 1 against plain PyTorch."""
    optimizer = EXACT[name]
    torchs = optimizer if name == "Lion" else (optimizer[0], {**optimizer[1], "foreach": True})
    module, _ = plain(torchs, 1, 4)
    wanted = {key: p.detach() for key, p in module.named_parameters()}
    alone = pools(1).run(f"{CASES}:train_many", {"runs": stage_runs(optimizer)})[0]
    for stage in STAGES:
        assert_same_bits(alone[str(stage)]["parameters"], wanted, f"stage {stage} and plain PyTorch")
    runs = {}
    for stage in STAGES:
        for precision, accumulation in (("fp32", 1), ("bf16", 3)):
            key = f"{stage} {precision}"
            runs[f"kernels {key}"] = {"config": config(stage, precision, accumulation, CLIP, optimizer)}
            runs[f"torch {key}"] = {
                "config": config(stage, precision, accumulation, CLIP, torchs),
                "kernels": name != "Lion",
            }
    for results in pools(2).run(f"{CASES}:train_many", {"runs": runs}):
        for key in runs:
            kind, _, rest = key.partition(" ")
            assert results[key]["method"] == {"kernels": "FlatUpdate", "torch": "PiecewiseUpdate"}[kind]
            assert_same_bits(results[key]["parameters"], results[f"torch {rest}"]["parameters"], key)
            assert_same_states(results[key]["states"], results[f"torch {rest}"]["states"], key)


@pytest.mark.fast("AdamW")
@pytest.mark.parametrize("name", CLOSE)
def test_kernels_are_as_close_to_torch_as_torchs_implementations_are(pools: Pools, name: str) -> None:
    optimizer = CLOSE[name]
    module, theirs = plain(optimizer, 1, 6)
    wanted = {key: p.detach() for key, p in module.named_parameters()}
    alone = pools(1).run(f"{CASES}:train_many", {"runs": stage_runs(optimizer, steps=6)})[0]
    for stage in STAGES:
        assert_near(alone[str(stage)]["parameters"], wanted, name)
    for key, p in module.named_parameters():
        for entry, value in theirs.state.get(p, {}).items():
            if p.numel() and key != "unused":  # of which torch's Adagrad has a state, without a step
                torch.testing.assert_close(alone["0"]["states"][key][entry], value, rtol=1e-4, atol=1e-9)


# -------------------------------------------------------------------- stages


def stage_matrix() -> list[Any]:
    fast = {
        "fp32": ("SGD nesterov", "Lion", "Adam L2", "Adagrad"),
        "bf16": ("SGD dampening", "Adagrad"),
        "fp16": ("AdamW", "Lion"),
    }
    return [
        pytest.param(
            name, precision, world, marks=() if world == 2 and name in fast[precision] else (pytest.mark.slow,)
        )
        for name in ALL
        for precision in fast
        for world in (2, 3)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "world"), stage_matrix())
def test_stages_give_the_same_bits(pools: Pools, name: str, precision: str, world: int) -> None:
    """Accumulation 1 with clipping: all stages; accumulation 3: those that add and reduce in the same order."""
    single = stage_runs(ALL[name], precision, clip=CLIP)
    ranks = pools(world).run(f"{CASES}:train_many", {"runs": single})
    assert_stages_agree(ranks, list(single))
    if precision == "fp32":
        module, _ = plain(ALL[name], world, 4)
        unclipped = pools(world).run(f"{CASES}:train_many", {"runs": stage_runs(ALL[name])})
        assert_stages_agree(unclipped, list(single))
        assert_close(unclipped[0]["0"]["parameters"], module, ALL[name], name)
    several = stage_runs(ALL[name], precision, clip=CLIP, accumulation=3)
    ranks = pools(world).run(f"{CASES}:train_many", {"runs": several})
    assert_stages_agree(ranks, ["0", "1"])
    assert_stages_agree(ranks, ["2", "3"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", some("fp32", slow=["bf16"]))
@pytest.mark.parametrize("name", some("Lion", "Adagrad", slow=["SGD nesterov", "AdamW", "Adam L2"]))
def test_groups_and_a_schedule(pools: Pools, name: str, precision: str) -> None:
    """Neighbours in one bucket of three groups; the learning rates change every step."""
    optimizer = ALL[name]
    lr = optimizer[1]["lr"]
    middle: dict[str, Any] = {"weight_decay": 0.0}
    if "betas" in optimizer[1]:
        middle["betas"] = (0.8, 0.9)
    groups = [("bias", middle), ("up", {"lr": lr / 4, "weight_decay": 0.3})]
    changes = {step: {"lr": lr / (1 + step)} for step in (2, 3)}
    options: dict[str, Any] = {"groups": groups, "steps": 5}
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": lr, "warmup_type": "linear"}}
    scheduled = pools(2).run(
        f"{CASES}:train_many", {"runs": stage_runs(optimizer, precision, scheduler=scheduler, **options)}
    )
    assert_stages_agree(scheduled, [str(stage) for stage in STAGES])
    changed = pools(2).run(
        f"{CASES}:train_many", {"runs": stage_runs(optimizer, precision, changes=changes, **options)}
    )
    assert_stages_agree(changed, [str(stage) for stage in STAGES])
    if precision == "fp32":
        module, _ = plain(optimizer, 2, 5, groups=groups, changes=changes)
        assert_close(changed[0]["0"]["parameters"], module, optimizer, name)


@pytest.mark.fast("AdamW")
@pytest.mark.parametrize("name", some("SGD dampening", "AdamW", slow=["SGD maximize", "Lion", "Adam L2", "Adagrad"]))
def test_the_states_of_a_users_own_optimizer_are_adopted(pools: Pools, name: str) -> None:
    module, theirs = plain(ALL[name], 2, 6)
    runs = stage_runs(ALL[name], steps=6, own=own(ALL[name]))
    ranks = pools(2).run(f"{CASES}:train_many", {"runs": {key: {**run, "before": 3} for key, run in runs.items()}})
    assert_stages_agree(ranks, list(runs))
    assert_close(ranks[0]["0"]["parameters"], module, ALL[name], name)
    for key, p in module.named_parameters():
        if "step" in theirs.state.get(p, {}) and key in ranks[0]["0"]["states"]:
            assert ranks[0]["0"]["states"][key]["step"] == theirs.state[p]["step"] == 6


# -------------------------------------------------------------------- late and unused parameters


@pytest.mark.fast("SGD dampening-fp32")
@pytest.mark.parametrize("precision", some("fp32", slow=["bf16", "fp16"]))
@pytest.mark.parametrize("name", some("SGD dampening", "AdamW", slow=["SGD nesterov", "Adam L2", "Lion", "Adagrad"]))
def test_late_and_unused_parameters(pools: Pools, name: str, precision: str) -> None:
    """Each parameter counts its own steps."""
    optimizer = ALL[name]
    runs = stage_runs(optimizer, precision, model="Late", steps=len(LATE), ways=LATE)
    ranks = pools(2).run(f"{CASES}:train_many", {"runs": runs})
    assert_stages_agree(ranks, list(runs))
    if precision == "fp32":
        module, _ = plain(optimizer, 2, len(LATE), "Late", ways=LATE)
        assert_close(ranks[0]["0"]["parameters"], module, optimizer, name)
    never = ranks[0]["0"]["parameters"]["never.weight"]
    start = cases.make_model("Late").get_parameter("never.weight").detach()
    assert torch.equal(never, start.to(never.dtype))
    for results in ranks:
        for stage in STAGES:
            states = results[str(stage)]["states"]
            assert not {"never.weight", "never.bias"} & set(states)
            if optimizer[0] in ("AdamW", "Adam", "Adagrad"):
                counts = {key: int(state["step"]) for key, state in states.items()}
                assert counts == {key: LATE_COUNTS[key[0]] for key in counts}
                assert counts


# -------------------------------------------------------------------- options that torch does not have


def adam_by_hand(
    world: int, steps: int, corrected: bool = True, rounded: bool = False, precision: str = "fp32"
) -> dict[str, Tensor]:
    """AdamW without weight decay, in plain arithmetic: without its bias correction; with moments rounded to bf16."""
    torch.set_num_threads(1)
    module = cases.make_model("OddModel")
    states = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in module.named_parameters()}
    for step in range(steps):
        torch.stack([cases.loss_of(module, "OddModel", step, 0, rank, None) for rank in range(world)]).mean().backward()
        for name, p in module.named_parameters():
            if p.grad is None:
                continue
            m, v = states[name]
            m.lerp_(p.grad, 1 - 0.9)
            v.mul_(0.95).add_((1 - 0.95) * p.grad * p.grad)
            unbiased = (m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))) if corrected else (m, v)
            p.data.sub_(1e-3 * unbiased[0] / (unbiased[1].sqrt() + 1e-8))
            if rounded:
                states[name] = [m.bfloat16().float(), v.bfloat16().float()]
            p.grad = None
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", [{}, {"bias_correction": False}, {"fp32_optimizer_states": False}], ids=["none", "uncorrected", "bf16"]
)
def test_options_of_zerolites_own(pools: Pools, option: dict[str, bool]) -> None:
    optimizer = ("Adam", {"lr": 1e-3, "betas": [0.9, 0.95], **option})
    ranks = pools(2).run(f"{CASES}:train_many", {"runs": stage_runs(optimizer, steps=6)})
    assert_stages_agree(ranks, [str(stage) for stage in STAGES])
    got = ranks[0]["0"]["parameters"]
    rounded = "fp32_optimizer_states" in option
    wanted = adam_by_hand(2, 6, "bias_correction" not in option, rounded)
    others = [
        adam_by_hand(2, 6, corrected, low)
        for corrected, low in ((True, False), (False, False), (True, True))
        if (corrected, low) != ("bias_correction" not in option, rounded)
    ]

    def distance(other: dict[str, Tensor]) -> float:
        return max(float((got[name] - value).abs().max()) for name, value in other.items() if value.numel())

    assert distance(wanted) <= ADAM_SHARE * 1e-3
    assert all(distance(other) > 3 * distance(wanted) for other in others)
    for results in ranks:
        for stage in STAGES:
            for key, state in results[str(stage)]["states"].items():
                expected = torch.bfloat16 if rounded else torch.float32
                assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {expected}, key
                assert state["step"].dtype == torch.float32


def test_moments_in_bf16_take_half_the_memory(pools: Pools) -> None:
    def state_bytes(option: dict[str, bool], stage: int) -> int:
        run = config(stage, "bf16", optimizer=("AdamW", {"lr": 1e-3, **option}))
        states = pools(2).run(f"{CASES}:train", {"config": run, "model": "Mlp"})[0]["states"]
        return sum(v.nbytes for state in states.values() for key, v in state.items() if key != "step")

    numel = sum(p.numel() for p in models.Mlp().parameters())
    assert state_bytes({}, 0) == 8 * numel
    for stage in (0, 1):
        assert state_bytes({"fp32_optimizer_states": False}, stage) == state_bytes({}, stage) / 2


@pytest.mark.parametrize("key", ["bias_correction", "fp32_optimizer_states"])
def test_what_an_option_of_zerolites_own_cannot_stand_beside(pools: Pools, key: str) -> None:
    for other in ({"foreach": True}, {"fused": True}, {"amsgrad": True}):
        setting = config(1, optimizer=("AdamW", {"lr": 1e-3, key: False, **other}))
        for error in pools(2).run(f"{CASES}:initialize_error", {"config": setting}):
            assert error.startswith("ConfigError"), error
            for word in (f"optimizer.params.{key}", next(iter(other)), "expected true"):
                assert word in error, error
    setting = config(1, optimizer=("AdamW", {"lr": 1e-3, key: False}))
    for error in pools(2).run(f"{CASES}:initialize_error", {"config": setting, "dtype": torch.float64}):
        for word in (key, "float64", "fp32, bf16 or fp16", "leave the key"):
            assert word in error, error


def test_float64_is_torchs(pools: Pools) -> None:
    for name in ("SGD nesterov", "AdamW"):
        run = {"config": config(2, optimizer=ALL[name]), "dtype": torch.float64}
        result = pools(2).run(f"{CASES}:train", run)[0]
        assert result["method"] == "PiecewiseUpdate"
        assert all(p.dtype == torch.float64 for p in result["parameters"].values())


# -------------------------------------------------------------------- saving


@pytest.mark.parametrize("name", ["SGD", "SGD nesterov", "Lion", "AdamW", "Adam L2", "Adagrad"])
def test_the_state_dict_is_torchs(pools: Pools, name: str) -> None:
    """At stage 0 torch's own optimizer takes it and goes on."""
    kwargs = {"config": config(0, optimizer=ALL[name]), "own": own(ALL[name])}
    result = pools(1).run(f"{CASES}:into_plain_torch", kwargs)[0]
    assert result["shape"] == {key: keys for key, keys in result["theirs"].items() if keys}
    assert_near(result["engine"], result["plain"], name)


def save_and_load(pools: Pools, first: dict[str, Any], second: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return pools(2).run(f"{CASES}:save_and_load", {"first": first, "second": second, **more})


@pytest.mark.slow
@pytest.mark.parametrize("precision", some("bf16", slow=["fp32"]))
@pytest.mark.parametrize("name", some("SGD dampening", "AdamW", slow=["SGD", "Adam L2", "Lion", "Adagrad"]))
def test_states_make_a_round_trip(pools: Pools, name: str, precision: str) -> None:
    """c has no state when it is saved and gets its first gradient afterwards."""
    for stage, used in ((0, False), (1, False), (2, True), (3, False), (3, True)):
        setting = config(stage, precision, optimizer=ALL[name], clip=CLIP)
        for result in save_and_load(pools, setting, setting, model="Late", ways=LATE, used=used):
            assert_same_states(result["saved"], result["loaded"], f"stage {stage}, at once")
            assert "c.weight" not in result["saved"]
            assert_same_bits(result["wanted"]["parameters"], result["resumed"]["parameters"], f"stage {stage}")
            assert_same_bits(result["wanted"]["masters"], result["resumed"]["masters"], f"stage {stage}, masters")
            assert_same_states(result["wanted"]["states"], result["resumed"]["states"], f"stage {stage}")


@pytest.mark.fast("to torch's-SGD dampening")
@pytest.mark.parametrize("name", some("SGD dampening", "AdamW", slow=["Adam L2", "Adagrad"]))
@pytest.mark.parametrize("there", ["to torch's", "to the kernels"])
def test_states_travel_between_kernels_and_torchs_implementation(pools: Pools, name: str, there: str) -> None:
    optimizer = ALL[name]
    torchs = (optimizer[0], {**optimizer[1], "foreach": True})
    for stage in (0, 2):
        settings = [config(stage, optimizer=o) for o in (optimizer, torchs)]
        if there == "to the kernels":
            settings.reverse()
        for result in save_and_load(pools, *settings, model="Late", ways=LATE):
            methods = [result[key]["method"] for key in ("wanted", "resumed")]
            assert methods == (
                ["FlatUpdate", "PiecewiseUpdate"] if there == "to torch's" else ["PiecewiseUpdate", "FlatUpdate"]
            )
            assert_near(result["resumed"]["parameters"], result["wanted"]["parameters"], name)


def test_moments_in_bf16_make_a_round_trip(pools: Pools) -> None:
    setting = config(1, "bf16", optimizer=("AdamW", {"lr": 1e-3, "fp32_optimizer_states": False}))
    for result in save_and_load(pools, setting, setting):
        assert_same_states(result["saved"], result["loaded"], "at once")
        assert_same_bits(result["wanted"]["parameters"], result["resumed"]["parameters"], "resumed")


# -------------------------------------------------------------------- param groups that change midway


@pytest.mark.slow
@pytest.mark.parametrize("name", some("AdamW", slow=["SGD nesterov", "Lion", "Adam L2", "Adagrad"]))
def test_options_changed_midway_are_followed(pools: Pools, name: str) -> None:
    optimizer = ALL[name]
    new: dict[str, Any] = {"lr": optimizer[1]["lr"] / 2, "weight_decay": 0.3}
    if "momentum" in optimizer[1]:
        new |= {"momentum": 0.5, "nesterov": False, "dampening": 0.2}
    if "betas" in optimizer[1] or "adam_w_mode" in optimizer[1]:
        new |= {"betas": (0.7, 0.8)}
    if name == "AdamW":
        new |= {"eps": 1e-3, "maximize": True}
    changes = {2: new}
    module, _ = plain(optimizer, 2, 5, changes=changes)
    ranks = pools(2).run(f"{CASES}:train_many", {"runs": stage_runs(optimizer, steps=5, changes=changes)})
    assert_stages_agree(ranks, [str(stage) for stage in STAGES])
    assert_close(ranks[0]["0"]["parameters"], module, optimizer, name)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [None, [("bias", {"momentum": 0.9})]], ids=["all", "one group has it"])
def test_momentum_that_comes_midway(pools: Pools, groups: Any) -> None:
    """The first gradient fills the buffer, undamped, as in torch."""
    optimizer = ("SGD", {"lr": 0.05})
    changes = {2: {"momentum": 0.9, "dampening": 0.5}, 5: {"momentum": 0.0}, 6: {"momentum": 0.8}}
    module, _ = plain(optimizer, 2, 8, changes=changes, groups=groups)
    ranks = pools(2).run(
        f"{CASES}:train_many", {"runs": stage_runs(optimizer, steps=8, changes=changes, groups=groups)}
    )
    assert_stages_agree(ranks, [str(stage) for stage in STAGES])
    assert_close(ranks[0]["0"]["parameters"], module, optimizer, "momentum")


@pytest.mark.fast("capturable-True")
@pytest.mark.parametrize(
    ("key", "value"), [("amsgrad", True), ("foreach", True), ("fused", True), ("capturable", True)]
)
def test_what_the_kernels_cannot_follow_is_said(pools: Pools, key: str, value: bool) -> None:
    for stage in STAGES:
        kwargs = {"config": config(stage, optimizer=ALL["AdamW"]), "key": key, "value": value}
        for result in pools(2).run(f"{CASES}:refused_option", kwargs):
            for word in (f"param_groups[0]['{key}']", str(value), "when the optimizer is made"):
                assert word in result["error"], result["error"]
            assert_same_bits(result["before"]["parameters"], result["after"]["parameters"], "a refused step")
            assert_same_states(result["before"]["states"], result["after"]["states"], "a refused step")
            assert all(int(state["step"]) == 4 for state in result["end"]["states"].values())


# -------------------------------------------------------------------- kernels that are not there


@pytest.mark.fast("Adagrad-ranks3-stages3")
@pytest.mark.parametrize(
    ("name", "ranks", "stages"),
    [
        ("AdamW", [1], [0, 2]),
        ("SGD nesterov", [1], [1]),
        ("Lion", [0, 1, 2], [3]),
        ("Adagrad", [0, 2], [0]),
        *(pytest.param(name, [0], STAGES, marks=pytest.mark.slow) for name in ("AdamW", "SGD dampening", "Lion")),
    ],
)
def test_without_kernels_on_a_rank_all_use_torchs(pools: Pools, name: str, ranks: list[int], stages: list[int]) -> None:
    module, _ = plain(ALL[name], 3, 4)
    for stage in stages:
        reason = f"the compiler of {name} is on holiday at stage {stage}. Call it back."
        kwargs = {"config": config(stage, optimizer=ALL[name]), "ranks": ranks, "reason": reason}
        results = pools(3).run(f"{CASES}:fall_back", kwargs)
        assert [result["updates"] for result in results] == [0, 0, 0]
        assert {result["method"] for result in results} == {"PiecewiseUpdate"}
        assert {result["fused"] for result in results} == {True if name == "AdamW" else None}
        told = [message for result in results for message in result["warnings"]]
        assert len(told) == 1, told
        assert results[max(ranks)]["warnings"] == told
        for word in (f"rank {max(ranks)}", "CPU kernels are not available", reason, "torch's optimizers"):
            assert word in told[0], told[0]
        for result in results:
            assert_same_bits(result["parameters"], results[0]["parameters"], "two ranks")
            assert result["same"]
        assert_close(results[0]["parameters"], module, ALL[name], f"stage {stage}")


def test_kernels_switched_off(pools: Pools) -> None:
    """A user who switches kernels off gets no warning."""
    module, _ = plain(ALL["AdamW"], 2, 4)
    setting = config(1, optimizer=ALL["AdamW"])
    for result in pools(2).run(f"{CASES}:switched_off", {"config": setting}):
        assert (result["updates"], result["method"], result["warnings"]) == (0, "PiecewiseUpdate", [])
        assert_close(result["parameters"], module, ALL["AdamW"], "switched off")
    after = pools(2).run(f"{CASES}:train", {"config": setting})
    assert {result["method"] for result in after} == {"FlatUpdate"}


@pytest.mark.slow
def test_options_of_zerolites_own_need_no_kernels(pools: Pools) -> None:
    """The reference gives the same bits where some ranks lack the kernels."""
    for option in ("bias_correction", "fp32_optimizer_states"):
        setting = config(2, optimizer=("Adam", {"lr": 1e-3, option: False}), clip=CLIP)
        wanted = pools(2).run(f"{CASES}:train", {"config": setting})[0]
        for result in pools(2).run(f"{CASES}:fall_back", {"config": setting, "ranks": [1], "reason": option}):
            assert result["method"] == "FlatUpdate"
            assert_same_bits(result["parameters"], wanted["parameters"], option)


# -------------------------------------------------------------------- what a step costs


@pytest.mark.slow
@pytest.mark.parametrize("precision", some("fp32", "bf16", slow=["fp16"]))
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_is_one_norm_launch_and_one_update_launch(pools: Pools, stage: int, precision: str) -> None:
    """And one launch that reads the updated masters, to find those that are not finite. Nothing else touches a
    gradient, or a master where masters are apart: the update reads and writes them once, unscales, clips and rounds
    into the compute parameters."""
    for name, accumulation in (("AdamW", 1), ("SGD nesterov", 3)):
        setting = config(stage, precision, accumulation, 0.01, ALL[name])
        operator = f"zerolite.{'adam' if name == 'AdamW' else 'sgd'}_"
        for world in (1, 2):
            for result in pools(world).run(f"{CASES}:step_costs", {"config": setting}):
                buckets = result["buckets"]
                assert buckets > 1
                assert result["calls"] == {"update": [buckets], "squares": [buckets, buckets]}
                assert result["passes"]["gradients"] == ["zerolite.squares_", operator]
                # What the user may have written into parameters that stay whole, the small ones, reaches their shards.
                whole = ["aten._foreach_copy_"] if stage == 3 and world == 2 else []
                if precision != "fp32" or world == 1 or stage in (0, 3):  # else the gather reads them
                    before = whole if precision == "fp32" else []
                    assert result["passes"]["masters"] == [*before, operator, "zerolite.squares_"]
                if world == 1 or stage in (0, 3):
                    looked_at = ["zerolite.squares_"] if precision == "fp32" else []  # they are the masters
                    assert result["passes"]["compute"] == [*whole, operator, *looked_at]


@pytest.mark.slow
def test_a_step_with_two_dtypes_and_with_unused_parameters(pools: Pools) -> None:
    for stage in STAGES:
        setting = config(stage, optimizer=ALL["AdamW"])
        for result in pools(2).run(f"{CASES}:step_costs", {"config": setting, "model": "TwoDtypes"}):
            assert sum(result["calls"]["update"]) == sum(result["calls"]["squares"]) / 2 == result["buckets"]
            assert [len(result["calls"][kind]) for kind in ("update", "squares")] == [2, 4]
        late = {"config": setting, "model": "Late", "ways": [["abc", "abc"], ["abc", "abc"], ["ab", "a"]]}
        for result in pools(2).run(f"{CASES}:step_costs", late):
            assert [len(result["calls"][kind]) for kind in ("update", "squares")] == [1, 2]
            assert result["passes"]["gradients"] == ["zerolite.squares_", "zerolite.adam_"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_torchs_optimizer_updates_several_buckets_in_one_call(pools: Pools, stage: int) -> None:
    """A call updates as many buckets as one bucket has elements on all ranks together."""
    limit = 128 if stage == 3 else 64  # stage 3's buckets are units, and smaller
    zero = {"reduce_bucket_size": limit, "allgather_bucket_size": limit}
    for precision in ("fp32", "bf16"):
        setting = config(stage, precision, 1, 0.01, ("AdamW", {"lr": 1e-3, "fused": True}), zero)
        for found in pools(2).run(f"{CASES}:torchs_calls", {"config": setting}):
            assert found["method"] == "PiecewiseUpdate" and len(found["masters"]) > 1
            groups = sub_groups(found["masters"], limit, 0)
            assert len(groups) < len(found["masters"]) or stage == 0
            calls = sum(any(found["pieces"][span.bucket] for span in group) for group in groups)
            assert found["_fused_adamw_"] == found["_foreach_mul_"] == calls and found["mul_"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_update_and_publish_called_one_after_the_other(pools: Pools, stage: int) -> None:
    for precision in ("bf16", "fp16"):
        setting = config(stage, precision, clip=CLIP, optimizer=ALL["AdamW"])
        for result in pools(2).run(f"{CASES}:two_phases", {"config": setting}):
            assert result["changed"] == [[False, True]] * 3
            assert_same_bits(result["parts"]["parameters"], result["whole"]["parameters"], precision)
            assert_same_bits(result["parts"]["masters"], result["whole"]["masters"], precision)


# -------------------------------------------------------------------- skipped steps, several engines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (0, "SGD dampening"),
        (1, "AdamW"),
        (2, "SGD dampening"),
        (3, "AdamW"),
        *(pytest.param(stage, name, marks=pytest.mark.slow) for stage in STAGES for name in ("Lion", "Adagrad")),
    ],
)
def test_a_skipped_step_leaves_no_trace(pools: Pools, stage: int, name: str) -> None:
    for precision, more in (("fp32", {}), ("fp16", {}), ("fp16", {"fp16": dynamic_fp16()})):
        setting = config(stage, precision, clip=CLIP, optimizer=ALL[name], **more)
        for result in pools(2).run(f"{CASES}:skip_one", {"config": setting}):
            assert (result["before"]["skipped"], result["after"]["skipped"]) == (0, 1)
            pairs = [("before", "after")]
            if not more:  # whose scale falls
                pairs.append(("with", "without"))
            for one, other in pairs:
                assert_same_bits(result[one]["parameters"], result[other]["parameters"], f"{one}, {other}")
                assert_same_bits(result[one]["masters"], result[other]["masters"], f"{one}, {other}: masters")
                assert_same_states(result[one]["states"], result[other]["states"], f"{one}, {other}")


def test_engines_in_turns(pools: Pools) -> None:
    configs = [
        config(stage, precision, clip=CLIP, optimizer=ALL[name])
        for stage, precision, name in ((3, "bf16", "AdamW"), (1, "fp32", "SGD nesterov"), (0, "fp16", "Lion"))
    ]
    together = pools(2).run(f"{CASES}:in_turns", {"configs": configs, "together": True})[1]
    apart = pools(2).run(f"{CASES}:in_turns", {"configs": configs, "together": False})[1]
    for one, other in zip(together, apart, strict=True):
        assert_same_bits(one["parameters"], other["parameters"], "in turns")
        assert_same_states(one["states"], other["states"], "in turns")


# -------------------------------------------------------------------- masters in 16 bits


def low_precision(
    optimizer: Optimizer, world: int, steps: int, dtype: torch.dtype, scale: float, rounded: bool
) -> dict[str, Tensor]:
    """Masters in ``dtype``; an update computes in fp32 and rounds once, ``rounded`` says whether the states too."""
    torch.set_num_threads(1)
    module = cases.make_model("OddModel").to(dtype)
    exact = {name: torch.nn.Parameter(p.detach().float()) for name, p in module.named_parameters()}
    cls, params = own(optimizer)
    update = cases.CLASSES[cls](exact.values(), **params)
    for step in range(steps):
        sums: dict[str, Tensor] = {}
        for rank in range(world):
            module.zero_grad()
            (cases.loss_of(module, "OddModel", step, 0, rank, None) * scale).backward()
            for name, p in module.named_parameters():
                if p.grad is not None:
                    sums[name] = sums[name] + p.grad.float() if name in sums else p.grad.float()
        for name, total in sums.items():
            exact[name].grad = (total / world).to(dtype).float() / scale
        update.step()
        for name, p in module.named_parameters():
            p.data.copy_(exact[name].data)
            exact[name].data.copy_(p.data)
            for key, value in update.state.get(exact[name], {}).items():
                if rounded and isinstance(value, Tensor) and key != "step":
                    value.copy_(value.to(dtype))
    return {name: p.detach() for name, p in module.named_parameters()}


LOW: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "bf16": ("bf16", torch.float32, {"bf16_master_weights_and_grads": True}),
    "bf16 states": ("bf16", torch.bfloat16, {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}),
    "fp16": ("fp16", torch.float32, {"loss_scale": 256.0, "fp16_master_weights_and_grads": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW"])
def test_masters_in_16_bits(pools: Pools, name: str, low: str) -> None:
    """An update in fp32 and one rounding: where torch's bits and ours differ in fp32, a rare value is rounded the other
    way, by one unit."""
    precision, states, options = LOW[low]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    optimizer = (ALL[name][0], {**ALL[name][1], "lr": 0.5 if name != "AdamW" else 0.01})
    wanted = low_precision(optimizer, 2, 5, dtype, options.get("loss_scale", 1.0), low == "bf16 states")
    runs = {
        str(stage): {
            "config": config(stage, optimizer=optimizer, **{precision: {"enabled": True, **options}}),
            "steps": 5,
        }
        for stage in (1, 2, 3)
    }
    ranks = pools(2).run(f"{CASES}:train_many", {"runs": runs})
    assert_stages_agree(ranks, list(runs))
    got = ranks[0]["1"]["parameters"]
    assert ranks[0]["1"]["masters"] == {}
    for state in ranks[0]["1"]["states"].values():
        assert {value.dtype for key, value in state.items() if key != "step"} == {states}
    different = torch.cat([(got[key] != value).flatten() for key, value in wanted.items()]).float().mean()
    for key, value in wanted.items():
        assert got[key].dtype == dtype
        difference = (got[key].float() - value.float()).abs()
        assert torch.all(difference <= EPSILON[precision] * value.float().abs() + 1e-6), key
    assert different <= FLIPPED
