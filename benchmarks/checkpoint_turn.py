"""One competitor's turn in `checkpoint.py`: its ranks save and load, and beside each of these use the disk directly.

A turn is a dict. Its seconds go until the last rank was ready; the disk's own are for file_bytes, in as many files as
there are ranks.

    save_s, durable_s               until the call returned; until its files were on the disk as well
    zeros_s, direct_s, random_s     dd; dd past the page cache; random bytes
    warm_s, cold_s                  loads, from the page cache and without it
    read_warm_s, read_cold_s        dd reading what random_s wrote
    train_s                         the steps after the save
    first_stall_s, stall_s          until an asynchronous save returned, the first and the second one of the process
    total_s, plain_s                the second one, the steps after it, and its end; as many steps before it
    copy_s, new_copy_s              a copy of file_bytes, in memory that was in use before and in new memory

A time is missing where there is no such thing: direct_s without O_DIRECT, cold ones where the page cache cannot be
emptied, asynchronous ones for competitors that only save in the foreground.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks import disk
from benchmarks.model import ModelSize, build_model, make_batches
from benchmarks.ranks import mean_over_ranks, settled, together
from benchmarks.report import disagreement
from benchmarks.savers import COMPETITORS, Saver
from benchmarks.setting import Setting

LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Plan:
    """Settings that all competitors share. warmup, steps: of training; steps: in each of the parts that are timed.
    directory: on the disk that is measured. flip: what stands beside a save or load comes in the opposite order."""

    size: ModelSize
    directory: Path
    warmup: int
    steps: int
    flip: bool


def serve(pipe: Connection, rank: int, setting: Setting, name: str, plan: Plan) -> None:
    """Serve the `Workers` of `checkpoint.py`: the first reply is None, the second the turn."""
    competitor = COMPETITORS[name]
    saver: Saver = competitor.build(build_model(plan.size), setting, **competitor.options)
    own = _Rank(saver, rank, setting, plan)
    own.train(0, plan.warmup)
    pipe.send(None)
    while pipe.recv() > 0:
        pipe.send(own.turn())


class _Rank:
    def __init__(self, saver: Saver, rank: int, setting: Setting, plan: Plan) -> None:
        self.saver, self.rank, self.setting, self.plan = saver, rank, setting, plan
        self.batches = make_batches(plan.size, setting.micro_batch, rank)
        self.files = {name: plan.directory / f"{name}-{rank}" for name in ("zeros", "random", "direct", "probe")}

    def turn(self) -> dict[str, Any]:
        directory = self.plan.directory / "save"
        self.saver.save(directory)  # the first one loads modules and allocates
        dist.barrier()
        file_bytes = disk.size_of(disk.files_under(directory))
        share = max(1, file_bytes // self.setting.world_size)
        disk.remove(directory)

        turn = {"file_bytes": file_bytes, **self._write(directory, share)}
        turn["train_s"], expected = self.train(self.plan.warmup, self.plan.steps)
        turn |= self._read(directory)
        _, found = self.train(self.plan.warmup, self.plan.steps)
        sentence = disagreement(found, expected, LOSS_TOLERANCE)
        if sentence:
            raise RuntimeError(f"expected to continue from the checkpoint after the load, but {sentence}")
        disk.remove(directory)
        return turn | (self._in_background(directory, share) if self.saver.asynchronous else {})

    def train(self, first: int, steps: int) -> tuple[float, list[float]]:
        """Return seconds of all steps, from batch `first` on, and their losses."""
        losses: list[Tensor] = []

        def run() -> None:
            for number in range(first, first + steps):
                losses.append(self.saver.step(*self.batches[number % len(self.batches)]))

        seconds = together(run)
        return seconds, mean_over_ranks([float(loss) for loss in losses], self.setting.device)

    def _write(self, directory: Path, share: int) -> dict[str, float]:
        """Time the save and the disk's own files, of which that of random bytes stays."""
        zeros, random, direct, probe = self.files.values()
        source = disk.random_bytes()
        actions: dict[str, Callable[[], None]] = {
            "zeros_s": lambda: disk.dd_write(zeros, share),
            "save_s": lambda: self.saver.save(directory),
            "random_s": lambda: disk.write(random, share, source),
            "direct_s": lambda: disk.dd_write(direct, share, direct=True),
        }
        if not disk.allows_direct(probe):
            del actions["direct_s"]
        seconds: dict[str, float] = {}
        for name in list(actions)[::-1] if self.plan.flip else actions:
            seconds[name] = settled(actions[name])
            if name == "save_s":
                seconds["durable_s"] = seconds[name] + together(lambda: disk.sync(disk.part_of(directory)))
            # Each of them finds its pages where the last one has left them: new ones may take a hypervisor longer to
            # hand out than the disk takes to write them.
            disk.forget([*disk.part_of(directory), *(path for path in (zeros, random, direct) if path.exists())])
            dist.barrier()
        zeros.unlink()
        direct.unlink(missing_ok=True)
        return seconds

    def _read(self, directory: Path) -> dict[str, float]:
        """Time loads and reads: warm, then cold."""
        random, files = self.files["random"], disk.part_of(directory)
        actions = {"{}_s": lambda: self.saver.load(directory), "read_{}_s": lambda: disk.dd_read(random)}
        order = list(actions)[::-1] if self.plan.flip else list(actions)
        disk.fetch([*files, random])
        seconds = {name.format("warm"): together(actions[name]) for name in order}
        if mean_over_ranks([float(disk.forget([*files, random]))], self.setting.device) == [1.0]:
            seconds |= {name.format("cold"): together(actions[name]) for name in order}
        random.unlink()
        return seconds

    def _in_background(self, directory: Path, share: int) -> dict[str, float]:
        first_stall_s = settled(lambda: self.saver.save_async(directory))
        self.saver.wait()
        disk.remove(directory)

        plain_s, _ = self.train(self.plan.warmup, self.plan.steps)
        stall_s = settled(lambda: self.saver.save_async(directory))
        steps_s, _ = self.train(self.plan.warmup, self.plan.steps)
        total_s = stall_s + steps_s + together(self.saver.wait)
        disk.remove(directory)
        seconds = {"first_stall_s": first_stall_s, "stall_s": stall_s, "total_s": total_s, "plain_s": plain_s}
        return seconds | disk.copies(share)
