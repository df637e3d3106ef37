"""Each parameter whole on one rank: exact numbers for optimizers that need whole matrices, at stages 1 and 2."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import config
from tests.toolkit.pool import Pools
from tests.toolkit.training import BATCHES, LOSSES, make_engine, snapshot, train_engine
from zerolite.planning import plan

STEPS = 3


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


def make(config: dict[str, Any], model: str) -> Any:
    """An engine with the config's optimizer, or with TrustRatio where it names none."""
    if "optimizer" in config:
        return make_engine(config, model)
    return make_engine(config, model, optimizer=TrustRatio)


def train(config: dict[str, Any], model: str) -> dict[str, Any]:
    """Train as training.train does; return the whole states, too, and how much of them this rank holds."""
    engine = make(config, model)
    result = train_engine(engine, model, STEPS)
    result["states"] = engine.full_optimizer_state_dict()["state"]
    shapes = {tuple(v.shape) for s in engine.optimizer.state.values() for v in s.values() if torch.is_tensor(v)}
    result["flat"] = bool(config["zero_optimization"]["stage"]) and max(map(len, shapes), default=2) < 2
    report = engine.memory_report()
    result["state bytes"] = report.items["optimizer_states"]
    return result


def overflow(config: dict[str, Any]) -> dict[str, Any]:
    """A run in which one rank's gradient of the second step is not finite."""
    engine = make(config, "Mlp")
    for step in range(STEPS):
        x, y = models.float_batch(step, 0, dist.get_rank())
        if step == 1 and dist.get_rank() == 0:
            x = x * float("inf")
        engine.backward(LOSSES["Mlp"](engine, (x, y)))
        engine.step()
    return {"parameters": snapshot(engine), "skipped": engine.skipped_steps}


def grow(config: dict[str, Any]) -> dict[str, Any]:
    """A run that unfreezes a layer, and goes back to this rank's state dict of the optimizer once."""
    model = models.build(models.Mlp)
    model.first.requires_grad_(False)
    engine = zerolite.initialize(model, config, optimizer=TrustRatio)
    train_engine(engine, "Mlp", 1)
    engine.module.first.requires_grad_(True)
    train_engine(engine, "Mlp", 2)
    saved = copy.deepcopy(engine.optimizer.state_dict())
    weights = engine.full_state_dict()
    train_engine(engine, "Mlp", 1)
    engine.load_full_state_dict(weights)
    engine.optimizer.load_state_dict(saved)
    train_engine(engine, "Mlp", 1)
    return held(engine)


def save(config: dict[str, Any], model: str, directory: str) -> dict[str, Any]:
    """Two steps, a checkpoint, and what the engine holds."""
    engine = make(config, model)
    train_engine(engine, model, 2)
    engine.save_checkpoint(Path(directory), tag="two")
    return held(engine)


def load(config: dict[str, Any], model: str, directory: str) -> dict[str, Any]:
    """Load the checkpoint: return the engine's values, and their values after one step."""
    engine = make(config, model)
    engine.load_checkpoint(Path(directory), tag="two")
    found = held(engine)
    engine.backward(LOSSES[model](engine, BATCHES[model](2, 0, 0)))
    engine.step()
    return {"held": found, "after": held(engine)}


def held(engine: Any) -> dict[str, Any]:
    return {
        "weights": engine.full_state_dict(dtype=torch.float32),
        "states": engine.full_optimizer_state_dict()["state"],
    }


def refusal(config: dict[str, Any]) -> str:
    try:
        zerolite.initialize(models.Mlp(), config)
    except ValueError as error:
        return str(error)
    return "no error"


def look_at_gradients(config: dict[str, Any]) -> dict[str, Any]:
    """A loop that clips, scales and reads ``p.grad``."""
    engine = make(config, "ConvNet")
    seen = []
    for step in range(STEPS):
        engine.backward(LOSSES["ConvNet"](engine, BATCHES["ConvNet"](step, 0, dist.get_rank())))
        parameters = list(engine.module.parameters())
        seen.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.5)))
        for parameter in parameters:
            parameter.grad.mul_(0.5).clamp_(-0.01, 0.01)
        seen.append([torch.tensor(parameter.grad.tolist()) for parameter in parameters])
        parameters[0].grad = seen[-1][0] * 2
        engine.step()
    return {"seen": seen, **held(engine)}


