"""Sums over replicas once a step at stages 2 and 3: what travels between the sets, and what users do between two
backwards of a step. Pairs of ranks divide everything, and two pairs hold the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import CLIP, assert_same_on_ranks
from tests.toolkit.configs import SGD, at, dynamic_fp16
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine, run_steps, snapshot

PAIRS = {"shard_size": 2}
STAGES = pytest.mark.parametrize("stage", ["2", "3 tight"])
MICRO = 3


def make(stage: str, zero: dict[str, Any], precision: str = "fp32", accumulation: int = MICRO, **more: Any) -> Any:
    return make_engine(at(stage, precision, accumulation, CLIP, SGD, zero=zero, **more), "Mlp")


def backward(engine: Any, step: int, micro: int, factor: float = 1.0) -> None:
    x, y = models.float_batch(step, micro, engine.rank)
    dtype = next(engine.parameters()).dtype
    engine.backward(nn.functional.mse_loss(engine(x.to(dtype)).float(), y) * factor)


def traffic(zero: dict[str, Any], stage: str, between: Callable[[Any], Any] = lambda engine: None) -> dict[str, int]:
    """Return the number of reductions of a step, by dimension and operation. ``between`` is called after the first
    backward."""
    engine = make(stage, zero)
    run_steps(engine, 2)  # the first one finds the order of the buckets
    with zerolite.comm.record() as recorder:
        for micro in range(MICRO):
            backward(engine, 2, micro)
            if micro == 0:
                between(engine)
            engine.step()
    found: dict[str, int] = {"buckets": len(engine._parts.buffer.buckets)}
    for call in recorder.calls:
        if call.tag == "gradients":
            name = f"{call.dimension} {call.op}"
            found[name] = found.get(name, 0) + 1
    return found


@pytest.mark.slow
@STAGES
@on_ranks(4)
def test_gradients_cross_between_sets_once_a_step(stage: str) -> None:
    found = traffic(PAIRS, stage)
    buckets = found["buckets"]
    assert found == {"buckets": buckets, "shard reduce_scatter": MICRO * buckets, "replicate all_reduce": buckets}
    assert buckets > 1
    # What is read after the first backward is complete, and the two others are summed over replicas each.
    found = traffic(PAIRS, stage, lambda engine: engine.module.first.weight.grad.norm())
    assert found["replicate all_reduce"] == 3 * buckets and found["shard reduce_scatter"] == MICRO * buckets
    if stage.startswith("3"):  # in every backward, into stretches of the parts
        found = traffic({"zero_hpz_partition_size": 2}, stage)
        assert found["replicate reduce_scatter"] == MICRO * found["buckets"]


# -------------------------------------------------------------------- what happens between two backwards


def read(engine: Any, values: dict[str, Any]) -> None:
    values["sum"] = engine.module.first.weight.grad.sum()  # without the statistics
    values["norm"] = engine.module.first.weight.grad.norm()
    values["gradient"] = zerolite.get_full_grad(engine.module.second.weight)


def change(engine: Any, values: dict[str, Any]) -> None:
    engine.module.first.weight.grad.mul_(0.5)
    engine.module.second.bias.grad = None


def clip(engine: Any, values: dict[str, Any]) -> None:
    values["norm"] = torch.nn.utils.clip_grad_norm_(engine.parameters(), 0.01)


def drop(engine: Any, values: dict[str, Any]) -> None:
    engine.zero_grad()
    backward(engine, 7, 0)


def wait(engine: Any, values: dict[str, Any]) -> None:
    """Read when all reductions have ended, as behind a save."""
    engine._parts.reducer.wait()
    values["sum"] = engine.module.first.weight.grad.sum()
    values["other sum"] = engine.module.second.weight.grad.sum()


def fail(engine: Any, values: dict[str, Any]) -> None:
    """Raise on one rank, in the middle of a backward that all ranks then drop."""

    def stop(gradient: torch.Tensor) -> None:
        raise RuntimeError("stop")

    x, y = models.float_batch(8, 0, engine.rank)
    loss = nn.functional.mse_loss(engine(x), y)
    if engine.rank == 0:
        hook = engine.module.first.weight.register_hook(stop)
        with pytest.raises(RuntimeError, match="stop"):
            engine.backward(loss)
        hook.remove()
    else:
        engine.backward(loss)
    engine.zero_grad()
    backward(engine, 8, 0)


def evaluate(engine: Any, values: dict[str, Any]) -> None:
    with torch.no_grad():
        values["output"] = engine.eval()(models.float_batch(7, 0, 0)[0])
    engine.train()


BETWEEN = {action.__name__: action for action in (read, change, clip, drop, wait, fail, evaluate)}


@pytest.mark.fast("4-change-3 tight")
@STAGES
@pytest.mark.parametrize("name", BETWEEN)
@on_ranks(4)
def test_between_two_backwards(stage: str, name: str) -> None:
    """Values and weights are those without replicas. The action comes after the first backward, and after the second
    one of the next step."""
    runs = []
    for zero in ({}, PAIRS, {**PAIRS, "offload_optimizer": {"device": "cpu"}}):
        engine, values = make(stage, zero), {}
        for step in range(3):
            for micro in range(MICRO):
                backward(engine, step, micro)
                if (step, micro) in ((0, 0), (1, 1)):
                    BETWEEN[name](engine, values)
                engine.step()
        assert_same_on_ranks(snapshot(engine))
        runs.append({**values, **snapshot(engine)})
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@STAGES
@on_ranks(4)
def test_a_backward_that_closes_behind_dropped_gradients(stage: str) -> None:
    """It has nothing to add to: the sums of the set alone were dropped too."""
    runs = []
    for zero in ({}, PAIRS):
        engine = make(stage, zero)
        backward(engine, 0, 0)
        engine.zero_grad()
        engine.set_gradient_accumulation_boundary(True)
        run_steps(engine, 1)
        runs.append(snapshot(engine))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@STAGES
@on_ranks(4)
def test_sums_behind_no_sync_are_in_fp32(stage: str) -> None:
    """The config expects one backward a step, and the mean of several has more bits than a single gradient."""
    means = []
    for zero in ({}, PAIRS):
        engine = make(stage, zero, "bf16", 1)
        with engine.no_sync():
            backward(engine, 0, 0)
        backward(engine, 0, 1)
        engine.reduce_gradients()
        assert {bucket.reduced.dtype for bucket in engine._parts.buffer.buckets} == {torch.float32}
        means.append({name: zerolite.get_full_grad(p).float() for name, p in engine.named_parameters()})
        engine.zero_grad()
    torch.testing.assert_close(means[1], means[0], rtol=0.02, atol=1e-3)


@pytest.mark.slow
@STAGES
@on_ranks(4)
def test_steps_that_end_elsewhere_than_predicted(stage: str) -> None:
    """A step after fewer backwards than the config says, and one after more, in a plain loop."""
    runs = []
    for zero in ({}, PAIRS):
        engine = make(stage, zero)
        optimizer = engine.optimizer
        for step, count in enumerate((MICRO, 1, 2, 2 * MICRO - 1)):
            for micro in range(count):
                x, y = models.float_batch(step, micro, engine.rank)
                nn.functional.mse_loss(engine(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(snapshot(engine))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [0, MICRO - 1])
@STAGES
@on_ranks(4)
def test_a_nan_of_one_micro_batch_of_one_rank_skips_the_step(stage: str, micro: int) -> None:
    engine = make(stage, PAIRS, "fp16", fp16=dynamic_fp16())
    run_steps(engine, 1)
    before = snapshot(engine)
    for number in range(MICRO):
        backward(engine, 5, number, torch.nan if engine.rank == 3 and number == micro else 1.0)
        engine.step()
    assert engine.skipped_steps == 1
    torch.testing.assert_close(snapshot(engine), before, rtol=0.0, atol=0.0)
    run_steps(engine, 2, 6)
    assert engine.skipped_steps == 1
    assert_same_on_ranks(snapshot(engine))


@pytest.mark.slow
@STAGES
@on_ranks(4)
def test_a_checkpoint_within_a_step(stage: str, tmp_path: Path) -> None:
    """It is that of the step before, and what has been accumulated goes on."""
    runs = []
    for name, zero in (("plain", {}), ("pairs", PAIRS)):
        engine = make(stage, zero)
        run_steps(engine, 1)
        backward(engine, 1, 0)
        engine.save_checkpoint(str(tmp_path / name))
        engine.step()
        for micro in range(1, MICRO):
            backward(engine, 1, micro)
            engine.step()
        loaded = make(stage, zero)
        loaded.load_checkpoint(str(tmp_path / name))
        runs.append({**snapshot(engine), **{f"loaded {key}": value for key, value in snapshot(loaded).items()}})
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-6, atol=1e-7)
