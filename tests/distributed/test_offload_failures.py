"""Offload to disks that are full, that fail, or that are not there."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.checkpoint.runs import differences, facts, make_engine
from tests.distributed.test_offload import RUNS, engine_loop, offload
from tests.toolkit import training
from tests.toolkit.compare import assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raised
from zerolite.offload import swap_file
from zerolite.ops.async_io import AsyncIO, IOTask


@contextlib.contextmanager
def failing(at: int) -> Iterator[list[str]]:
    """Request number ``at`` to the disk fails: a write for want of room, a read at the end of the file. Gives the kinds
    of the requests so far."""
    seen: list[str] = []
    original = AsyncIO._begin
    full, empty = os.open("/dev/full", os.O_WRONLY), os.open("/dev/null", os.O_RDONLY)

    def begin(self: AsyncIO, write: bool, fd: int, *args: Any) -> IOTask:
        seen.append("write" if write else "read")
        return original(self, write, fd if len(seen) - 1 != at else full if write else empty, *args)

    try:
        with mock.patch.object(AsyncIO, "_begin", begin):
            yield seen
    finally:
        gc.collect()  # no request is under way
        os.close(full)
        os.close(empty)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "points"),
    [
        ("sums in bf16", 2, [0, 7, 40, 80]),
        ("mixture in bf16", 2, range(150)),
        ("NAdam", 3, range(150)),
        ("wide", 1, range(150)),
    ],
)
@on_ranks(1, timeout=600)
def test_an_error_of_any_request_is_not_forgotten(name: str, stage: int, points: Any, tmp_path: Path) -> None:
    """After an error of the disk nothing goes on as if there had been none, but from the checkpoint on everything does:
    of a gradient on its way there, of what is on its way to the update, and of its result on the way back."""
    recipe, directory = RUNS[name], str(tmp_path / "saved")
    (tmp_path / "disk").mkdir()
    zero = {**offload("nvme", tmp_path / "disk"), "sub_group_size": 5000}
    engine = make_engine(recipe, stage, zero=zero)

    def weights_and_states() -> dict[str, Any]:
        found = facts(engine, recipe.states)
        return {key: found[key] for key in ("masters", "parameters", *recipe.states)}

    before: dict[int, dict[str, Any]] = {}  # by step
    for step in range(4):
        if step == 2:
            engine.save_checkpoint(directory, tag="good")
        before[step] = weights_and_states()
        list(engine_loop(engine, recipe, step))
    wanted, noticed = facts(engine, recipe.states), 0
    for point in points:
        engine.load_checkpoint(directory, tag="good")
        error = ""
        with failing(point) as requests:
            for step in (2, 3):
                error = error or raised(lambda step=step: list(engine_loop(engine, recipe, step)))
                if error:
                    break
        if error:
            noticed += 1
            assert error.startswith(("OSError", "UnexpectedEnd"))
            assert "bytes at byte" in error and str(tmp_path) in error
            in_update = "has updated its parts of" in error  # otherwise gradients are lost, and nothing else
            assert in_update or not differences(before[step], weights_and_states())
            save = raised(lambda: engine.save_checkpoint(directory, tag="broken"))
            export = raised(lambda: engine.save_16bit_model(directory))
            loop = raised(lambda: list(engine_loop(engine, recipe, 2)))
            assert ("failed in its middle" in loop) == in_update == bool(loop), "a step was done with what is lost"
            if not save:
                engine.load_checkpoint(directory, tag="broken")
                assert not differences(before[step], weights_and_states()), "what the disk has lost was saved"
            else:
                assert "the swap file of rank 0" in save and "the swap file of rank 0" in export
            if in_update:
                assert "last checkpoint" in save and "failed in its middle" in save and "failed in its" in export
            engine.load_checkpoint(directory, tag="good")
            for step in (2, 3):
                list(engine_loop(engine, recipe, step))
        else:
            assert len(requests) <= point, "one that failed was not noticed"
        assert differences(wanted, facts(engine, recipe.states)) == []
    assert noticed == len(points) or noticed > 20


@contextlib.contextmanager
def losing(kind: str) -> Iterator[None]:
    """All reads end too early, or all writes fail for want of room."""
    original, bad = AsyncIO._begin, os.open("/dev/null" if kind == "read" else "/dev/full", os.O_RDWR)

    def begin(self: AsyncIO, write: bool, fd: int, *args: Any) -> IOTask:
        return original(self, write, bad if write == (kind == "write") else fd, *args)

    try:
        with mock.patch.object(AsyncIO, "_begin", begin):
            yield
    finally:
        gc.collect()  # no request is under way
        os.close(bad)


@pytest.mark.fast("4-statistics")
@pytest.mark.parametrize("where", ["statistics", "norms", "reductions", "sums over replicas", "written"])
@on_ranks(4)
def test_a_gradient_that_one_disk_has_lost_is_said_on_all(where: str, tmp_path: Path) -> None:
    """In the same step, in which nothing is updated; after that training goes on as if the batch had been dropped."""
    sets = {"shard_size": 2} if where == "sums over replicas" else {}
    made = at(2, "bf16", 3, 0.0, ADAMW, zero={**offload("nvme", tmp_path), **sets})
    engine, twin = training.make_engine(made, "Mlp"), training.make_engine(made, "Mlp")
    fails, before = dist.get_rank() == 1, training.snapshot(engine)
    for micro in range(2):
        with losing("write") if fails and micro and where == "norms" else contextlib.nullcontext():
            training.backward(engine, 0, micro)
            if where == "norms":
                engine._parts.reducer.wait()
        if not micro:
            engine.step()
    if where == "reductions":  # which add to what earlier ones have stored, when they are waited for
        pass
    elif where == "statistics":  # which have the squares of what has left the device, unless somebody has changed it
        engine.module.first.weight.grad.copy_(torch.ones(13, 7, dtype=torch.bfloat16))
    elif where == "sums over replicas":
        engine._parts.reducer.wait()
    elif where == "written":
        broken = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
        with mock.patch.object(swap_file.os, "fdatasync", broken) if fails else contextlib.nullcontext():
            zerolite.set_full_grad(engine.module.first.weight, torch.ones(13, 7))
    elif where == "norms":
        norms = [p.grad.norm(torch.inf) for p in engine.module.parameters()]
        assert any(map(torch.isnan, norms)), "a norm of what has gone"
        assert_same_on_ranks({str(number): norm.isnan() for number, norm in enumerate(norms)})
    with losing("read") if fails and where != "written" else contextlib.nullcontext():
        error = training.raised(lambda: engine.step(flush=True))
    kinds = ("OSError", "UnexpectedEnd") if fails else "RuntimeError: zerolite: rank 1 cannot make the update: "
    assert error.startswith(kinds)
    assert "the swap file of rank 1" in error
    assert_same_bits(training.snapshot(engine), before, where)
    engine.zero_grad()
    for one in (engine, twin):
        training.run_steps(one, 2, 1)
    assert_same_bits(training.snapshot(engine), training.snapshot(twin), where)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["scaler", "norm", "save", "drop"])
@on_ranks(2)
def test_a_lost_gradient_is_no_overflow(loop: str, tmp_path: Path) -> None:
    """Loops that skip a batch for its gradients hear of the disk all the same. Of a batch that is dropped before anyone
    has looked at it nothing remains."""
    made = at(2, "bf16", 1, 0.0, ADAMW, zero={**offload("nvme", tmp_path), "sub_group_size": 4096})
    engine, twin = training.make_engine(made, "Mlp"), training.make_engine(made, "Mlp")
    for each in (engine, twin):
        training.run_steps(each)
    scaler, before = torch.amp.GradScaler("cpu", init_scale=4.0), training.snapshot(engine)
    with losing("write") if dist.get_rank() == 1 else contextlib.nullcontext():
        loss = training.loss_of(engine, 0)
        (scaler.scale(loss) if loop == "scaler" else loss).backward()
        if loop == "drop":
            engine.zero_grad()
        else:
            engine._parts.reducer.wait()
    if loop in ("norm", "save"):
        assert torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0).isnan()
        engine.zero_grad()
    if loop == "norm":
        training.backward(engine, 1)
    if loop != "drop":
        calls = {"scaler": lambda: scaler.step(engine.optimizer), "save": lambda: engine.save_checkpoint(str(tmp_path))}
        error = raised(calls.get(loop, engine.step))
        assert "the swap file of rank 1" in error and "failed after 0 of them" in error
        engine.zero_grad()
    assert_same_bits(training.snapshot(engine), before, loop)
    for each in (engine, twin):
        training.run_steps(each, 2, 1)
    assert_same_bits(training.snapshot(engine), training.snapshot(twin), loop)
    assert engine.skipped_steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, timeout=600)
def test_an_update_in_which_one_disk_fails_is_said_on_all(stage: int, tmp_path: Path) -> None:
    """In the same step, whatever request of the update fails; from the checkpoint on training goes on."""
    zero = {**offload("nvme", tmp_path), "sub_group_size": 8192}
    engine = training.make_engine(at(stage, "bf16", 1, 0.5, ADAMW, zero=zero), sizes={"width": 61, "hidden": 331})
    training.run_steps(engine, 1, model="OddModel")
    engine.save_checkpoint(str(tmp_path), tag="good")
    fails, updated, last, causes = dist.get_rank() == 1, set(), -1, []

    def step() -> None:
        try:
            engine.step()
        except OSError as error:
            causes.append(str(error.__cause__))
            raise

    while True:
        training.backward(engine, 1, model="OddModel")
        engine._parts.reducer.wait()  # what has failed before is a refusal
        with failing(last + 1 if fails else -1) as requests:
            error = training.raised(step)
        if not error:
            break
        last, (counted,) = last + 1, re.findall("has updated its parts of ([0-9]+) of [0-9]+ parameters", error)
        updated.add(int(counted))
        assert "the swap file of rank 1" in error and "load the last checkpoint" in error
        assert error.startswith(("UnexpectedEnd", "OSError") if fails else "RuntimeError: zerolite: rank 1 failed in ")
        training.backward(engine, 1, model="OddModel")
        for call in (engine.step, lambda: engine.save_checkpoint(str(tmp_path), tag="bad"), engine.full_state_dict):
            assert "an update has failed in its middle" in training.raised(call)
        engine.load_checkpoint(str(tmp_path), tag="good")
    assert not fails or last + 1 == len(requests) == len(causes) > 20
    assert len(updated) > 1 and all("the swap file of rank 1" in cause for cause in causes)
    wanted = training.snapshot(engine)
    engine.load_checkpoint(str(tmp_path), tag="good")
    training.run_steps(engine, 1, 1, model="OddModel")
    assert_same_bits(training.snapshot(engine), wanted, "after the errors")
    for is_counted in (False, True):
        engine.zero_grad()
        with failing(len(requests) - 1 if is_counted and fails else -1) as requests:
            training.backward(engine, 1, model="OddModel")
            engine.clip_gradients(1.0)  # the statistics come before the error of the last write
    error = training.raised(engine.step)
    assert "a gradient is lost: writing" in error and "has updated its parts of" in error, error
    engine.zero_grad()  # it forgets the error, whose traceback keeps the engine


# -------------------------------------------------------------------- disks that are not there, or full


def begin(directory: Path, name: str, steps: int, **config: Any) -> tuple[str, str]:
    """The phase of the error, and the error, where each rank's ``nvme_path`` is relative to a directory of its own."""
    before, phase = os.getcwd(), "initialize"
    os.chdir(directory / str(dist.get_rank()))
    try:
        engine = make_engine(RUNS[name], 2, zero=offload("nvme", Path("swap")), **config)
        for step in range(steps):
            phase = f"step {step}"
            list(engine_loop(engine, RUNS[name], step))
    except Exception as error:
        return phase, str(error)
    finally:
        os.chdir(before)
    return "", ""


