"""The engine's optimizers by zerolite's kernels: against torch's own implementation, stage against stage, and in steps
with states that are loaded, with kernels that are missing, and that are skipped; and what a step launches."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.toolkit import models
from tests.toolkit.compare import CLIP, assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import Optimizer, at, config
from tests.toolkit.faults import Warnings, poison
from tests.toolkit.lockstep import skipping_on_device
from tests.toolkit.optimizers import (
    assert_same_facts,
    by_name,
    counted,
    engine_steps,
    facts,
    loss_of,
    plain,
    torchs,
    train,
    without_kernels,
)
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine, run_steps

EXACT: dict[str, Optimizer] = {  # the kernels do torch's operations in torch's order
    "SGD": ("SGD", {"lr": 0.05}),
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
    "Adagrad": ("Adagrad", {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.1}),
}
ALL = {**EXACT, **CLOSE}
STAGES = (0, 1, 2, 3)
# A step of Adam is lr at most; where a gradient nearly cancels, regrouping the batch moves it by a share of that.
ADAM_SHARE = 0.02
NEAR_SHARE = 0.002  # of lr, where the batch is not regrouped
# By step, the layers of two ranks: b comes at step 2, c at step 3 and on one rank; each is left out at times.
LATE = [["a", "a"], ["a", "a"], ["ab", "a"], ["b", "bc"], ["ab", "ab"], ["ac", "a"], ["abc", "bc"]]
LATE_COUNTS = {"a": 6, "b": 4, "c": 3}


def at_stages(
    optimizer: Optimizer, precision: str = "fp32", stages: Any = STAGES, clip: float = 0.0, micros: int = 1, **run: Any
) -> dict[int, dict[str, Any]]:
    """One run per stage by the kernels; stages that add and reduce in the same order have the same bits, on all ranks.
    Stage 3 releases every parameter after its use, unless ranks use different ones."""
    found = {}
    for stage in stages:
        made = at("3 defaults" if stage == 3 and "branches" in run else stage, precision, micros, clip, optimizer)
        if "own" in run:
            del made["optimizer"]
        result = found[stage] = train(made, **run)
        assert (result["method"], result["skipped"]) == ("KernelUpdate", 0)
        assert_same_on_ranks(result["parameters"], f"stage {stage}")
        first = 2 if stage > 2 and micros > 1 else 0
        if first in found and not (stage == 2 and micros > 1):
            assert_same_bits(result["parameters"], found[first]["parameters"], f"stages {first} and {stage}")
    return found


def assert_close(parameters: dict[str, Tensor], module: nn.Module, optimizer: Optimizer, what: str = "") -> None:
    """Parameters that differ by the grouping of sums, at most."""
    bound = 1e-6 if optimizer[0] == "SGD" else ADAM_SHARE * optimizer[1]["lr"]
    for name, wanted in module.named_parameters():
        if wanted.numel():
            difference = (parameters[name].float() - wanted.detach()).abs().max()
            assert difference <= bound, f"{what}, {name}: {difference} > {bound}"


def assert_near(parameters: dict[str, Tensor], wanted: dict[str, Tensor], name: str) -> None:
    """Parameters that have been updated by kernels and by torch from the same gradients: the same bits, or apart by a
    few roundings and what they do to later gradients."""
    if name in EXACT:
        assert_same_bits(parameters, wanted, name)
    torch.testing.assert_close(parameters, wanted, rtol=1e-6, atol=NEAR_SHARE * ALL[name][1]["lr"])


# -------------------------------------------------------------------- stages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [("Adam L2", "fp32"), ("Lion", "fp32"), ("SGD dampening", "bf16"), ("Adagrad", "bf16"), ("AdamW", "fp16")],
)
@on_ranks(2, 3)
def test_stages_give_the_same_bits(name: str, precision: str) -> None:
    at_stages(ALL[name], precision, clip=CLIP)
    at_stages(ALL[name], precision, clip=CLIP, micros=3)
    if precision == "fp32":
        assert_close(at_stages(ALL[name])[0]["parameters"], plain(ALL[name])[0], ALL[name])


@pytest.mark.fast("2-AdamW")
@pytest.mark.parametrize("name", ["SGD dampening", "AdamW"])
@on_ranks(2)
def test_the_states_of_a_users_own_optimizer_are_adopted(name: str) -> None:
    module, theirs = plain(ALL[name], 6)
    found = at_stages(ALL[name], steps=6, own=torchs(ALL[name]), before=3)
    assert_close(found[0]["parameters"], module, ALL[name])
    for key, p in module.named_parameters():
        if "step" in theirs.state.get(p, {}) and key in found[0]["states"]:
            assert found[0]["states"][key]["step"] == theirs.state[p]["step"] == 6


@pytest.mark.fast("2-SGD dampening-fp32")
@pytest.mark.parametrize(("name", "precision"), [("SGD dampening", "fp32"), ("AdamW", "fp32"), ("Adagrad", "bf16")])
@on_ranks(2)
def test_late_and_unused_parameters(name: str, precision: str) -> None:
    """Each parameter counts its own steps; one that no rank has used keeps its value and has no state."""
    given: dict[str, Any] = {"model": "Late", "steps": len(LATE), "branches": LATE}
    found = at_stages(ALL[name], precision, **given)
    if precision == "fp32":
        assert_close(found[0]["parameters"], plain(ALL[name], **given)[0], ALL[name])
    start = models.build(models.Late).get_parameter("never.weight").detach()
    for result in found.values():
        never = result["parameters"]["never.weight"]
        assert torch.equal(never, start.to(never.dtype))
        assert not {"never.weight", "never.bias"} & set(result["states"])
        if name != "SGD dampening":
            counts = {key: int(state["step"]) for key, state in result["states"].items()}
            assert counts and counts == {key: LATE_COUNTS[key[0]] for key in counts}


# -------------------------------------------------------------------- saving


def save_and_load(first: dict[str, Any], second: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Three steps with config ``first``, a save, three more; and the same three by another engine with config
    ``second`` that loads what was saved, the module's values first. Gives the facts of both engines."""
    engine, resumed = make_engine(first, "Late"), make_engine(second, "Late")
    engine_steps(engine, "Late", range(3), LATE)
    values, saved = engine.full_state_dict(), copy.deepcopy(engine.optimizer.state_dict())
    engine_steps(engine, "Late", range(3, 6), LATE)
    resumed.load_full_state_dict(values)
    resumed.optimizer.load_state_dict(saved)
    loaded = facts(resumed)
    assert_same_facts({**loaded, "states": by_name(engine, saved["state"])}, loaded, "at once")
    assert "c.weight" not in loaded["states"]  # its first gradient comes afterwards
    engine_steps(resumed, "Late", range(3, 6), LATE)
    return facts(engine), facts(resumed)


