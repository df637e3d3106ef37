"""Each parameter updated as a whole on one rank: exact numbers for optimizers that need that, at stages 1 to 3."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits, assert_same_on_ranks, states_of_all
from tests.toolkit.configs import PARTITIONED, at, config
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import BATCHES, LOSSES, make_engine, raised, raises, train_engine
from zerolite.comm.recorder import record

STEPS = 3
ADAFACTOR = ("Adafactor", {"lr": 0.01})
ADAMW = ("AdamW", {"lr": 0.01, "foreach": True})
WHOLE = {"whole_parameters": True}


class TrustRatio(torch.optim.Optimizer):
    """Momentum scaled by norms of the whole parameter, as in LAMB."""

    zerolite_elementwise = False

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                assert p.grad.shape == momentum.shape == p.shape
                momentum.mul_(0.9).add_(p.grad)
                state["ratio"] = p.norm() / momentum.norm().clamp(min=1e-3)
                p.add_(momentum, alpha=-group["lr"] * float(state["ratio"].clamp(0.1, 10)))


def settings(stage: int, optimizer: Any = ADAFACTOR, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    """optimizer: None is for TrustRatio."""
    zero = more.pop("zero", {})
    made = config(stage, precision, zero=zero if stage else {}, optimizer=optimizer or ADAFACTOR, **more)
    if optimizer is None:
        del made["optimizer"]
    return made


def make(config: dict[str, Any], model: str) -> Any:
    return make_engine(config, model, **({} if "optimizer" in config else {"optimizer": TrustRatio}))


def train(stage: int, model: str, optimizer: Any = None, **more: Any) -> dict[str, Any]:
    engine = make(settings(stage, optimizer, **more), model)
    found = train_engine(engine, model, STEPS)
    found["states"] = states_of_all(engine)
    found["bytes"] = engine.memory_report().items["optimizer_states"]
    return found


def held(engine: Any) -> dict[str, Any]:
    return {
        "weights": engine.full_state_dict(dtype=torch.float32),
        "states": states_of_all(engine),
    }


RUNS: dict[str, tuple[int, int, str, Any, dict[str, Any]]] = {  # ranks, stage, model, optimizer, further settings
    "alone": (1, 2, "OddModel", ADAFACTOR, {}),
    "offload": (2, 1, "OddModel", None, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
    "bf16": (2, 2, "OddModel", ADAFACTOR, {"precision": "bf16"}),
    "reduce_scatter": (2, 2, "OddModel", None, {"zero": {"reduce_scatter": False}}),
    "AdamW": (2, 2, "OddModel", ADAMW, {"zero": WHOLE, "precision": "bf16"}),
    "ConvNet": (2, 1, "ConvNet", ADAFACTOR, {"precision": "bf16", "accumulation": 2}),
    "stage 3": (3, 3, "OddModel", ADAFACTOR, {"zero": PARTITIONED["moving"]}),
    "stage 3 in fp16": (2, 3, "OddModel", None, {"precision": "fp16", "zero": PARTITIONED["tight"]}),
    "stage 3 offload": (
        *(2, 3, "ConvNet", None),
        {"zero": {**PARTITIONED["moving"], "offload_optimizer": {"device": "cpu"}}, "precision": "bf16"},
    ),
    "EncoderDecoder": (3, 1, "EncoderDecoder", ADAFACTOR, {"accumulation": 2}),
    "fp16": (4, 2, "OddModel", None, {"precision": "fp16"}),
}


@pytest.mark.fast("offload", "stage 3")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_bits_of_stage_0(pools: Pools, name: str) -> None:
    world, stage, model, optimizer, more = RUNS[name]
    given = {"model": model, "optimizer": optimizer, **more}
    wanted, found = (pools(world).run(train, {"stage": s, **given}) for s in (0, stage))
    for here, there in zip(found, wanted, strict=True):
        assert_same_bits(here["parameters"], there["parameters"], "a parameter")
        torch.testing.assert_close(here["states"], there["states"], rtol=0, atol=0)
        assert here["losses"] == there["losses"] and here["skipped_steps"] == there["skipped_steps"]
    if world > 1:
        assert max(rank["bytes"] for rank in found) < max(rank["bytes"] for rank in wanted)


@pytest.mark.slow
@on_ranks(2)
def test_clipping_agrees_with_stage_0() -> None:
    for stage in (1, 2, 3):
        for optimizer in (None, ADAFACTOR):
            wanted, found = (train(s, "OddModel", optimizer, clip=0.05)["parameters"] for s in (0, stage))
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@on_ranks(4)
def test_sets_of_ranks_agree_with_stage_0() -> None:
    """The ranks of both sets split the states."""
    zero = {**PARTITIONED["moving"], "zero_hpz_partition_size": 2}
    wanted, found = train(0, "OddModel")["parameters"], train(3, "OddModel", zero=zero)["parameters"]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def grow(stage: int) -> dict[str, Any]:
    """A run that unfreezes a layer, and goes back to this rank's state dict of the optimizer once."""
    model = models.build(models.Mlp)
    model.first.requires_grad_(False)
    engine = zerolite.initialize(model, settings(stage, None), optimizer=TrustRatio)
    train_engine(engine, "Mlp", 1)
    engine.module.first.requires_grad_(True)
    train_engine(engine, "Mlp", 2)
    saved, weights = copy.deepcopy(engine.optimizer.state_dict()), engine.full_state_dict()
    train_engine(engine, "Mlp", 1)
    engine.load_full_state_dict(weights)
    engine.optimizer.load_state_dict(saved)
    train_engine(engine, "Mlp", 1)
    return held(engine)


