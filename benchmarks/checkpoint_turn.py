"""One competitor's turn in `checkpoint.py`: its ranks save and load, and beside each of these use the disk directly."""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import disk
from benchmarks.competitors import Setting, mean_over_ranks
from benchmarks.model import ModelSize, build_model, make_batches
from benchmarks.savers import COMPETITORS, Saver

COPIES = 3
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Plan:
    """Settings that all competitors share. warmup, steps: of training; steps: in each of the parts that are timed.
    directory: on the disk that is measured."""

    size: ModelSize
    directory: Path
    warmup: int
    steps: int


@dataclass(frozen=True)
class Background:
    """Asynchronous saves. first_stall_s: until training could go on, the first time in a process; stall_s: the second
    time. total_s: the second one, some steps after it, and until it was complete; wait_s: of that, after the last step.
    plain_s: as many steps before it. copy_s: a copy of as many bytes in memory that was in use before; new_copy_s: in
    new memory."""

    first_stall_s: float
    stall_s: float
    total_s: float
    wait_s: float
    plain_s: float
    copy_s: float
    new_copy_s: float


@dataclass(frozen=True)
class Turn:
    """Seconds until the last rank was ready. The disk's own are for file_bytes in as many files as there are ranks.

    save_s: until the call returned; durable_s: until its files were on the disk as well. zeros_s, direct_s: of dd,
    direct_s past the page cache, None where the file system has no such thing; random_s: random bytes. Loads and reads:
    "warm" from the page cache, "cold" without it, None where it cannot be emptied. train_s: some steps after the save;
    losses: of the warm-up and of these. background: None where there are no asynchronous saves.
    """

    parameters: int
    file_bytes: int
    save_s: float
    durable_s: float
    zeros_s: float
    random_s: float
    direct_s: float | None
    warm_s: float
    cold_s: float | None
    read_warm_s: float
    read_cold_s: float | None
    train_s: float
    losses: list[float]
    background: Background | None


