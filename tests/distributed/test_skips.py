"""A gradient that is not finite, on whatever rank: no rank takes the step, and all are told once."""

from __future__ import annotations

import math

import pytest
import torch

from tests.toolkit.compare import CLIP, assert_same_bits, assert_same_on_ranks, from_all_ranks
from tests.toolkit.configs import ADAMW, Optimizer, at, config, dynamic_fp16
from tests.toolkit.faults import Warnings, poison
from tests.toolkit.lockstep import skipping_on_device
from tests.toolkit.optimizers import assert_same_facts, facts
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import backward, loss_of, make_engine, raises, run_steps, snapshot
from zerolite.zero import GatheredParameters

DAMPED: Optimizer = ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3})
ADAGRAD: Optimizer = ("Adagrad", {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1})
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 0.05, "warmup_type": "linear"}}


@pytest.mark.fast("3-3-fp16-optimizer3")
@pytest.mark.parametrize(
    ("stage", "precision", "optimizer"),
    [(0, "fp16", ADAMW), (1, "fp32", DAMPED), (2, "bf16", ADAGRAD), (3, "fp16", ADAMW)],
)
@on_ranks(3)
def test_one_bad_gradient_on_one_rank_skips_the_step_on_all(stage: int, precision: str, optimizer: Optimizer) -> None:
    """It comes with the last micro-batch of the fourth of six steps, and leaves no trace in values, masters and states:
    a run without that step ends with the same bits, if no loss scale has fallen."""
    accumulation, bad_rank, value, loop = {
        "fp32": (1, 1, math.nan, "engine"),
        "bf16": (4, 2, math.inf, "engine"),
        "fp16": (1, 0, math.nan, "plain"),
    }[precision]
    made = at(stage, precision, accumulation, CLIP, optimizer, scheduler=SCHEDULER)
    engine = make_engine(made | {"fp16": dynamic_fp16()} if precision == "fp16" else made)
    norms, rates, seen = [], [], []
    with Warnings() as warnings:
        for step in range(6):
            for micro in range(accumulation):
                bad = step == 3 and micro == accumulation - 1 and engine.rank == bad_rank
                handle = poison(engine, "down.weight", value) if bad else None
                loss = loss_of(engine, step, micro, "OddModel")
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
            rates.append(engine.get_lr()[0])
            seen.append(facts(engine))
            values = seen[-1]["parameters"]
            assert_same_on_ranks(values, f"step {step}")
            assert all(torch.isfinite(parameter).all() for parameter in values.values())
    assert_same_facts(seen[3], seen[2], "before and after the skipped step")
    assert any(not torch.equal(seen[4]["parameters"][name], old) for name, old in seen[3]["parameters"].items())
    if precision != "fp16":
        other = make_engine(made)
        run_steps(other, 3, 0, "OddModel")
        run_steps(other, 2, 4, "OddModel")
        assert_same_facts(facts(engine), facts(other), "without the skipped step")
    assert [math.isfinite(norm) for norm in norms] == [True, True, True, False, True, True]
    assert rates[1] != rates[2] == rates[3] < rates[4]
    assert (engine.skipped_steps, engine.global_steps) == (1, 6)
    (told,) = [message for messages in from_all_ranks(warnings.messages) for message in messages]
    assert f"rank {bad_rank}" in told and "'down.weight'" in told and "step 4" in told  # as global_steps counts it


@pytest.mark.fast("3-2")
@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_too_many_skips_in_a_row_raise_on_all_ranks(stage: int) -> None:
    """Every gradient of rank 0 is infinite until the engine raises; parameters stay what they were."""
    limited, limit = {"max_consecutive_skipped_steps": 3}, ["max_consecutive_skipped_steps", "3", "up.weight", "rank 0"]
    low = dynamic_fp16(initial_scale_power=3, min_loss_scale=1)
    for made, scales, words in (
        (at(stage, "fp32", **limited), [1, 1, 1], limit),
        (at(stage, "bf16", **limited), [1, 1, 1], limit),
        (at(stage, fp16=low), [8, 4, 2, 1], ["up.weight", "minimum", "bf16", "4 in"]),
    ):
        engine, found = make_engine(made), []
        before = snapshot(engine)
        if engine.rank == 0:
            poison(engine, "up.weight", math.inf)
        with raises(FloatingPointError, *words):
            for attempt in range(10):
                found.append(engine.loss_scale)
                backward(engine, attempt, model="OddModel")
                engine.step()
        assert found == scales
        assert_same_bits(snapshot(engine), before, "before and after the skipped steps")


@pytest.mark.fast("2-2", "2-3")
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_skipped_step_keeps_the_values_that_were_written_before_it(stage: int) -> None:
    engine = make_engine(at(stage, "", fp16=dynamic_fp16()), "Mlp")
    with GatheredParameters(engine.module, modifier_rank=0), torch.no_grad():
        engine.module.second.weight.fill_(0.5)
    poison(engine, "first.weight", math.inf)
    backward(engine, 0)
    engine.step()
    assert engine.skipped_steps == 1
    assert bool((snapshot(engine)["second.weight"] == 0.5).all())


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_weights_of_one_rank_alone_change_no_parameter(stage: int) -> None:
    """The device decides, as on CUDA, and numbers that are not finite are not looked for."""
    unchecked = {"enabled": True, "check_grad_overflow": False}
    with skipping_on_device(True):
        engine = make_engine(at(stage, bf16=unchecked), "Mlp")
    before = snapshot(engine)
    backward(engine, 0, weight=3 if engine.rank == 0 else None)
    engine.step()
    assert_same_bits(snapshot(engine), before, "before and after the step")
    backward(engine, 1)
    with raises(RuntimeError, "some ranks gave a weight in this step and others did not"):
        engine.step()


@on_ranks(2)
def test_the_step_on_which_the_loss_scale_grows_applies_exactly_the_unscaled_gradient() -> None:
    """Scales are powers of two and no value is near fp16's limits: a run whose scale grows equals one whose scale is 4
    for ever. Plain SGD moves by lr × gradient, and would show at once an update half or twice as large."""
    plain = ("SGD", {"lr": 0.5, "foreach": True})
    for stage, more, window, scales in (
        (0, {"clip": CLIP}, 2, [4, 4, 8, 8, 16, 16]),
        (2, {"clip": CLIP}, 2, [4, 4, 8, 8, 16, 16]),
        (1, {"optimizer": plain}, 1, [4, 8, 16]),
    ):
        growing = dynamic_fp16(initial_scale_power=2, loss_scale_window=window)
        static = {"enabled": True, "loss_scale": 4}
        grown, fixed = (make_engine(config(stage, fp16=fp16, **more), "Mlp") for fp16 in (growing, static))
        for step, scale in enumerate(scales):
            assert (grown.loss_scale, fixed.loss_scale) == (scale, 4)
            run_steps(grown, 1, step)
            run_steps(fixed, 1, step)
            # fp16 gradients below 2^-14 lose bits at the smaller scale: at most 2^-24 / 4 each, far below one unit of a
            # weight.
            assert grown.get_global_grad_norm() == pytest.approx(fixed.get_global_grad_norm(), rel=1e-5)
            atol = 2.0**-20 if "clip" in more else 2.0**-14
            torch.testing.assert_close(snapshot(grown), snapshot(fixed), rtol=2.0**-10, atol=atol)