@on_ranks(2)
def test_unfrozen_parameters_and_state_dicts() -> None:
    wanted = grow(0)
    for stage in (1, 2, 3):
        torch.testing.assert_close(grow(stage), wanted, rtol=0, atol=0)


@pytest.mark.slow
@on_ranks(2)
def test_a_state_dict_of_other_owners_is_refused() -> None:
    """Parameters that are trained later have owners by what the ranks have then, in buckets of the same sizes."""
    made = settings(2, None, zero={"reduce_bucket_size": 1})
    model = models.build(models.Mlp)
    model.first.requires_grad_(False)
    later = zerolite.initialize(model, made, optimizer=TrustRatio, model_parameters=model.parameters())
    train_engine(later, "Mlp", 1)
    model.first.requires_grad_(True)
    train_engine(later, "Mlp", 1)
    engine = make(made, "Mlp")
    train_engine(engine, "Mlp", 2)
    saved = later.optimizer.state_dict()
    assert saved["partition"]["buckets"] == engine.optimizer.state_dict()["partition"]["buckets"]
    with raises(ValueError, "with {'owners': {'", "each rank loads the state that it has saved itself"):
        engine.optimizer.load_state_dict(saved)


class FromStart(TrustRatio):
    """Its constructor keeps a number of the values, and its steps go back to it."""

    zerolite_elementwise = False

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["at_start"] = p.detach().norm()

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(self.state[p]["at_start"] / p.data.norm())


@pytest.mark.slow
@on_ranks(2)
def test_a_constructor_may_read_the_values() -> None:
    found = []
    for stage in (0, 1, 3):
        made = settings(stage, None, zero={} if stage < 3 else PARTITIONED["moving"])
        engine = make_engine(made, "Mlp", optimizer=FromStart)
        train_engine(engine, "Mlp", 2)
        found.append(held(engine)["weights"])
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=1e-6, atol=1e-6)


def save(config: dict[str, Any], directory: str) -> dict[str, Any]:
    """Two steps, a checkpoint, and what the engine holds."""
    engine = make(config, "OddModel")
    train_engine(engine, "OddModel", 2)
    engine.save_checkpoint(Path(directory), tag="two")
    return held(engine)


def load(config: dict[str, Any], directory: str) -> dict[str, Any]:
    """Load the checkpoint: return the engine's values, and their values after one step."""
    engine = make(config, "OddModel")
    engine.load_checkpoint(Path(directory), tag="two")
    found = held(engine)
    engine.backward(LOSSES["OddModel"](engine, BATCHES["OddModel"](2, 0, 0)))
    engine.step()
    return {"held": found, "after": held(engine)}


