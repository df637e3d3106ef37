"""All ranks are told if one rank alone cannot go on, in the same step or at the next look of the host: its optimizer
refuses an update, or it has not ended a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.distributed.test_agreement import is_last
from tests.distributed.test_grid import DATA_TENSOR, PIPE, PIPE_TENSOR, run, settings
from tests.toolkit import grids, models
from tests.toolkit.compare import assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import ADAMW, at, config, dynamic_fp16
from tests.toolkit.grids import Grid
from tests.toolkit.lockstep import skipping_on_device
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import backward, counters, loss_of, make_engine, raised, run_steps, snapshot
from zerolite.comm import record

Undo = Callable[[], Any]


def train(engine: Any, steps: int = 1, first: int = 0) -> None:
    run_steps(engine, steps, first, "OddModel")


# -------------------------------------------------------------------- what a rank does to its optimizer


def _state(engine: Any) -> dict[str, Any]:
    """The states of the last parameter that has some on this rank."""
    state: dict[str, Any] = list(engine.optimizer.state.values())[-1]
    return state


def _short(engine: Any) -> Undo:
    state = _state(engine)
    before, state["exp_avg"] = state["exp_avg"], torch.zeros(3)
    return lambda: state.update(exp_avg=before)


def _no_group(engine: Any) -> Undo:
    groups = engine.optimizer.param_groups
    before = groups.pop()
    return lambda: groups.append(before)


def _variant(engine: Any) -> Undo:
    group = engine.optimizer.param_groups[0]
    group["amsgrad"] = True
    return lambda: group.update(amsgrad=False)


def _text(engine: Any) -> Undo:
    group = engine.optimizer.param_groups[1]
    before, group["weight_decay"] = group["weight_decay"], "0.1"
    return lambda: group.update(weight_decay=before)


def _beta(engine: Any) -> Undo:
    """In place, which leaves the list the same object."""
    betas: list[Any] = engine.optimizer.param_groups[0]["betas"]
    betas[0] = None
    return lambda: betas.__setitem__(0, 0.9)


def _unfused(engine: Any) -> Undo:
    group = engine.optimizer.param_groups[1]
    group["fused"] = False
    return lambda: group.update(fused=True)


def _other_shape(engine: Any) -> Undo:
    unused = engine.module.unused  # a forward that fails would say so itself
    before = unused.data
    unused.data = torch.zeros(2, dtype=unused.dtype)
    return lambda: setattr(unused, "data", before)


Damage = tuple[Callable[[Any], Undo], str]
KERNELS: dict[str, Damage] = {
    "short": (_short, "ValueError: optimizer.state: expected 'exp_avg' of parameter"),
    "no group": (_no_group, "in the param group of the optimizer in which its training began"),
    "text": (_text, "optimizer.param_groups[1]: expected 'weight_decay' as a value like 0.1, got '0.1'"),
    "beta": (_beta, "optimizer.param_groups[0]: expected 'betas' as a value like (0.9, 0.95), got [None, 0.95]"),
    "variant": (_variant, "ValueError: optimizer.param_groups[0]['amsgrad'] is True"),
    "other shape": (_other_shape, "RuntimeError: parameter 'unused': expected (3,) of torch."),
}
TORCH: dict[str, Damage] = {
    "short": (_short, "as the last update has left it on this rank, got (3,) in torch.float32"),
    **{name: KERNELS[name] for name in ("no group", "text", "beta")},
}
UNFUSED = "optimizer.param_groups: expected 'fused' to stay True, as it was in zerolite.initialize"


def two_groups(made: dict[str, Any], unread: bool) -> Any:
    model = models.build(models.OddModel)
    own = [p for p in model.parameters() if p.requires_grad]
    with skipping_on_device(unread):
        engine = zerolite.initialize(model, made, model_parameters=[{"params": own[:6]}, {"params": own[6:]}])
    for group in engine.optimizer.param_groups:  # as a user may give them
        group["betas"] = list(group["betas"])
    return engine


def check_refusals(made: dict[str, Any], unread: bool, damages: dict[str, Damage]) -> None:
    """After each refusal, and its repair, training goes on as that of an engine that has known no damage."""
    engine, twin = two_groups(made, unread), two_groups(made, unread)
    late = unread and dist.get_world_size() > 1
    train(engine, 2)
    train(twin, 2)
    for step, (name, (damage, words)) in enumerate(damages.items(), 2):
        for count in range(1 + late):
            backward(engine, step + 50 + count, model="OddModel")
            undo = damage(engine) if is_last() and count == 0 else None
            with record() as recorder:
                said = raised(engine.step)
            assert bool(said) is (count == late), (name, said)
            assert_same_on_ranks({"calls": repr(recorder.calls)}, name)
            if undo is not None:
                undo()
        assert words in said, (name, said)
        told = f"RuntimeError: zerolite: rank {dist.get_world_size() - 1} cannot make the update: "
        assert is_last() or said.startswith(told), (name, said)
        engine.zero_grad()
        train(engine, 1, step)
        train(twin, 1, step)
        assert counters(engine) | {"micro_steps": 0} == counters(twin) | {"micro_steps": 0}, name
        assert_same_bits(snapshot(engine), snapshot(twin), name)


@pytest.mark.fast("2-3-bf16-True")
@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "bf16")])
@on_ranks(1, 2, 3, 4, timeout=120)
def test_an_update_that_one_rank_refuses_is_made_on_none(stage: int, precision: str, unread: bool) -> None:
    """``unread``: the host does not wait for the statistics, as on CUDA. Comparisons of the ranks are off."""
    more: dict[str, Any] = {"consistency_check_interval": 0}
    if precision == "fp16":
        more["fp16"] = dynamic_fp16()
    damages = {name: damage for name, damage in KERNELS.items() if stage < 3 or name != "other shape"}
    check_refusals(at(stage, precision, optimizer=ADAMW, **more), unread, damages)
    if dist.get_world_size() == 2:
        own = ("AdamW", {**ADAMW[1], "fused" if unread else "foreach": True})
        damages = TORCH | ({"unfused": (_unfused, UNFUSED)} if unread else {})
        check_refusals(at(stage, precision, optimizer=own, **more), unread, damages)


def refuse_in_a_grid(made: dict[str, Any], unread: bool) -> None:
    with skipping_on_device(unread):
        engine, twin = grids.make_engine(made), grids.make_engine(made)
    grids.train(engine, 1)
    grids.train(twin, 1)
    undo = _short(engine) if is_last() else None
    said = [raised(grids.train, engine, 1, step) for step in (51, 52)][unread]
    words = KERNELS["short"][1]
    assert said.startswith(words if is_last() else "RuntimeError: zerolite: rank "), said
    assert words in said
    if undo is not None:
        undo()
    engine.zero_grad()
    if not unread:
        assert raised(grids.train, engine, 1, 53) == ""
        grids.train(twin, 1, 53)
    told = [grids.train(one, 2, 1) for one in (engine, twin)]
    assert told[0] == told[1] and grids.held(engine) == grids.held(twin)
    grids.assert_ranks_agree(engine, *told)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "stage"), [(PIPE, 1), (DATA_TENSOR, 1), (DATA_TENSOR, 3), (PIPE_TENSOR, 1), ((2, 2, 1), 1)]
)
@pytest.mark.parametrize("unread", [False, True])
def test_ranks_with_other_parts_of_the_model_are_told(pools: Pools, grid: Grid, stage: int, unread: bool) -> None:
    made = settings(grid, stage, optimizer=ADAMW, consistency_check_interval=0)
    run(pools, grid, refuse_in_a_grid, made=made, unread=unread)


@pytest.mark.fast("2-1-False")
@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_a_refusal_behind_the_statistics_is_told_by_the_next_ones(stage: int, unread: bool, tmp_path: Path) -> None:
    """Clipping has collected statistics that do not tell the refusal, so this rank leaves its part of the update out.
    The next step tells it, or a save."""
    for then in ("step", "save"):
        engine = two_groups(at(stage, "bf16", optimizer=ADAMW, consistency_check_interval=0), unread)
        train(engine, 2)
        backward(engine, 2, model="OddModel")
        engine.clip_gradients(100.0)
        if is_last():
            _short(engine)
        with record() as recorder:
            assert raised(engine.step) == ""
        assert_same_on_ranks({"calls": repr(recorder.calls)})
        if then == "save":
            said = raised(engine.save_checkpoint, str(tmp_path))
        else:
            *quiet, said = [raised(train, engine, 1, step) for step in range(3, 4 + unread)]
            assert quiet == [""] * unread
        begin = "RuntimeError: ValueError: " if is_last() else "RuntimeError: zerolite: rank 1 cannot make the update: "
        assert said.startswith(begin), said
        assert "collected, so this rank alone has left that update out: load the last checkpoint" in said


# -------------------------------------------------------------------- a backward that one rank has not ended


def raise_in_backward(gradient: torch.Tensor) -> None:
    raise MemoryError("no memory")


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_backward_that_one_rank_has_cut_short_is_told(stage: int) -> None:
    """The rank catches the error and goes on to its step."""
    engine = make_engine(config(stage, "bf16", optimizer=ADAMW))
    train(engine)
    loss = loss_of(engine, 1, model="OddModel")
    if is_last():
        loss.register_hook(raise_in_backward)
    assert ("no memory" in raised(engine.backward, loss)) is is_last()
    said = raised(engine.step)
    assert "is nothing on rank 0, but left incomplete by a backward that raised an error on rank 1" in said
    engine.zero_grad()
    train(engine, 1, 2)


def run_out(engine: Any, name: str) -> None:
    """Let a method of the second bucket's local sum raise once on the last rank, as an allocation may."""
    local = engine._parts.reducer.order[1].local
    method = getattr(local, name)

    def fail(*args: Any) -> None:
        setattr(local, name, method)
        raise torch.OutOfMemoryError("no memory")

    if is_last():
        setattr(local, name, fail)


