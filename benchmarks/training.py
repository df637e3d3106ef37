"""One rank of a competitor of `compare.py`: it trains, and measures time, memory and losses."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks import memory
from benchmarks.competitors import COMPETITORS
from benchmarks.model import ModelSize, build_model, make_batches
from benchmarks.ranks import StepClock, mean_over_ranks, most_of_ranks
from benchmarks.setting import Setting

HOST_STEPS = 4  # after the timed steps of a round, for the host's time


@dataclass(frozen=True)
class Started:
    """Results of building and of the warm-up steps. Bytes are those of the rank that has most; None where they were not
    measured."""

    parameters: int
    losses: list[float]
    peak_bytes: int | None
    resident_bytes: int | None


@dataclass(frozen=True)
class RoundResult:
    """Seconds of each step on rank 0; CPU seconds of the whole round and losses, both averaged over ranks.

    host_s: on CUDA, seconds until the call of a step returns on rank 0, from an idle device; empty on the CPU.
    """

    step_s: list[float]
    cpu_s: float
    losses: list[float]
    host_s: list[float]


def serve_gpt(pipe: Connection, rank: int, setting: Setting, name: str, size: ModelSize, warmup: int) -> None:
    """Serve the `Workers` of `compare.py`: replies are a `Started`, then `RoundResult`s."""
    competitor = COMPETITORS[name]
    batches = batches_of(rank, setting, size, competitor.joint)
    taken = 0

    def train(steps: int) -> tuple[list[float], list[torch.Tensor]]:
        nonlocal taken
        clock, losses = StepClock(setting.device), []
        for _ in range(steps):
            losses.append(step(*batches[taken % len(batches)]))
            clock.tick()
            taken += 1
        return clock.seconds(), losses

    def host_seconds(steps: int) -> list[float]:
        nonlocal taken
        found = []
        for _ in range(steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step(*batches[taken % len(batches)])
            found.append(time.perf_counter() - start)
            taken += 1
        return found

    meter = memory.Meter(setting.device)
    with meter:
        with torch.device(setting.device):  # random numbers of a billion parameters take the host half a minute
            model = build_model(size)
        parameters = sum(p.numel() for p in model.parameters())
        step = competitor.build(model, setting, **competitor.options)
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
        host = host_seconds(HOST_STEPS) if setting.device == "cuda" else []
        pipe.send(RoundResult(seconds, cpu, values, host))


def batches_of(rank: int, setting: Setting, size: ModelSize, joint: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's sequences of each step; joint: those of all ranks, in their order."""
    ranks = range(setting.world_size) if joint else [rank]
    shares = zip(*(make_batches(size, setting.micro_batch, other) for other in ranks), strict=True)
    return [tuple(torch.cat(parts).to(setting.device) for parts in zip(*share, strict=True)) for share in shares]
