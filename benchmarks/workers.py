"""The processes of one competitor: started once, then told by the parent when to run, asleep while the others run.

Each competitor has processes of its own, so that what one library changes in torch, allocates or breaks
touches no other.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import memory
from benchmarks.competitors import COMPETITORS, Setting, mean_over_ranks
from benchmarks.model import ModelSize, build_model, make_batches

REPLY_TIMEOUT_S = 600.0


class CompetitorFailed(Exception):
    """A rank of a competitor raised, or died; the message is its own, `details` its traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class _Failure:
    message: str
    details: str


@dataclass(frozen=True)
class Started:
    """What building and the warm-up steps gave. Bytes are those of the rank that has most; None where they were not
    measured."""

    parameters: int
    losses: list[float]
    peak_bytes: int | None
    resident_bytes: int | None


@dataclass(frozen=True)
class RoundResult:
    """Seconds of each step on rank 0; CPU seconds of the whole round and losses, both averaged over ranks."""

    step_s: list[float]
    cpu_s: float
    losses: list[float]


class Workers:
    """The ranks of one competitor. Use `start`, then `run` as often as wanted, then `close`.

    A rank calls `serve(pipe, rank, setting, *arguments)`, a function at the top of a module: it sends one reply when it
    is ready and one for each number of steps that it receives, until that is 0. The ranks meet at the file `store`.
    """

    def __init__(self, serve: Callable[..., None], setting: Setting, arguments: tuple[Any, ...], store: Path) -> None:
        # Forked from a server that has imported torch once and started nothing: a rank starts in a moment.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch.profiler", "torch.distributed.fsdp"])
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(setting.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(serve, rank, setting, arguments, str(store), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self) -> Any:
        """Wait until the model is built and the warm-up steps are done; rank 0's first reply."""
        return self._receive()

    def run(self, steps: int) -> Any:
        """Train `steps` more steps; rank 0's reply."""
        for pipe in self.pipes:
            pipe.send(steps)
        return self._receive()

    def _receive(self) -> Any:
        """Rank 0's reply; raises `CompetitorFailed` with the first failing rank's own words."""
        replies: dict[int, Any] = {}
        rank_of = {id(pipe): rank for rank, pipe in enumerate(self.pipes)}
        while len(replies) < len(self.pipes):
            ready = wait([pipe for pipe in self.pipes if rank_of[id(pipe)] not in replies], timeout=REPLY_TIMEOUT_S)
            if not ready:
                raise CompetitorFailed(f"no answer within {REPLY_TIMEOUT_S:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = rank_of[id(pipe)]
                try:
                    reply = replies[rank] = pipe.recv()
                except EOFError:
                    raise CompetitorFailed(f"rank {rank} died without a word") from None
                if isinstance(reply, _Failure):
                    raise CompetitorFailed(f"rank {rank}: {reply.message}", reply.details)
        return replies[0]

    def close(self) -> None:
        """End the processes. Harmless when they are gone already."""
        for pipe in self.pipes:
            try:
                pipe.send(0)
            except OSError:
                pass
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def _rank_main(
    serve: Callable[..., None], rank: int, setting: Setting, arguments: tuple[Any, ...], store: str, pipe: Connection
) -> None:
    os.dup2(2, 1)  # what a library prints is not part of the report
    try:
        join_group(rank, setting, store)
        serve(pipe, rank, setting, *arguments)
        dist.destroy_process_group()
    except BaseException as error:
        pipe.send(_Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))
        os._exit(1)  # the other ranks may wait in a collective for us: do not wait for them in turn


def join_group(rank: int, setting: Setting, store: str) -> None:
    """Make this process rank `rank` of a default group that meets at the file `store`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(setting.world_size))
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # its start and stop messages are no news here
    os.environ.update(LOCAL_SIZE=str(setting.world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if setting.device == "cpu":
        torch.set_num_threads(1)
        backend, device_id = "gloo", None
    else:
        torch.cuda.set_device(rank)
        backend, device_id = "nccl", torch.device("cuda", rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=setting.world_size, device_id=device_id
    )


def serve_gpt(pipe: Connection, rank: int, setting: Setting, name: str, size: ModelSize, warmup: int) -> None:
    """What `Workers` runs for `compare.py`: replies are a `Started`, then `RoundResult`s."""
    batches = batches_of(rank, setting, size, COMPETITORS[name].joint)
    taken = 0

    def train(steps: int) -> tuple[list[float], list[torch.Tensor]]:
        nonlocal taken
        clock, losses = StepClock(setting.device), []
        for _ in range(steps):
            losses.append(step(*batches[taken % len(batches)]))
            clock.tick()
            taken += 1
        return clock.seconds(), losses

    meter = memory.Meter(setting.device)
    with meter:
        model = build_model(size).to(setting.device)
        parameters = sum(p.numel() for p in model.parameters())
        step = COMPETITORS[name].make_step(model, setting)
        _, losses = train(warmup - 1)
        with meter.window():
            losses += train(1)[1]
    values = mean_over_ranks([float(loss) for loss in losses], setting.device)
    most = [most_of_ranks(count, setting.device) for count in (meter.peak_bytes, meter.resident_bytes)]
    pipe.send(Started(parameters, values, *most))

    while (steps := pipe.recv()) > 0:
        dist.barrier()
        cpu = time.process_time()
        seconds, losses = train(steps)
        cpu = time.process_time() - cpu
        cpu, *values = mean_over_ranks([cpu, *(float(loss) for loss in losses)], setting.device)
        pipe.send(RoundResult(seconds, cpu, values))


def batches_of(rank: int, setting: Setting, size: ModelSize, joint: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's sequences of each step; joint: those of all ranks, in their order."""
    ranks = range(setting.world_size) if joint else [rank]
    shares = zip(*(make_batches(size, setting.micro_batch, other) for other in ranks), strict=True)
    return [tuple(torch.cat(parts).to(setting.device) for parts in zip(*share, strict=True)) for share in shares]


def most_of_ranks(count: int | None, device: str) -> int | None:
    """The largest of the ranks' counts; None if there are none."""
    if count is None:
        return None
    most = torch.tensor(count, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


class StepClock:
    """Seconds between ticks. On CUDA by events on the current stream, so that timing adds no synchronisation."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.marks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if self.cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self.marks.append(mark)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.cuda:
            torch.cuda.synchronize()
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]
