"""Grids of ranks used wrongly, and steps that fail: a sentence on all ranks, and no rank that waits for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.distributed.test_grid import FP32, PIPE, PIPE_TENSOR, TENSOR, expected, run, settings
from tests.toolkit import models
from tests.toolkit.configs import dynamic_fp16
from tests.toolkit.grids import Block, Gpt, Grid, assert_ranks_agree, make_engine, micro_batches, own_batches, train
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raised


def skipped(config: dict[str, Any], place: tuple[int, int, int], value: float, scale: float) -> None:
    """One element of one rank's gradients is not finite in the third of six steps."""
    engine = make_engine(config)
    _, before = train(engine, 2)
    name = [n for n, _ in engine.module.named_parameters() if n.endswith("proj.weight")][-1]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    handle = engine.module.get_parameter(name).register_hook(spoil) if engine.topology.coordinates == place else None
    losses, (norm,) = train(engine, 1, 2)
    if handle is not None:
        handle.remove()
    assert all(torch.tensor(losses).isfinite()) and repr(norm) == repr(value)
    _, after = train(engine, 3, 3)
    assert torch.tensor(after).isfinite().all()
    assert (engine.global_steps, engine.skipped_steps, engine.loss_scale) == (6, 1, scale)
    assert_ranks_agree(engine, losses, before, after)


