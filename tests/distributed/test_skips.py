"""A gradient that is not finite, on whatever rank: no rank takes the step, and all are told once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.toolkit import models
from tests.toolkit.compare import CLIP, assert_same_bits
from tests.toolkit.configs import ADAMW, PARTITIONED, config, dynamic_fp16
from tests.toolkit.faults import Warnings, poison
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine, snapshot


def bad_step(
    config: dict[str, Any], bad_rank: int, parameter: str, value: float, loop: str = "engine"
) -> dict[str, Any]:
    """Six windows; in the fourth (step 3, the last micro-batch) one rank's gradient is not finite."""
    engine = make_engine(config)
    accumulation = config["gradient_accumulation_steps"]
    norms, learning_rates, snapshots = [], [], []
    with Warnings() as warnings:
        for step in range(6):
            for micro in range(accumulation):
                bad = step == 3 and micro == accumulation - 1 and dist.get_rank() == bad_rank
                handle = poison(engine, parameter, value) if bad else None
                loss = models.token_loss(engine, models.token_batch(step, micro, dist.get_rank()))
                if loop == "engine":
                    engine.backward(loss)
                    engine.step()
                else:
                    (loss / accumulation).backward()
                if handle is not None:
                    handle.remove()
            if loop == "plain":
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            norms.append(engine.get_global_grad_norm())
            learning_rates.append(engine.get_lr()[0])
            snapshots.append(snapshot(engine))
        skipped, steps = engine.skipped_steps, engine.global_steps
    return {
        "norms": norms,
        "learning_rates": learning_rates,
        "snapshots": snapshots,
        "skipped_steps": skipped,
        "global_steps": steps,
        "warnings": warnings.messages,
    }


def scale_growth(config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train an Mlp; the parameters and the scale after each step."""
    engine = make_engine(config, "Mlp")
    scales, snapshots, norms = [], [], []
    for step in range(steps):
        scales.append(engine.loss_scale)
        engine.backward(models.square_loss(engine, models.float_batch(step, 0, dist.get_rank())))
        engine.step()
        norms.append(engine.get_global_grad_norm())
        snapshots.append(snapshot(engine))
    return {"scales": scales, "snapshots": snapshots, "norms": norms}


# -------------------------------------------------------------------- the tests


STATIC = {"enabled": True, "loss_scale": 4}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 0.05, "warmup_type": "linear"}}


def setting(stage: int, precision: str, accumulation: int) -> dict[str, Any]:
    more = {"fp16": dynamic_fp16()} if precision == "fp16" else {}
    precision = "fp32" if precision == "fp16" else precision
    return config(stage, precision, accumulation, CLIP, ADAMW, zero_of(stage), scheduler=SCHEDULER, **more)


def zero_of(stage: int) -> dict[str, Any]:
    return PARTITIONED["moving"] if stage == 3 else {}


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp16"), (1, "fp32"), (2, "bf16"), (3, "fp16")])
def test_one_bad_gradient_on_one_rank_skips_the_step_on_all(pools: Pools, stage: int, precision: str) -> None:
    accumulation, bad_rank, value, loop = {
        "fp32": (1, 1, math.nan, "engine"),
        "bf16": (4, 2, math.inf, "engine"),
        "fp16": (1, 0, math.nan, "plain"),
    }[precision]
    kwargs = {
        "config": setting(stage, precision, accumulation),
        "bad_rank": bad_rank,
        "parameter": "down.weight",
        "value": value,
        "loop": loop,
    }
    ranks = pools(3).run(bad_step, kwargs)
    for result in ranks:
        for step in range(6):
            assert_same_bits(result["snapshots"][step], ranks[0]["snapshots"][step], f"step {step}, two ranks")
        assert_same_bits(result["snapshots"][3], result["snapshots"][2], "before and after the skipped step")
        assert any(
            not torch.equal(result["snapshots"][4][name], value) for name, value in result["snapshots"][3].items()
        )
        assert [math.isfinite(norm) for norm in result["norms"]] == [True, True, True, False, True, True]
        rates = result["learning_rates"]
        assert rates[3] == rates[2]
        assert rates[2] != rates[1]
        assert rates[4] > rates[3]
        assert (result["skipped_steps"], result["global_steps"]) == (1, 6)
        for taken in result["snapshots"]:
            assert all(torch.isfinite(parameter).all() for parameter in taken.values())
    told = [message for result in ranks for message in result["warnings"]]
    assert len(told) == 1, told
    assert f"rank {bad_rank}" in told[0]
    assert "'down.weight'" in told[0]
    assert "step 4" in told[0]  # as global_steps counts it


def bad_for_ever(config: dict[str, Any]) -> tuple[list[float], str]:
    """Every gradient of rank 0 is infinite until the engine raises: the scales of the loss, and the error."""
    engine = make_engine(config)
    before = snapshot(engine)
    if dist.get_rank() == 0:
        poison(engine, "up.weight", float("inf"))
    scales = []
    for attempt in range(10):
        scales.append(engine.loss_scale)
        engine.backward(models.token_loss(engine, models.token_batch(attempt, 0, dist.get_rank())))
        try:
            engine.step()
        except Exception as error:
            assert_same_bits(snapshot(engine), before, "before and after the skipped steps")
            return scales, str(error)
    raise AssertionError("nothing was raised")


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_too_many_skips_in_a_row_raise_on_all_ranks(stage: int) -> None:
    for precision in ("fp32", "bf16"):
        scales, error = bad_for_ever(config(stage, precision, zero=zero_of(stage), max_consecutive_skipped_steps=3))
        assert len(scales) == 3
        for word in ("max_consecutive_skipped_steps", "3", "up.weight", "rank 0"):
            assert word in error, error
    low = dynamic_fp16(initial_scale_power=3, min_loss_scale=1)
    scales, error = bad_for_ever(config(stage, zero=zero_of(stage), fp16=low))
    assert scales == [8, 4, 2, 1]
    for word in ("up.weight", "minimum", "bf16", "4 in"):
        assert word in error, error


@on_ranks(1, 2)
def test_the_step_on_which_the_loss_scale_grows_applies_exactly_the_unscaled_gradient() -> None:
    """Scales are powers of two and no value is near fp16's limits: a run whose scale grows equals one whose scale is 4
    for ever. Plain SGD moves by lr × gradient, and would show at once an update half or twice as large."""
    plain = ("SGD", {"lr": 0.5, "foreach": True})
    for stage, more, window, scales in (
        (0, {"clip": CLIP}, 2, [4, 4, 8, 8, 16, 16]),
        (1, {"clip": CLIP}, 2, [4, 4, 8, 8, 16, 16]),
        (2, {"clip": CLIP}, 2, [4, 4, 8, 8, 16, 16]),
        (1, {"optimizer": plain}, 1, [4, 8, 16]),
    ):
        growing = dynamic_fp16(initial_scale_power=2, loss_scale_window=window)
        grown, fixed = (scale_growth(config(stage, fp16=fp16, **more), len(scales)) for fp16 in (growing, STATIC))
        assert grown["scales"] == scales and fixed["scales"] == [4] * len(scales)
        # fp16 gradients below 2^-14 lose bits at the smaller scale: at most 2^-24 / 4 each, far below one unit of a
        # weight.
        assert grown["norms"] == pytest.approx(fixed["norms"], rel=1e-5)
        atol = 2.0**-20 if "clip" in more else 2.0**-14
        torch.testing.assert_close(grown["snapshots"], fixed["snapshots"], rtol=2.0**-10, atol=atol)
