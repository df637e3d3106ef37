"""All ranks of a job are killed at random times while it saves, again and again, and a new job goes on."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerolite
from tests.checkpoint import faults
from zerolite.checkpoint.directory import NoCheckpoint, find
from zerolite.checkpoint.reader import CheckpointReader

ROWS = 23


class Ramp(torch.nn.Module):
    """With SGD, a learning rate and a momentum of 1, every weight is t (t + 1) / 2 after step t, and its buffer -t."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(ROWS, 701))
        self.bias = torch.nn.Parameter(torch.zeros(3))

    def forward(self) -> torch.Tensor:
        return -self.weight.sum() - self.bias.sum()


def _check(directory: Path) -> int:
    """The step of the checkpoint that is found, every number in which is of that step; 0 if there is none."""
    try:
        reader = CheckpointReader(find(directory))
    except NoCheckpoint:
        return 0
    assert [problem for _, problem in reader.verify() if problem is not None] == []
    step = reader.manifest.about.global_steps
    for name, shape in (("weight", (ROWS, 701)), ("bias", (3,))):
        weight, buffer = reader.read(f"parameters/{name}"), reader.read(f"optimizer/momentum_buffer/{name}")
        assert weight.shape == buffer.shape == shape
        assert (weight == step * (step + 1) / 2).all() and (buffer == -step).all(), step
    return step


class Progress:
    """Shared with forks: the steps whose saves have begun, and have returned, on each rank."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def set(self, rank: int, which: str, step: int) -> None:
        struct.pack_into("q", self._memory, self._place(rank, which), step)

    def get(self, rank: int, which: str) -> int:
        return struct.unpack_from("q", self._memory, self._place(rank, which))[0]

    def _place(self, rank: int, which: str) -> int:
        return 64 * rank + ("begun", "returned").index(which) * 8


def _job(rank: int, world_size: int, store: Path, directory: Path, stage: int, progress: Progress) -> None:
    """One rank of a job, which ends when it is killed."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0, "momentum": 1.0}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"keep_last": 2, "timeout_s": 20.0},
    }
    engine = zerolite.initialize(Ramp(), settings)
    engine.load_checkpoint(directory, missing_ok=True)
    while True:
        engine.backward(engine())
        engine.step()
        step = engine.global_steps
        progress.set(rank, "begun", step)
        engine.save_checkpoint(directory, async_save=step % 2 == 0)
        # A save in the background has returned when the next call has waited for it.
        progress.set(rank, "returned", step if step % 2 else step - 1)


def _forked(action: Callable[[], Any], log: Path) -> int:
    process = os.fork()
    if process:
        return process
    signal.alarm(60)
    try:
        action()
    except BaseException:  # a rank that hears of the other's death
        log.write_text(traceback.format_exc())
        time.sleep(60)
    os._exit(1)


def _killed_at_random(
    directory: Path, world_size: int, stage: int, found: int, choose: random.Random
) -> tuple[int, int, str]:
    """A job resumes from the step ``found`` and saves each step until all its ranks are killed. Gives the last step
    whose save has returned, the last whose save has begun, and what is left of saves."""
    progress = Progress()
    number = choose.getrandbits(48)
    store = directory.with_name(f"store-{number:x}")
    logs = [directory.with_name(f"log-{number:x}-{rank}") for rank in range(world_size)]
    ranks = range(world_size)
    jobs = [(lambda rank=rank: _job(rank, world_size, store, directory, stage, progress)) for rank in ranks]
    processes = [_forked(job, log) for job, log in zip(jobs, logs, strict=True)]

    def wait_until(step: int) -> float:
        """When a save of ``step`` has begun on all ranks."""
        deadline = time.monotonic() + 40
        while min(progress.get(rank, "begun") for rank in ranks) < step:
            time.sleep(0.0005)
            said = [log.read_text() for log in logs if log.exists()]
            assert not said and time.monotonic() < deadline, said
        return time.monotonic()

    first = wait_until(found + 1)
    saves = choose.randint(1, 3)
    time.sleep(choose.uniform(0, (wait_until(found + 1 + saves) - first) / saves))  # a save and a step
    for rank in choose.sample(ranks, world_size):
        os.kill(processes[rank], signal.SIGKILL)
        time.sleep(choose.choice((0.0, 0.0, choose.uniform(0, 0.01))))
    for process in processes:
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, [p.read_text() for p in logs]
    returned = max(progress.get(rank, "returned") for rank in ranks)
    begun = max(progress.get(rank, "begun") for rank in ranks)
    left = {name.split("-")[0] for name in faults.hidden(directory)}
    return returned, begun, " ".join(sorted(left)) or "nothing"


def random_kills(directory: Path, world_size: int, trials: int, seed: int) -> dict[str, int]:
    """Gives how often there was what left of saves, how often the step that was being saved was found ("new"), or the
    one before, and the last step."""
    torch.set_num_threads(1)
    choose = random.Random(seed)
    seen: Counter[str] = Counter()
    step = 0
    for trial in range(trials):
        returned, begun, left = _killed_at_random(directory, world_size, trial % 4, step, choose)
        found = _check(directory)
        assert max(step, returned) <= found <= begun, (trial, step, returned, found, begun)
        seen[f"left {left}"] += 1
        seen["new" if found == begun else "before"] += 1
        step = found
    return {**seen, "steps": step}