@pytest.mark.fast("nan-grid0-place0-1")
@pytest.mark.parametrize(
    ("grid", "place", "stage"), [(PIPE, (0, 0, 0), 1), (TENSOR, (0, 0, 1), 3), (PIPE_TENSOR, (1, 0, 1), 1)]
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_step_is_skipped_on_all_ranks(pools: Pools, value: str, grid: Grid, place: Any, stage: int) -> None:
    more, scale = ({}, 1.0) if value == "nan" else ({"fp16": dynamic_fp16()}, 128.0)
    made = settings(grid, stage, **more)
    run(pools, grid, skipped, config=made, place=place, value=float(value), scale=scale)


# ---------------------------------------------------------------- what raises


class _Deliberate(Exception):
    pass


def raise_in_a_step(stage: int, when: str, schedule: str) -> None:
    data = dist.get_world_size() // 2
    odd = stage * data
    fails = dist.get_rank() == odd
    engine = make_engine(settings((2, data, 1), pipeline={"schedule": schedule, "partition_method": "uniform"}))
    train(engine, 1)
    calls, handle = [], None

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise _Deliberate("on purpose")

    if fails:
        block = [m for m in engine.module.modules() if isinstance(m, Block) and m.proj.weight is not None][-1]
        handle = block.register_forward_hook(fail) if when == "forward" else block.proj.weight.register_hook(fail)
    began = time.monotonic()
    said = raised(lambda: engine.train_batch(own_batches(engine, 1)))
    assert time.monotonic() - began < 10
    if handle is not None:
        handle.remove()
    own = "_Deliberate: on purpose"
    assert said == (own if fails else f"RuntimeError: engine.train_batch: rank {odd} failed: {own}")
    losses, norms = train(engine, 2, 1)
    assert losses == pytest.approx(expected(data).losses[1:3], rel=FP32)
    assert (engine.global_steps, engine.skipped_steps) == (3, 0)
    assert_ranks_agree(engine, losses, norms)


@pytest.mark.fast("1-1-backward-gpipe")
@pytest.mark.parametrize(
    ("data", "stage", "when", "schedule"),
    [
        (1, 1, "backward", "gpipe"),
        (1, 0, "backward", "interleaved_1f1b"),
        (1, 0, "backward", "zero_bubble"),
        (1, 1, "forward", "zbv"),
        (2, 0, "forward", "1f1b"),
        (2, 0, "backward", "1f1b"),
        (2, 0, "backward", "zero_bubble"),
    ],
)
def test_a_stage_that_raises(pools: Pools, data: int, stage: int, when: str, schedule: str) -> None:
    """All ranks of one pipeline or of two hear of it at once, and training goes on as if the step had not been."""
    run(pools, (2, data, 1), raise_in_a_step, timeout=30, stage=stage, when=when, schedule=schedule)


@pytest.mark.fast("2")
@on_ranks(2, 4, timeout=30)
def test_iterators() -> None:
    """Iterators that end, and ranks that read other data, in one pipeline or in the second of two."""
    end = dist.get_world_size() - 1
    engine = make_engine(settings((2, dist.get_world_size() // 2, 1)))
    count, rank, last = 4, engine.data_parallel_rank, engine.rank == end

    def says(batches: Any, *words: str, call: Any = engine.train_batch) -> None:
        said = raised(lambda: call(batches))
        assert all(word in said for word in words), (words, said)

    def broken() -> Iterator[Any]:
        yield from micro_batches(0, 1, rank)
        if last:
            raise _Deliberate("no file")
        yield from micro_batches(1, count - 1, rank)

    short = f"expected micro-batches for a whole step on every rank, got none any more on rank {end}"
    says(micro_batches(0, count - int(last), rank), short)
    says(micro_batches(0, count - int(last), rank), short, call=engine.eval_batch)
    ended = "StopIteration: engine.train_batch: the iterator"
    says(micro_batches(0, count - 1, rank), ended)
    says(iter(()), ended)
    says(list(micro_batches(0, count, rank)), "expected an iterator, got list; pass iter(loader)")
    assert "expected an iterator of micro-batches, got none" in raised(engine.train_batch)
    if last:
        says(broken(), "_Deliberate: no file")
    else:
        says(micro_batches(0, count, rank), f"rank {end} could not begin: _Deliberate: no file")
    odd = (models.token_batch(0, micro, rank, length=8 - 4 * (micro == 1)) for micro in range(count))
    says(odd, "the same shapes, got inputs", "pad them")
    for odd, words in (
        (micro_batches(0, count, rank + 7), "other values"),
        (micro_batches(0, count, rank, length=4), "other shapes"),
    ):
        same = f"the stages of one pipeline to read the same micro-batches, got {words} on rank {end}"
        says(odd if last else micro_batches(0, count, rank), same)
    assert engine.train_batch(micro_batches(0, count, rank)).isfinite() and engine.global_steps == 1


@pytest.mark.slow
@on_ranks(2, timeout=30)
def test_ranks_of_one_model_read_other_data() -> None:
    for length in (8, 4):
        engine = make_engine(settings(TENSOR))
        batches = micro_batches(0, 4, engine.rank, length=length if engine.rank else 8)
        said = raised(lambda engine=engine, batches=batches: engine.train_batch(batches))
        assert said.startswith("RuntimeError: ") and "expected" in said and "engine.data_parallel_rank" in said


@pytest.mark.slow
@on_ranks(2)
def test_calls_that_a_pipeline_has_not() -> None:
    engine = make_engine(settings(PIPE))
    batch = models.token_batch(0, 0, 0, length=8)
    for call in (
        lambda: engine(*batch),
        lambda: engine.forward(*batch),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.step,
        engine.optimizer.step,
        lambda: engine.no_sync().__enter__(),
        lambda: engine.set_gradient_accumulation_boundary(False),
    ):
        said = raised(call)
        assert said.startswith("RuntimeError") and "engine.train_batch" in said, said


# ---------------------------------------------------------------- what initialize says


def plan(**styles: str) -> dict[str, Any]:
    return {"tensor_parallel": {"size": 2, "plan": {name.replace("__", "."): style for name, style in styles.items()}}}


def misfits() -> dict[str, dict[str, Any]]:
    """Configs for two ranks, by what is said of them."""
    named = {"split": ["blocks.2"]}
    cpu = {"offload_optimizer": {"device": "cpu"}}
    return {
        "expected 0 or 1 with a pipeline (pipeline.stages = 2), got 2": settings(PIPE, 2),
        "got 3: stage 3 would gather all parameters": settings(PIPE, 3),
        "a multiple of pipeline.stages × tensor_parallel.size, got 2 processes for 1": settings((1, 1, 3)),
        "got 2 processes for 2 × 2 = 4": settings(PIPE_TENSOR),
        "got 'block.2', which the model lacks; did you mean": settings(PIPE, pipeline={"split": ["block.2"]}),
        "pipeline.split: expected 1 name": settings(PIPE, pipeline={"split": ["blocks.1", "blocks.2"]}),
        "expected a row in 'blocks.0' for the column": settings(TENSOR) | plan(blocks__0__qkv="column"),
        "expected a column in 'blocks.0' for the row": settings(TENSOR) | plan(blocks__0__proj="row"),
        "expected an nn.Linear as 'norm'": settings(TENSOR) | plan(norm="column"),
        "gradient_accumulation_steps: expected micro-batches that pipeline.schedule '1f1b'": settings(PIPE, count=1),
        "at least 8 equal blocks": settings(PIPE, pipeline={"schedule": "interleaved_1f1b", "chunks": 4}),
        'pipeline.schedule: expected "gpipe" or "1f1b"': settings(PIPE, pipeline={"schedule": "2f2b"}),
        "expected 0 for a model that is not a sequence of layers, got 2": settings(
            PIPE, pipeline={**named, "activation_checkpoint_interval": 2}
        ),
        "x world size 1 = 8, got 16": settings(TENSOR, train_batch_size=16),
        'expected "none" with pipeline.stages, got "cpu"': settings(PIPE, zero=cpu),
    }


@pytest.mark.slow
@on_ranks(2)
def test_what_does_not_fit_is_said_on_all_ranks() -> None:
    for words, made in misfits().items():
        said = raised(lambda made=made: make_engine(made))
        assert words in said, (words, said)

    def init() -> None:
        with zerolite.zero.Init(config_dict_or_path=settings(TENSOR, 3)):
            model = models.build(Gpt)
        zerolite.initialize(model, settings(TENSOR, 3))

    said = raised(init)
    assert "zero.Init" in said and "tensor_parallel" in said
