"""Offload to disks that are full, that fail, or that are not there."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import zerolite
from tests.checkpoint.runs import differences, facts, make_engine
from tests.distributed.test_offload import RUNS, engine_loop, offload
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
            stepped, save = raised(engine.step), raised(lambda: engine.save_checkpoint(directory, tag="broken"))
            assert not stepped or "the swap file of rank 0" in stepped
            loop = raised(lambda: list(engine_loop(engine, recipe, 2)))
            assert "the swap file of rank 0" in loop, "a step was done with what the disk has lost"
            export = raised(lambda: engine.save_16bit_model(directory))
            if not save:
                engine.load_checkpoint(directory, tag="broken")
                assert not differences(before[step], weights_and_states()), "what the disk has lost was saved"
            else:
                assert "the swap file of rank 0" in save
            if "failed in its middle" in save:
                assert "last checkpoint" in save and "failed in its middle" in export
            engine.load_checkpoint(directory, tag="good")
            for step in (2, 3):
                list(engine_loop(engine, recipe, step))
        else:
            assert len(requests) <= point, "one that failed was not noticed"
        assert differences(wanted, facts(engine, recipe.states)) == []
    assert noticed == len(points) or noticed > 20


def lose(directory: Path) -> None:
    """Overwrite this process's swap files in a directory with zeros, as a disk that forgets does."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(str(directory)):
                fd = os.open(f"/proc/self/fd/{number}", os.O_RDWR)
                os.pwrite(fd, bytes(os.fstat(fd).st_size), 0)
                os.fsync(fd)
                os.close(fd)


@pytest.mark.fast("2-2-mixture in bf16")
@pytest.mark.parametrize("name", ["wide", "mixture in bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_what_a_disk_forgets_is_not_saved(stage: int, name: str, tmp_path: Path) -> None:
    """A save may come before the loss, and a read of masters after it. One rank's disk is enough for all."""
    recipe, directory = RUNS[name], str(tmp_path / "saved")
    engine = make_engine(recipe, stage, zero=offload("nvme", tmp_path), aio={"checksums": True})
    for step in range(2):
        list(engine_loop(engine, recipe, step))
    engine.save_checkpoint(directory, tag="good")
    weights = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    zerolite.set_full_master(weights[0], zerolite.get_full_master(weights[0]) * 0.5)
    engine.save_checkpoint(directory, tag="good")
    good = facts(engine, recipe.states)
    if dist.get_rank() == 1:
        lose(tmp_path)
    zerolite.get_full_master(weights[0])
    for _ in range(2):
        for save in (engine.save_checkpoint, engine.save_16bit_model):
            error = raised(lambda save=save: save(directory))
            for words in ("the swap file of rank 1", "are not those that were written there", "the last checkpoint"):
                assert words in error
    engine.load_checkpoint(directory)
    assert not differences(good, facts(engine, recipe.states))
    list(engine_loop(engine, recipe, 2))
    engine.save_checkpoint(directory, tag="better")


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