@pytest.mark.fast("2-SGD dampening")
@pytest.mark.parametrize("name", ["SGD dampening", "AdamW"])
@on_ranks(2)
def test_states_travel_between_kernels_and_torchs_implementation(name: str) -> None:
    foreach = (ALL[name][0], {**ALL[name][1], "foreach": True})
    methods = {"KernelUpdate": ALL[name], "TorchUpdate": foreach}
    for stage, (first, second) in ((0, list(methods)), (2, list(methods)[::-1])):
        wanted, resumed = save_and_load(*(config(stage, optimizer=methods[one]) for one in (first, second)))
        assert (wanted["method"], resumed["method"]) == (first, second)
        assert_near(resumed["parameters"], wanted["parameters"], name)


# -------------------------------------------------------------------- kernels that are not there


@pytest.mark.fast("3-Adagrad-ranks2-stages2")
@pytest.mark.parametrize(
    ("name", "ranks", "stages"),
    [("AdamW", [1], [0, 2]), ("Lion", [0, 1, 2], [3]), ("Adagrad", [0, 2], [0]), ("SGD dampening", [0], STAGES)],
)
@on_ranks(3)
def test_without_kernels_on_a_rank_all_use_torchs(name: str, ranks: list[int], stages: list[int]) -> None:
    module, _ = plain(ALL[name])
    for stage in stages:
        reason = f"the compiler of {name} is on holiday at stage {stage}. Call it back."
        setting = config(stage, optimizer=ALL[name])
        with Warnings() as warnings, without_kernels(ranks, reason), counted() as calls:
            result, again = train(setting), train(setting)
        assert calls["update"] == []
        assert (result["method"], result["fused"]) == ("TorchUpdate", True if name == "AdamW" else None)
        if dist.get_rank() == max(ranks):  # which tells for all, once for both engines
            (told,) = warnings.messages
            for word in (f"rank {max(ranks)}", "CPU kernels are not available", reason, "torch's optimizers"):
                assert word in told
        else:
            assert warnings.messages == []
        assert_same_bits(result["parameters"], again["parameters"], "a second engine")
        assert_same_on_ranks(result["parameters"])
        assert_close(result["parameters"], module, ALL[name], f"stage {stage}")


# -------------------------------------------------------------------- what a step costs


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(1, 2)
def test_a_step_is_one_norm_launch_and_one_update_launch(stage: int) -> None:
    """One of each dtype for all buckets, and also where parameters are unused."""
    unused = [["abc", "abc"], ["abc", "abc"], ["ab", "a"]]
    for model, precision, micros, branches, dtypes in (
        ("Mlp", "bf16", 3, None, 1),
        ("TwoDtypes", "fp32", 1, None, 2),
        ("Late", "fp32", 1, unused, 1),
    ):
        engine = make_engine(config(stage, precision, micros, 0.01, ALL["AdamW"]), model)
        engine_steps(engine, model, range(2), branches)
        for micro in range(micros):
            engine.backward(loss_of(engine, model, 2, micro, dist.get_rank(), branches))
            with counted() as calls:
                engine.step()
        buckets = len(engine._parts.buffer.buckets)
        for kind in ("update", "squares"):
            assert (len(calls[kind]), sum(calls[kind])) == (dtypes, buckets), (model, kind)


@pytest.mark.slow
@on_ranks(1)
def test_states_are_there_after_a_first_step_that_the_device_has_skipped() -> None:
    with skipping_on_device(True):
        engine = make_engine(config(0, optimizer=ALL["AdamW"]), "Mlp")
    handle = poison(engine, "second.weight", math.inf)
    run_steps(engine, 1)
    handle.remove()
    assert not engine.optimizer.state and not engine.optimizer.state_dict()["state"]
    run_steps(engine, 2)
    states = engine.optimizer.state_dict()["state"]
    assert [float(state["step"]) for state in states.values()] == [2.0] * len(list(engine.module.parameters()))
    assert len(engine.optimizer.state) == len(states) and engine.skipped_steps == 1
