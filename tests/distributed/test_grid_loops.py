"""Grids of ranks used in every way that there is: optimizers of one's own, loops, options, dropout; beside plain
PyTorch in the same process."""

from __future__ import annotations

import contextlib
import gc
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerolite
from tests.distributed.test_grid import ADAMW, CLIP, FP32, expected, run, trained
from tests.toolkit import grids, models, reference
from tests.toolkit.configs import SGD, Optimizer, at
from tests.toolkit.grids import Gpt, Grid, assert_ranks_agree, make_engine, micro_batches, own_batches, train
from tests.toolkit.pipes import plain_loss
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raised

pytestmark = pytest.mark.slow

TENSOR, PIPE, DATA_TENSOR, PIPE_TENSOR = (1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 1, 2)


def settings(
    grid: Grid,
    stage: int = 1,
    precision: str = "fp32",
    count: int = 4,
    sequence: bool = False,
    optimizer: Optimizer | None = SGD,
    pipeline: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    made = at(stage, precision, count, CLIP, optimizer or SGD, zero=zero)
    if optimizer is None:
        del made["optimizer"]
    return grids.on_grid(made, grid, sequence, **(pipeline or {})) | more


def assert_as_expected(engine: Any, losses: list[float], norms: list[float]) -> None:
    """The first steps of the tied model, with four micro-batches of length 8."""
    assert_ranks_agree(engine, losses, norms)
    wanted = expected(engine.data_parallel_world_size)
    assert losses == pytest.approx(wanted.losses[: len(losses)], rel=FP32)
    assert norms == pytest.approx(wanted.norms[: len(norms)], rel=FP32)


# ---------------------------------------------------------------- what users bring


def decays(model: nn.Module) -> list[dict[str, Any]]:
    """Param groups as users make them; that of the head alone is empty on other stages."""
    own = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    body = [p for n, p in own if not n.startswith("head")]
    return [
        {"params": [p for p in body if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in body if p.dim() <= 1], "weight_decay": 0.0},
        {"params": [p for n, p in own if n.startswith("head")], "lr": 0.02},
    ]


def own_optimizer(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(decays(model), lr=0.05, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


def some_parameters(model: nn.Module) -> dict[str, Any]:
    return {"model_parameters": [p for n, p in model.named_parameters() if "qkv" not in n and p.requires_grad]}


def unfreeze(model: nn.Module, step: int) -> None:
    """Unfreeze a weight that two stages share: they begin their backwards one after the other, and must not meet."""
    for name, parameter in model.named_parameters():
        if name in ("positions", "embed.weight") or (step == 2 and "frozen" in name):
            parameter.requires_grad_(step >= 2)


def compare(
    config: dict[str, Any],
    made: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
    change: Callable[[nn.Module, int], None] = lambda model, step: None,
    sample: dict[str, int] | None = None,
    steps: int = 4,
    **model: Any,
) -> None:
    """``train_batch`` beside plain PyTorch. made: further arguments of ``initialize``; change: the user's, before each
    step; sample: of token_batch."""
    whole = models.build(Gpt, **model)
    first = models.build(Gpt, seed=7 + dist.get_rank(), **model)
    for each in (whole, first):
        change(each, 0)
    engine = zerolite.initialize(first, dict(config), **made(first))
    arguments = made(whole)
    optimizer = arguments.get("optimizer") or reference.make_optimizer(
        config["optimizer"]["type"],
        arguments.get("model_parameters", list(whole.parameters())),
        config["optimizer"]["params"],
    )
    data, count = engine.data_parallel_world_size, engine.gradient_accumulation_steps
    losses, norms = [], []
    for step in range(steps):
        if step:
            change(engine.module, step)
            change(whole, step)
        joint = [list(micro_batches(step, count, rank, **(sample or {}))) for rank in range(data)]
        losses.append(engine.train_batch(iter(joint[engine.data_parallel_rank])).item())
        norms.append(engine.get_global_grad_norm())
        assert engine.get_lr() == [group["lr"] for group in optimizer.param_groups] or "lr_scheduler" in arguments
        optimizer.zero_grad()
        assert losses[-1] == pytest.approx(plain_loss(whole, joint, None, backward=True), rel=FP32)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        assert norms[-1] == pytest.approx(clip_gradients(trained), rel=FP32)
        optimizer.step()
        if "lr_scheduler" in arguments:
            arguments["lr_scheduler"].step()
            assert engine.get_lr() == [group["lr"] for group in optimizer.param_groups]
    assert_ranks_agree(engine, losses, norms)
    masters = engine.full_state_dict(rank0_only=True, dtype=torch.float32)
    if masters:
        assert grids.worst(masters, dict(whole.named_parameters())) < (FP32, "")


def clip_gradients(trained: list[nn.Parameter]) -> float:
    gradients = [p.grad for p in trained if p.grad is not None]
    norm = reference.global_norm(gradients)
    for gradient in gradients if norm > CLIP else ():
        gradient.mul_(CLIP / (norm + 1e-6))
    return norm


CPU = {"device": "cpu"}
OWN: dict[str, tuple[list[Grid], dict[str, Any]]] = {
    "an optimizer with groups, and a schedule": ([PIPE_TENSOR, TENSOR], {"made": own_optimizer}),
    "some parameters": ([PIPE_TENSOR, DATA_TENSOR], {"made": some_parameters, "optimizer": ADAMW}),
    "unfreezing": ([PIPE_TENSOR, TENSOR], {"change": unfreeze, "optimizer": SGD, "steps": 5}),
    "odd sizes": ([PIPE_TENSOR, TENSOR], {"sample": {"size": 3, "length": 5}, "optimizer": SGD, "vocabulary": 13}),
    "offload": ([TENSOR], {"config": {"zero": {"offload_optimizer": CPU, "offload_param": CPU}}, "optimizer": SGD}),
    "a breakdown of time": ([PIPE], {"config": {"wall_clock_breakdown": True}, "optimizer": SGD}),
}


@pytest.mark.parametrize("what", OWN)
def test_what_users_bring(pools: Pools, what: str) -> None:
    places, given = OWN[what]
    kwargs = dict(given)
    optimizer, config = kwargs.pop("optimizer", None), kwargs.pop("config", {})
    for grid in places:
        stage = {TENSOR: 3, DATA_TENSOR: 2}.get(grid, 1)
        sequence = grid in (TENSOR, PIPE_TENSOR) and not {"sample", "config"} & given.keys()
        made = settings(grid, stage, sequence=sequence, optimizer=optimizer, **config)
        run(pools, grid, compare, config=made, **kwargs)


# ---------------------------------------------------------------- loops


@pytest.mark.parametrize(
    ("kind", "stage", "sequence"), [("engine", 0, False), ("plain", 1, False), ("phases", 2, True), ("engine", 3, True)]
)
@on_ranks(2)
def test_loops_without_a_pipeline(kind: str, stage: int, sequence: bool) -> None:
    engine = make_engine(settings(TENSOR, stage, sequence=sequence))
    losses, norms = [], []
    for step in range(4):
        total = 0.0
        for batch in own_batches(engine, step):
            loss = engine(*batch)
            total += loss.item() / 4
            if kind == "plain":
                (loss / 4).backward()
                continue
            engine.backward(loss)
            if kind == "engine":
                engine.step()
        if kind == "phases":
            engine.reduce_gradients()
            norms.append(float(engine.clip_gradients(CLIP)))
            engine.update()
            engine.publish()
            engine.zero_grad()
        elif kind == "plain":
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        if kind != "phases":
            norms.append(engine.get_global_grad_norm())
        losses.append(engine.reduce(total))
    assert_as_expected(engine, losses, norms)


@pytest.mark.parametrize(("grid", "stage"), [(TENSOR, 3), (PIPE, 1)])
@on_ranks(2)
def test_states_on_the_host(grid: Grid, stage: int) -> None:
    engine = make_engine(settings(grid, stage))
    first = train(engine, 2)
    engine.offload_states()
    assert "engine.reload_states()" in raised(lambda: engine.train_batch(own_batches(engine, 2)))
    engine.reload_states()
    second = train(engine, 2, 2)
    assert_as_expected(engine, first[0] + second[0], first[1] + second[1])


@on_ranks(2)
def test_engines_with_different_grids_in_one_process() -> None:
    places: list[tuple[Grid, int, bool]] = [(PIPE, 1, False), (TENSOR, 3, True), ((1, 2, 1), 2, False)]
    engines = [make_engine(settings(grid, stage, sequence=sequence)) for grid, stage, sequence in places]
    told: list[tuple[list[float], list[float]]] = [([], []) for _ in engines]
    for step in range(3):
        for engine, (losses, norms) in zip(engines, told, strict=True):
            loss, norm = train(engine, 1, step)
            losses += loss
            norms += norm
    for engine, (losses, norms) in zip(engines, told, strict=True):
        assert_as_expected(engine, losses, norms)


# ---------------------------------------------------------------- dropout, checkpointing, precision


def with_dropout(config: dict[str, Any], steps: int = 8, how: str = "", dropout: float = 0.3) -> list[float]:
    """The losses with dropout inside and outside of what is cut. how: "", or blocks that checkpoint themselves."""
    engine = make_engine(config, dropout=dropout)
    for block in engine.module.blocks if how else ():
        block.forward = lambda x, call=block.forward: checkpoint(call, x, use_reentrant=how == "reentrant")
    losses, norms = train(engine, steps)
    assert_ranks_agree(engine, losses, norms)
    return losses


@pytest.mark.parametrize(("grid", "stage", "sequence"), [(TENSOR, 3, True), (PIPE, 1, False), (PIPE_TENSOR, 1, False)])
def test_dropout_draws_the_same_numbers_where_the_same_is_computed(
    pools: Pools, grid: Grid, stage: int, sequence: bool
) -> None:
    """Replicated parameters stay equal to the bit, and blocks that are computed anew change nothing."""
    made = settings(grid, stage, count=2, sequence=sequence)
    blocks = {"modules": ["blocks.*"]}
    kept = run(pools, grid, with_dropout, config=made)
    for block in (blocks, {**blocks, "cpu_checkpointing": True}) if grid != PIPE_TENSOR else ():
        assert run(pools, grid, with_dropout, config={**made, "activation_checkpointing": block}) == kept
    for how in {TENSOR: ["not"], PIPE: ["not", "reentrant"]}.get(grid, []):
        assert run(pools, grid, with_dropout, config=made, how=how) == kept


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2)
def test_a_reentrant_checkpoint_of_a_cut_block_is_refused(sequence: bool) -> None:
    """It is an autograd function of the block's own input, whose shape is told for the rank's part."""
    made = settings(TENSOR, sequence=sequence)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        with_dropout(made, 4, "reentrant", 0.0)


@pytest.mark.parametrize(
    ("grid", "stage", "more"),
    [
        (TENSOR, 3, {"precision": "bf16", "fp32_modules": ["*.norm", "*.second_norm", "norm"]}),
        (PIPE, 1, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    ],
    ids=["fp32_modules", "autocast"],
)
def test_mixed_precisions(pools: Pools, grid: Grid, stage: int, more: dict[str, Any]) -> None:
    """Beside one process with the same options: twice the rounding of one value in bf16."""
    (alone,) = run(pools, (1, 1, 1), trained, config=settings((1, 1, 1), stage, **more))
    found = run(pools, grid, trained, config=settings(grid, stage, sequence=grid == TENSOR, **more))
    assert found[0]["norms"] == pytest.approx(alone["norms"], rel=2.0**-7)


# ---------------------------------------------------------------- what is printed and written


@on_ranks(4)
def test_one_rank_writes(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    more = {"steps_per_print": 2, "wall_clock_breakdown": True, "jsonl_monitor": monitor}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine = make_engine(settings(PIPE_TENSOR, **more))
        train(engine, 4)
        rank, writes = engine.rank, engine._step_log is not None
        del engine
        gc.collect()
    lines = [line.split(":")[0] for line in printed.getvalue().splitlines()]
    assert (writes, lines) == (rank == 0, ["step 2", "step 2", "step 4", "step 4"] if rank == 0 else [])
    dist.barrier()
    (file,) = tmp_path.rglob("*.jsonl")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert len([event for event in events if "Train/Samples/train_loss" in event]) == 4