@pytest.mark.fast("2-complete-1-step", "2-finish-1-zero_grad")
@pytest.mark.parametrize("then", ["zero_grad", "step", "step again"])
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 defaults"])
@pytest.mark.parametrize("name", ["complete", "finish"])
@on_ranks(2)
def test_a_launch_or_a_wait_without_memory_leaves_nothing_unpaired(stage: str, name: str, then: str) -> None:
    """The rank launches the rest later: at the end of a backward, or in a step that reduces what no backward has."""
    made = at(stage, "bf16", optimizer=ADAMW, zero={"overlap_comm": False})
    engine, twin = make_engine(made), make_engine(made)
    train(engine, 2)
    train(twin, 2)
    with engine.no_sync() if then == "step again" else contextlib.nullcontext():
        loss = loss_of(engine, 2, model="OddModel")
        run_out(engine, name)
        said = raised(engine.backward, loss)
    if then == "step again" and stage in "01" and is_last():
        said = raised(engine.step)
    assert said == ("OutOfMemoryError: no memory" if is_last() else "")
    if then != "zero_grad":
        assert "left incomplete by a backward that raised an error on rank 1" in raised(engine.step)
    engine.zero_grad()
    train(engine, 1, 3)
    train(twin, 1, 3)
    assert_same_bits(snapshot(engine), snapshot(twin), then)