def interrupted(before: dict[str, Any], after: dict[str, Any], directory: str) -> dict[str, Any]:
    """A run that is saved after a step of two micro-batches and goes on in another engine, and one that is not
    interrupted."""
    results = {}
    for name in ("whole", "interrupted"):
        engine = make(before, "OddModel")
        for micro in range(4):
            engine.backward(LOSSES["OddModel"](engine, BATCHES["OddModel"](micro // 2, micro % 2, dist.get_rank())))
            engine.step()
            if micro == 1 and name == "interrupted":
                engine.save_checkpoint(Path(directory), tag="first")
                del engine
                engine = make(after, "OddModel")
                engine.load_checkpoint(Path(directory), tag="first")
        results[name] = held(engine)
        del engine
    return results


def grow_by_group(config: dict[str, Any]) -> dict[str, Any]:
    """A run of Muon by name that trains another layer from some step on, its matrix with Muon."""
    model = models.build(models.Mlp)
    model.first.requires_grad_(False)
    engine = zerolite.initialize(model, config)
    train_engine(engine, "Mlp", 1)
    model.first.weight.requires_grad_(True)
    engine.optimizer.add_param_group({"params": [model.first.weight], "lr": 0.03, "use_muon": True})
    model.first.bias.requires_grad_(True)
    engine.optimizer.add_param_group({"params": [model.first.bias]})
    train_engine(engine, "Mlp", 2)
    return {"lr": engine.get_lr(), **held(engine)}


# -------------------------------------------------------------------- the tests


ADAFACTOR = ("Adafactor", {"lr": 0.01})
SLOW = pytest.mark.slow
MUON = ("Muon" if hasattr(torch.optim, "Muon") else "Adafactor", {"lr": 0.02})
WHOLE = {"whole_parameters": True}


def settings(stage: int, optimizer: Any = ADAFACTOR, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    zero = more.pop("zero", {})
    made = config(stage, precision, zero=zero if stage else {}, optimizer=optimizer or ADAFACTOR, **more)
    if optimizer is None:
        del made["optimizer"]
    return made


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert_same_bits(found["parameters"], wanted["parameters"], "a parameter")
    torch.testing.assert_close(found["states"], wanted["states"], rtol=0, atol=0)
    assert found["losses"] == wanted["losses"] and found["skipped_steps"] == wanted["skipped_steps"]


@pytest.mark.fast("2-1-OddModel-None-more4", "3-2-OddModel-optimizer5-more5")
@pytest.mark.parametrize(
    ("world", "stage", "model", "optimizer", "more"),
    [
        (2, 1, "OddModel", ADAFACTOR, {}),
        (3, 2, "OddModel", None, {}),
        (2, 1, "ConvNet", None, {"accumulation": 2}),
        (2, 2, "OddModel", ADAFACTOR, {"precision": "bf16"}),
        (2, 1, "OddModel", None, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        (3, 2, "OddModel", MUON, {}),
        pytest.param(2, 1, "ConvNet", MUON, {"precision": "bf16", "accumulation": 2}, marks=SLOW),
        pytest.param(1, 2, "OddModel", ADAFACTOR, {}, marks=SLOW),
        pytest.param(4, 1, "OddModel", ADAFACTOR, {}, marks=SLOW),
        pytest.param(4, 2, "OddModel", None, {"precision": "fp16"}, marks=SLOW),
        pytest.param(3, 1, "ConvNet", None, {"precision": "bf16"}, marks=SLOW),
        pytest.param(3, 1, "EncoderDecoder", ADAFACTOR, {"accumulation": 2}, marks=SLOW),
        pytest.param(2, 1, "ConvNet", ADAFACTOR, {"accumulation": 2}, marks=SLOW),
        pytest.param(2, 2, "OddModel", None, {"zero": {"reduce_scatter": False}}, marks=SLOW),
        pytest.param(3, 2, "OddModel", None, {"zero": {"reduce_bucket_size": 10**6}}, marks=SLOW),
        pytest.param(2, 2, "OddModel", ("AdamW", {"lr": 0.01, "foreach": True}), {"zero": WHOLE}, marks=SLOW),
        pytest.param(2, 1, "OddModel", ("AdamW", {"lr": 0.01}), {"zero": WHOLE, "precision": "bf16"}, marks=SLOW),
    ],
)
def test_a_run_has_the_bits_of_stage_0(
    pools: Pools, world: int, stage: int, model: str, optimizer: Any, more: dict[str, Any]
) -> None:
    wanted = pools(world).run(train, {"config": settings(0, optimizer, **more), "model": model})
    found = pools(world).run(train, {"config": settings(stage, optimizer, **more), "model": model})
    for here, there in zip(found, wanted, strict=True):
        assert_same(here, there)
    if optimizer is not MUON or model != "ConvNet":  # which has no matrices
        assert not all(rank["flat"] for rank in found)
    if world > 1:
        assert max(rank["state bytes"] for rank in found) < max(rank["state bytes"] for rank in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 2])
def test_disk_and_clipping_agree_with_stage_0(pools: Pools, tmp_path: Path, stage: int) -> None:
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    for more in ({"clip": 0.05}, {"zero": zero}):
        for optimizer in (None, ADAFACTOR):
            runs = [settings(s, optimizer, **dict(more)) for s in (0, stage)]
            wanted, found = (pools(2).run(train, {"config": c, "model": "OddModel"})[0] for c in runs)
            torch.testing.assert_close(found["parameters"], wanted["parameters"], rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(pools: Pools) -> None:
    wanted, found = (pools(2).run(overflow, {"config": settings(stage, None)}) for stage in (0, 2))
    for here, there in zip(found, wanted, strict=True):
        assert here["skipped"] == there["skipped"] == 1
        assert_same_bits(here["parameters"], there["parameters"], "a parameter")


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=SLOW)])
def test_unfrozen_parameters_and_state_dicts(pools: Pools, stage: int) -> None:
    wanted, found = (pools(2).run(grow, {"config": settings(s, None)}) for s in (0, stage))
    for here, there in zip(found, wanted, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)


@pytest.mark.skipif(MUON[0] != "Muon", reason="torch has no Muon")
def test_a_group_is_added_to_muon(pools: Pools) -> None:
    wanted, found = (pools(2).run(grow_by_group, {"config": settings(s, MUON)}) for s in (0, 2))
    for here, there in zip(found, wanted, strict=True):
        assert here["lr"] == [0.02, 0.02, 0.03, 0.02] and len(here["states"]) == 4
        torch.testing.assert_close(here, there, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 2])
def test_gradients_in_the_loop(pools: Pools, stage: int) -> None:
    wanted, found = (pools(2).run(look_at_gradients, {"config": settings(s, None)}) for s in (0, stage))
    for here, there in zip(found, wanted, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-7)


ADAMW = ("AdamW", {"lr": 0.01, "foreach": True})


@pytest.mark.fast("saved1-loaded1-None-whole1")
@pytest.mark.parametrize(
    ("saved", "loaded", "optimizer", "whole"),
    [
        ((2, 1), (3, 2), ADAFACTOR, (True, True)),
        ((2, 2), (1, 1), None, (True, True)),
        ((2, 2), (2, 3), ADAMW, (True, False)),
        ((2, 1), (3, 2), MUON, (True, True)),
        pytest.param((1, 0), (2, 1), ADAFACTOR, (True, True), marks=SLOW),
        pytest.param((2, 1), (3, 0), ADAFACTOR, (True, True), marks=SLOW),
        pytest.param((3, 1), (2, 1), None, (True, True), marks=SLOW),
        pytest.param((2, 3), (3, 1), ADAMW, (False, True), marks=SLOW),
        pytest.param((3, 1), (2, 1), ADAMW, (False, True), marks=SLOW),
    ],
)
def test_checkpoints_load_at_other_worlds_and_stages(
    pools: Pools, tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int], optimizer: Any, whole: Any
) -> None:
    """(world, stage) of the run that saves and of the one that loads; whether parameters are whole in each."""
    kwargs = {"model": "OddModel", "directory": str(tmp_path)}
    zero = [WHOLE if flag and optimizer is ADAMW else {} for flag in whole]
    before, after = (settings(s, optimizer, zero=z) for (_, s), z in zip((saved, loaded), zero, strict=True))
    (wanted, *_) = pools(saved[0]).run(save, {"config": before, **kwargs})
    found = pools(loaded[0]).run(load, {"config": after, **kwargs})
    (alone,) = pools(1).run(load, {"config": settings(0, optimizer), **kwargs})
    for rank in found:
        torch.testing.assert_close(rank["held"], wanted, rtol=0, atol=0)
        torch.testing.assert_close(rank["after"], alone["after"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(2, 1, marks=SLOW), pytest.param(0, 1, marks=SLOW)])
def test_a_run_with_accumulation_goes_on(pools: Pools, tmp_path: Path, before: int, after: int) -> None:
    configs = [settings(stage, MUON, accumulation=2) for stage in (before, after)]
    kwargs = {"before": configs[0], "after": configs[1], "directory": str(tmp_path)}
    for rank in pools(2).run(interrupted, kwargs):
        torch.testing.assert_close(rank["interrupted"], rank["whole"], rtol=1e-5, atol=1e-6)


def test_stage_3_says_what_to_do(pools: Pools) -> None:
    for made, words in ((settings(3), "Adafactor"), (settings(3, ADAMW, zero=WHOLE), "whole_parameters")):
        (sentence,) = pools(1).run(refusal, {"config": made})
        assert words in sentence and "stage 1 or 2" in sentence


@pytest.mark.slow
def test_a_plan_shows_the_padding() -> None:
    from tests.toolkit import models

    made = plan(models.Chain, settings(2, ADAFACTOR, zero={"reduce_bucket_size": 1}), 8, device="cpu")
    numel = 12 * 384 * 384
    assert numel * 4 < made.states["compute_parameters"] <= numel * 4 * 1.34