def serve(pipe: Connection, rank: int, setting: Setting, name: str, plan: Plan, flip: bool) -> None:
    """Serve the `Workers` of `checkpoint.py`: the first reply is None, the second the `Turn`."""
    competitor = COMPETITORS[name]
    model = build_model(plan.size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    saver: Saver = competitor.build(model, setting, **competitor.options)
    rank_in_turn = _Rank(saver, make_batches(plan.size, setting.micro_batch, rank), rank, setting, plan, flip)
    _, losses = rank_in_turn.train(0, plan.warmup)
    pipe.send(None)
    while pipe.recv() > 0:
        pipe.send(rank_in_turn.turn(parameters, losses))


class _Rank:
    """flip: everything that stands beside a save or load comes in the opposite order."""

    def __init__(
        self, saver: Saver, batches: Sequence[Any], rank: int, setting: Setting, plan: Plan, flip: bool
    ) -> None:
        self.saver, self.batches = saver, batches
        self.rank, self.setting, self.plan, self.flip = rank, setting, plan, flip
        self.source = disk.random_bytes()
        self.saved = 0

    def turn(self, parameters: int, losses: list[float]) -> Turn:
        directory = self._next()
        self.saver.save(directory)  # the first one loads modules and allocates
        file_bytes = self._size(directory)
        self._remove(directory)

        directory = self._next()
        written = self._writing(directory, file_bytes)
        train_s, expected = self.train(self.plan.warmup, self.plan.steps)
        warm, cold = self._reading(directory)
        _, again = self.train(self.plan.warmup, self.plan.steps)
        check_resumed(expected, again)
        self._remove(directory)

        return Turn(
            parameters=parameters,
            file_bytes=file_bytes,
            save_s=written["save"],
            durable_s=written["durable"],
            zeros_s=written["zeros"],
            random_s=written["random"],
            direct_s=written.get("direct"),
            warm_s=warm[0],
            read_warm_s=warm[1],
            cold_s=cold[0],
            read_cold_s=cold[1],
            train_s=train_s,
            losses=losses + expected,
            background=self._in_background(file_bytes) if self.saver.asynchronous else None,
        )

    def train(self, first: int, steps: int) -> tuple[float, list[float]]:
        """Seconds of all steps, from batch `first` on, and their losses."""
        losses: list[Tensor] = []

        def run() -> None:
            for number in range(first, first + steps):
                losses.append(self.saver.step(*self.batches[number % len(self.batches)]))

        seconds = self._together(run)
        return seconds, mean_over_ranks([float(loss) for loss in losses], self.setting.device)

    # ---------------------------------------------------------------- parts of a turn

    def _writing(self, directory: Path, file_bytes: int) -> dict[str, float]:
        """Seconds of the save, "durable" and of the disk's own files, of which that of random bytes stays."""
        share = max(1, file_bytes // self.setting.world_size)
        zeros, random, direct = (self._file(name) for name in ("zeros", "random", "direct"))
        actions: dict[str, Callable[[], None]] = {
            "zeros": lambda: disk.dd_write(zeros, share),
            "save": lambda: self.saver.save(directory),
            "random": lambda: disk.write(random, share, self.source),
            "direct": lambda: disk.dd_write(direct, share, direct=True),
        }
        if not disk.allows_direct(self._file("probe")):
            del actions["direct"]
        seconds: dict[str, float] = {}
        for name in list(actions)[::-1] if self.flip else actions:
            seconds[name] = self._settled(actions[name])
            if name == "save":
                seconds["durable"] = seconds[name] + self._together(lambda: disk.sync(self._part(directory)))
            # Each of them finds its pages where the last one has left them: new ones may take a hypervisor longer to
            # hand out than the disk takes to write them.
            disk.forget([*self._part(directory), *(path for path in (zeros, random, direct) if path.exists())])
            dist.barrier()
        zeros.unlink()
        direct.unlink(missing_ok=True)
        return seconds

    def _reading(self, directory: Path) -> tuple[tuple[float, float], tuple[float | None, float | None]]:
        """The competitor's load and the disk's own, from the page cache and without it."""
        random = self._file("random")
        actions: list[Callable[[], None]] = [lambda: self.saver.load(directory), lambda: disk.dd_read(random)]
        order = [1, 0] if self.flip else [0, 1]
        files = disk.files_under(directory) if self.rank == 0 else []
        disk.fetch([*files, random])
        warm = {index: self._together(actions[index]) for index in order}
        dropped = mean_over_ranks([float(disk.forget([*files, random]))], self.setting.device)[0] == 1.0
        cold = {index: self._together(actions[index]) for index in order} if dropped else {}
        random.unlink()
        return (warm[0], warm[1]), (cold.get(0), cold.get(1))

    def _in_background(self, file_bytes: int) -> Background:
        directory = self._next()
        first_stall_s = self._settled(lambda: self.saver.save_async(directory))
        self.saver.wait()
        self._remove(directory)

        directory = self._next()
        plain_s, _ = self.train(self.plan.warmup, self.plan.steps)
        stall_s = self._settled(lambda: self.saver.save_async(directory))
        steps_s, _ = self.train(self.plan.warmup, self.plan.steps)
        wait_s = self._together(self.saver.wait)
        self._remove(directory)
        copies = self._copying(file_bytes // self.setting.world_size)
        return Background(first_stall_s, stall_s, stall_s + steps_s + wait_s, wait_s, plain_s, *copies)

    def _copying(self, nbytes: int) -> tuple[float, float]:
        """Seconds of a copy on each rank at the same time, into memory in use and into new memory."""

        def memory() -> Tensor:
            return torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)

        source, target = memory().fill_(1), memory().fill_(2)
        seconds = [self._together(lambda: target.copy_(source)) for _ in range(COPIES)]
        return statistics.median(seconds), self._together(lambda: memory().copy_(source))

    # ---------------------------------------------------------------- together

    def _together(self, action: Callable[[], object]) -> float:
        """Seconds from the moment when all ranks begin until the last one is ready."""
        dist.barrier()
        start = time.perf_counter()
        action()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def _settled(self, action: Callable[[], object]) -> float:
        """The same, when nothing waits to be written."""
        dist.barrier()
        if self.rank == 0:
            os.sync()
        return self._together(action)

    def _part(self, directory: Path) -> list[Path]:
        """As many of the files as any rank's, whichever rank wrote them."""
        return disk.files_under(directory)[self.rank :: self.setting.world_size]

    def _file(self, name: str) -> Path:
        return self.plan.directory / f"{name}-{self.rank}"

    def _next(self) -> Path:
        self.saved += 1
        return self.plan.directory / f"save-{self.saved}"

    def _size(self, directory: Path) -> int:
        dist.barrier()
        return disk.size_of(disk.files_under(directory))

    def _remove(self, directory: Path) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(directory)


def check_resumed(expected: Sequence[float], found: Sequence[float]) -> None:
    """Raises RuntimeError unless the steps after a load are those after the save."""
    for step, (before, after) in enumerate(zip(expected, found, strict=True), 1):
        if not abs(before - after) <= LOSS_TOLERANCE:  # also true for NaN
            raise RuntimeError(
                f"expected to continue from the checkpoint: the loss of step {step} after the save was {before:.6f}, "
                f"after the load it is {after:.6f}"
            )