@pytest.mark.fast("2-missing")
@pytest.mark.parametrize("what", ["missing", "a file"])
@on_ranks(2)
def test_a_path_that_is_not_there_on_one_rank_is_said_on_all(what: str, tmp_path: Path) -> None:
    rank = dist.get_rank()
    (tmp_path / str(rank)).mkdir()
    if rank == 0:
        (tmp_path / "0" / "swap").mkdir()
    elif what == "a file":
        (tmp_path / "1" / "swap").touch()
    phase, error = begin(tmp_path, "mixture", 1)
    assert phase == "initialize" and "zero_optimization.offload_optimizer.nvme_path" in error
    assert {"missing": "swap does not exist", "a file": "swap is not a directory"}[what] in error
    assert rank or "rank 1:" in error


@on_ranks(2)
@pytest.mark.parametrize("files", [0, 4])
def test_a_disk_that_is_full_on_one_rank_is_said_on_all(files: int, tmp_path: Path) -> None:
    """files: so many tensors have room."""
    rank, room = dist.get_rank(), iter(range(files))
    (tmp_path / str(rank) / "swap").mkdir(parents=True)

    def allocate(*arguments: Any) -> None:
        if next(room, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(*arguments)

    fallocate = os.posix_fallocate
    with mock.patch.object(swap_file.os, "posix_fallocate", allocate if rank == 1 else fallocate):
        phase, error = begin(tmp_path, "wide in bf16", 1)
    assert phase == "initialize" and "expected room for" in error and "the swap file of rank 1 in swap" in error
    assert rank or "zerolite.initialize: rank 1" in error
