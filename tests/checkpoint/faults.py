"""Faults at the points where a save writes: a process that dies, a disk that fails; and a small checkpoint to try them
on, saved and read without an engine."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from zerolite.checkpoint import filesystem
from zerolite.checkpoint.directory import TrainingRun, default_tag, find
from zerolite.checkpoint.flat_ranges import Shard, range_of, split_evenly
from zerolite.checkpoint.manifest import Manifest, SavedGrid
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.checkpoint.storage import Commit, now, write_checkpoint

Operation = tuple[str, str]  # what is to happen, and the name of the file


@contextlib.contextmanager
def hooked(before: Callable[[str, Path], None]) -> Iterator[None]:
    filesystem.before_operation = before
    try:
        yield
    finally:
        filesystem.before_operation = filesystem._nothing


@contextlib.contextmanager
def recorded() -> Iterator[list[Operation]]:
    """Gives the operations so far."""
    done: list[Operation] = []
    with hooked(lambda operation, path: done.append((operation, path.name))):
        yield done


@contextlib.contextmanager
def failing(at: int, kind: int, always: bool = False, only: str = "") -> Iterator[list[Operation]]:
    """The operation ``at`` (of those called ``only``) raises OSError ``kind``; ``always``: so do all that follow, but
    removals, as on a full disk. Gives the operations so far."""
    done: list[Operation] = []

    def before(operation: str, path: Path) -> None:
        if only not in ("", operation):
            return
        done.append((operation, path.name))
        if len(done) == at + 1 or (always and len(done) > at and operation != "remove"):
            raise OSError(kind, os.strerror(kind), str(path))

    with hooked(before):
        yield done


@contextlib.contextmanager
def death(at: int) -> Iterator[None]:
    operations = itertools.count()

    def before(operation: str, path: Path) -> None:
        if next(operations) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    with hooked(before):
        yield


def as_nobody(path: Path, action: Callable[[], str]) -> str:
    """Return the result of ``action`` in a process that is not root's. ``path``, and what is above it, is opened for
    it."""
    if os.geteuid() != 0:
        return action()
    for parent in (path, *path.parents):
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    ours, theirs = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.setgroups([])
            os.setuid(65534)
            os.write(theirs, action().encode())
        except BaseException as error:
            os.write(theirs, repr(error).encode())
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        result = pipe.read().decode()
    os.waitpid(process, 0)
    return result


def values(step: int) -> dict[str, torch.Tensor]:
    weight = torch.arange(4 * 700.0).view(4, 700)
    return {
        "parameters/weight": weight + step,
        "optimizer/exp_avg/weight": weight * step,
        "parameters/bias": torch.full((3,), step).to(torch.bfloat16),
        "buffers/count": torch.tensor(step),
        "buffers/empty": torch.empty(0, 2),
    }


RUN = TrainingRun()


def manifest(step: int, tag: str | None = None, run: str = RUN.id, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "saved_at": now(), "global_steps": step, "grid": SavedGrid(1, 1, 1), "stage": 0, "config": {},
        "versions": {"zerolite": "0"}, "exclude_frozen_parameters": False,
    }  # fmt: skip
    return Manifest(tag=tag or default_tag(step), run=run, **(fields | changes))


def shards_of(key: str, tensor: torch.Tensor, ranks: int = 1) -> list[Shard]:
    """Return the shards of a tensor of which each rank writes an equal part."""
    if not tensor.numel():
        return [Shard.whole(key, tensor)]
    flat = [range_of(key, tensor)]
    return [shard for rank in range(ranks) for part in split_evenly(flat, rank, ranks) for shard in part.shards()]


def save(save_dir: Path, step: int, tag: str | None = None, run: TrainingRun | None = RUN, **commit: Any) -> Path:
    described = manifest(step, tag, run.id if run else TrainingRun().id)
    shards = [shard for key, tensor in values(step).items() for shard in shards_of(key, tensor)]
    what = Commit(save_dir, described, state(step), run, **commit)
    return write_checkpoint(save_dir, described.tag, shards, {"step": {"weight": step}}, what)


def describe(shape: Sequence[int], dtype: str = "BF16", trained: bool = True, aliases: Sequence[str] = ()) -> Any:
    return {"shape": list(shape), "dtype": dtype, "trained": trained, "aliases": list(aliases)}


def state(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "parameters": {"weight": describe([4, 700], "F32"), "bias": describe([3])},
        "buffers": {"count": {"shape": [], "dtype": "I64"}, "empty": {"shape": [0, 2], "dtype": "F32"}},
        "optimizer": {"groups": []},
    }


def load(save_dir: Path, tag: str | None = None) -> int:
    """The step of the checkpoint that is found, every byte of which has been compared."""
    reader = CheckpointReader(find(save_dir, tag))
    step = reader.manifest.global_steps
    assert list(reader.problems()) == []
    assert reader.state == {**state(step), "optimizer": {"groups": [], "scalars": {"step": {"weight": step}}}}
    wanted = values(step)
    assert reader.tensors.keys() == wanted.keys()
    for key, tensor in wanted.items():
        found = reader.read(key)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), key
    return step


def resumed(save_dir: Path) -> TrainingRun:
    """Return the run of another job, which has loaded the checkpoint that is found."""
    run = TrainingRun()
    run.resume(CheckpointReader(find(save_dir)).manifest.run)
    return run


def hidden(save_dir: Path) -> list[str]:
    return sorted(path.name for path in save_dir.glob(".*") if path.name != ".lock")
