"""No micro-batch is ever lost, however the loop is written."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.toolkit import models, reference
from tests.toolkit.compare import assert_same, assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import SGD, at, config
from tests.toolkit.ranks import on_ranks
from tests.toolkit.stage3_cases import left_gathered
from tests.toolkit.traffic import Tower
from tests.toolkit.training import backward, loss_of, make_engine, snapshot

# The ways differ in where 1/4 is multiplied and in what is summed before it is reduced. Three steps of SGD with lr
# 0.05 and gradients of order 1: a rounding error of one fp32 unit in the last place (6e-8) per sum stays far below; a
# lost micro-batch moves a weight by 1e-2. bf16: the sums are fp32 at every stage, and dividing a loss by 4 before or
# after is exact, so what differs is one rounding of the weights.
TOLERANCE = {"fp32": 1e-6, "bf16": 2.0**-7}


@dataclass(frozen=True)
class Way:
    """One way to write a step of four micro-batches.

    Attributes:
        backwards: one letter for each micro-batch: ``e`` for engine.backward(loss), ``E`` for engine.backward(loss / 4,
            scale_wrt_gas=False), ``t`` for loss.backward(), ``T`` for (loss / 4).backward().
        quiet: the first micro-batches, which are inside engine.no_sync().
        each: what follows every backward: "step", "reduce", "boundary" (engine.step(), with boundaries set by hand).
        end: what follows the last one: "step", "torch", "phases", "phases twice".
        config: other keys than gradient_accumulation_steps = 4.
    """

    backwards: str
    each: str = ""
    end: str = ""
    quiet: int = 0
    config: tuple[tuple[str, Any], ...] = ()

    def run(self, engine: Any, step: int) -> None:
        with contextlib.ExitStack() as stack:
            if self.quiet:
                stack.enter_context(engine.no_sync())
            for micro, letter in enumerate(self.backwards):
                if micro == self.quiet:
                    stack.close()
                if self.each == "boundary":
                    engine.set_gradient_accumulation_boundary(micro == 3)
                    assert engine.is_gradient_accumulation_boundary() is (micro == 3)
                loss = loss_of(engine, step, micro, "OddModel")
                if letter in "eE":
                    engine.backward(*((loss,) if letter == "e" else (loss / 4, False)))
                else:
                    (loss if letter == "t" else loss / 4).backward()
                if self.each == "reduce":
                    engine.reduce_gradients()
                elif self.each:
                    engine.step()
        self._end(engine)

    def _end(self, engine: Any) -> None:
        if self.end.startswith("phases"):
            engine.reduce_gradients()
            if self.end == "phases twice":  # phases that have run may be asked for again
                engine.reduce_gradients()
                assert engine.clip_gradients(float("inf")) == engine.clip_gradients(0.4)
                engine.step()
                return
            norm = engine.clip_gradients(0.4)
            engine.step()
            assert engine.get_global_grad_norm() == norm > 0
        elif self.end == "step":
            engine.step()
        elif self.end == "torch":
            engine.optimizer.step()
            engine.optimizer.zero_grad()


SINGLE = (("gradient_accumulation_steps", 1),)
UNMANAGED = (*SINGLE, ("managed_gradient_accumulation", False))
DIVIDED = (("divide_plain_backward", True),)
WAYS = {
    "counted": Way("eeee", "step"),
    "no_sync": Way("eeee", "step", quiet=3),
    "no_sync around all": Way("eeee", "step", quiet=4),
    "boundary by hand": Way("eeee", "boundary"),
    "boundary by hand, accumulation undeclared": Way("EEEE", "boundary", config=SINGLE),
    "four backwards, one step": Way("EEEE", end="step", config=SINGLE),
    "unmanaged": Way("EEEE", end="step", config=UNMANAGED),
    "unmanaged, with torch's step": Way("TETE", end="torch", config=UNMANAGED),
    "plain": Way("TTTT", end="torch"),
    "plain, accumulation undeclared": Way("TTTT", end="torch", config=SINGLE),
    "plain, divided by the engine": Way("tttt", end="torch", config=DIVIDED),
    "mixed, divided by the engine": Way("etet", "step", config=DIVIDED),
    "plain with no_sync": Way("TTTT", end="torch", quiet=3, config=SINGLE),
    "mixed": Way("EETT", end="step", config=SINGLE),
    "phases": Way("EEEE", end="phases", config=SINGLE),
    "phases twice": Way("EEEE", end="phases twice", config=SINGLE),
    "reduced in the middle": Way("EEEE", "reduce", end="step", config=SINGLE),
}


@functools.cache
def plain(micros: tuple[int, ...], precision: str = "fp32") -> reference.Trajectory:
    """Steps of so many micro-batches in plain PyTorch."""
    ranks = range(dist.get_world_size())
    batches = [
        [[models.token_batch(step, micro, rank) for rank in ranks] for micro in range(count)]
        for step, count in enumerate(micros)
    ]
    return reference.train(models.build(models.OddModel), models.token_loss, batches, precision, SGD, 0.4)


def three_steps(stage: str, precision: str, way: Way) -> tuple[list[float], dict[str, Any]]:
    """The norms, and the parameters in the end."""
    engine = make_engine(at(stage, precision, accumulation=4, clip=0.4) | dict(way.config))
    norms = []
    for step in range(3):
        way.run(engine, step)
        norms.append(engine.get_global_grad_norm())
        assert not left_gathered(engine)
    assert engine.global_steps == 3
    return norms, snapshot(engine)


@pytest.mark.fast(
    *("2-0-fp32-counted", "2-0-fp32-plain with no_sync", "2-2-bf16-no_sync", "2-2-bf16-boundary by hand, *"),
    *("2-2-bf16-unmanaged, *", "2-2-bf16-mixed, *", "2-2-bf16-phases twice"),
)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(
    ("stage", "precision"), [("0", "fp32"), ("1", "bf16"), ("2", "bf16"), ("2", "fp32"), ("3 defaults", "fp32")]
)
@on_ranks(2)
def test_every_way_to_write_a_step_gives_the_same_update(stage: str, precision: str, name: str) -> None:
    wanted = plain((4, 4, 4), precision)
    tolerance = TOLERANCE[precision]
    norms, found = three_steps(stage, precision, WAYS[name])
    assert_same_on_ranks(found)
    assert norms == pytest.approx(wanted.norms, rel=tolerance)
    for parameter, value in wanted.parameters.items():
        torch.testing.assert_close(found[parameter].float(), value, rtol=tolerance, atol=tolerance / 8)


@pytest.mark.slow
@on_ranks(2)
def test_unmanaged_backwards_of_stage_1_are_reduced_by_the_step_alone() -> None:
    engine = make_engine(config(1, managed_gradient_accumulation=False))
    with zerolite.comm.record() as recorder:
        for micro in range(3):
            engine.backward(loss_of(engine, 0, micro, "OddModel"))
            assert engine.is_gradient_accumulation_boundary()
        assert not recorder.count("reduce_scatter")
        assert engine.step()
    assert recorder.count("reduce_scatter") == recorder.count("all_gather") > 0


@pytest.mark.fast("2-3 moving")
@pytest.mark.parametrize("stage", ["3 moving", "3 kept", "3 tight"])
@on_ranks(2)
def test_stage_3_has_the_bits_of_stage_2_in_every_phase(stage: str) -> None:
    for name in ("no_sync", "phases"):
        assert_same(three_steps(stage, "fp32", WAYS[name]), three_steps("2", "fp32", WAYS[name]), name)


@pytest.mark.parametrize(("stage", "contained", "divided"), [(0, 1, False), (1, 3, True), (2, 1, True), (3, 3, False)])
@on_ranks(2)
def test_a_flushed_step_is_the_mean_of_what_it_contains(stage: int, contained: int, divided: bool) -> None:
    engine = make_engine(config(stage, accumulation=4, clip=0.4, divide_plain_backward=divided))
    assert engine.step(flush=True) is False and engine.global_steps == 0, "there is nothing to flush"
    for micro in range(contained):
        loss = loss_of(engine, 0, micro, "OddModel")
        if divided:
            loss.backward()
        else:
            engine.backward(loss)
        assert engine.step(flush=micro == contained - 1) is (micro == contained - 1)
    first, both = plain((contained,)), plain((contained, 4))
    assert engine.get_global_grad_norm() == pytest.approx(first.norms[0], rel=1e-6)
    torch.testing.assert_close(snapshot(engine), first.parameters, rtol=0, atol=1e-6)
    WAYS["counted"].run(engine, 1)
    torch.testing.assert_close(snapshot(engine), both.parameters, rtol=0, atol=1e-6)
    assert engine.global_steps == 2


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_unused_parameters_are_an_error_if_the_config_says_so(stage: int) -> None:
    engine = make_engine(config(stage, zero={"ignore_unused_parameters": False}))
    backward(engine, 0, model="OddModel")
    with pytest.raises(RuntimeError, match="(?s)(?=.*unused)(?=.*ignore_unused_parameters)(?!.*up.weight)"):
        engine.step()


@on_ranks(2)
def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD(models.build(models.Mlp).parameters(), lr=0.1)
    made = {key: value for key, value in config(1).items() if key != "optimizer"}
    with pytest.raises(ValueError, match=r"param group 0.*model\.parameters\(\)"):
        make_engine(made, "Mlp", optimizer=optimizer)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(1)
def test_an_outdated_graph_is_refused(stage: int) -> None:
    """Backward, step, and backward again through the same graph: torch refuses, and so must an engine."""
    engine = zerolite.initialize(Tower((3, 3, 3)), config(stage))
    loss = engine(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    engine.optimizer.step()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_step_that_raises_counts_no_micro_batch(stage: int) -> None:
    """Nor does a flush leave the factor of the micro-batches that it had."""
    flushed, plain = (make_engine(at(stage, "fp32", 4), "Mlp") for _ in range(2))
    for engine in (flushed, plain):
        for micro in range(4):
            backward(engine, 0, micro)
            if engine is flushed and micro == 0:
                engine.offload_states()
                for flush in (False, True):
                    with pytest.raises(RuntimeError, match="offload_states"):
                        engine.step(flush)
                engine.reload_states()
            engine.step()
    assert flushed.global_steps == plain.global_steps == 1
    assert_same_bits(snapshot(flushed), snapshot(plain), "after a step that has raised")