@pytest.mark.fast("saved1-loaded1-None")
@pytest.mark.parametrize(
    ("saved", "loaded", "optimizer"),
    [((2, 1), (3, 2), ADAFACTOR), ((2, 2), (1, 1), None), ((2, 3), (3, 2), None), ((1, 0), (2, 3), ADAFACTOR)],
)
def test_checkpoints_load_at_other_worlds_and_stages(
    pools: Pools, tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int], optimizer: Any
) -> None:
    """The cases have (world, stage) of the run that saves and of the one that loads."""
    before = settings(saved[1], optimizer)
    after = settings(loaded[1], optimizer)
    (wanted, *_) = pools(saved[0]).run(save, {"config": before, "directory": str(tmp_path)})
    found = pools(loaded[0]).run(load, {"config": after, "directory": str(tmp_path)})
    (alone,) = pools(1).run(load, {"config": settings(0, optimizer), "directory": str(tmp_path)})
    for rank in found:
        torch.testing.assert_close(rank["held"], wanted, rtol=0, atol=0)
        torch.testing.assert_close(rank["after"], alone["after"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@on_ranks(2)
def test_a_model_that_zero_init_has_built() -> None:
    made = settings(3, zero=PARTITIONED["moving"])
    with zerolite.zero.Init(config_dict_or_path=made):
        inside = zerolite.initialize(models.build(models.Mlp), made)
    train_engine(inside, "Mlp", 2)
    outside = make(made, "Mlp")
    train_engine(outside, "Mlp", 2)
    torch.testing.assert_close(held(inside), held(outside), rtol=0, atol=0)
    said = raised(zerolite.get_full_optimizer_state, inside.module.first.weight, "row_var")
    assert "no optimizer state 'row_var' of its elements" in said, "rows have a value each"


@on_ranks(2)
def test_a_rank_that_leaves_an_update_out_exchanges_what_the_others_do() -> None:
    """Clipping has collected statistics before this rank finds that it cannot update. The others get its masters."""
    engine = make(settings(2, None, consistency_check_interval=0), "Mlp")
    train_engine(engine, "Mlp", 1)
    weights = [parameter.detach().clone() for parameter in engine._parts.buffer.parameters]
    method, updated = engine.optimizer.method, {}
    step_inner = method._step_inner

    def look(sub_group: Any, shards: Any, *others: Any) -> None:
        updated.update({shard.index: shard.tensor.detach().clone() for shard in shards})
        step_inner(sub_group, shards, *others)

    method._step_inner = look
    engine.backward(LOSSES["Mlp"](engine, BATCHES["Mlp"](1, 0, engine.rank)))
    engine.clip_gradients(100.0)
    if engine.rank:
        next(iter(engine.optimizer.state.values()))["momentum"] = torch.zeros(1)
    with record() as recorder:
        assert raised(engine.step) == ""
    assert_same_on_ranks({"calls": repr([(call.op, call.tag) for call in recorder.calls])})
    assert bool(updated) is (engine.rank == 0)
    assert all(torch.equal(values, weights[index]) for index, values in updated.items())
    assert "this rank alone has left that update out" in raised(train_engine, engine, "Mlp", 1)


@on_ranks(1)
def test_states_on_disk_are_refused(tmp_path: Path) -> None:
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with raises(ValueError, "Adafactor", 'got "nvme"', "Use another device"):
        zerolite.initialize(models.Mlp(), settings(1, zero=zero))


class Around(torch.optim.Optimizer):
    """An optimizer around another one, whose groups it shares and in which it counts steps (timm's Lookahead)."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {"count": 0})
        self.base, self.param_groups = base, base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for group in self.base.param_groups:
            group["count"] += 1
            for parameter in group["params"] if group["count"] % 2 == 0 else ():
                if parameter.grad is not None:
                    parameter.mul_(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_an_optimizer_that_counts_in_groups_over_several_buckets(stage: int, tmp_path: Path) -> None:
    """On disk each update of a bucket is a call of it, and a step counts once, also on a rank without a part of a
    group."""
    found = []
    for plain in (True, False):
        model = models.build(models.Mlp)
        *parameters, last = model.parameters()
        weights = [p for p in parameters if p.dim() > 1]
        others = [p for p in parameters if p.dim() == 1]
        groups = [{"params": weights}, {"params": others, "lr": 0.125}, {"params": [last]}]
        own = Around(torch.optim.SGD(groups, lr=0.0625))
        disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "sub_group_size": 1}
        made = at(stage, zero=disk if stage == 2 else {})
        del made["optimizer"]
        forward: Any = model
        if not plain:
            forward = engine = zerolite.initialize(
                model, {**made, "zero_allow_untested_optimizer": True}, optimizer=own
            )
        for step in range(4):
            models.square_loss(forward, models.float_batch(step, 0, 0)).backward()
            own.step()
            own.zero_grad()
        assert [group["count"] for group in own.param_groups] == [4, 4, 4]
        found.append(dict(model.named_parameters()) if plain else engine.full_state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value.detach(), rtol=1e-6, atol=1e-7)
