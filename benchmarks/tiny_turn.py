"""One competitor's turn in `host_overhead.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from torch import Tensor

from benchmarks.setting import Setting
from benchmarks.tiny_competitors import COMPETITORS, Trainee
from benchmarks.tiny_layers import build_stack, make_inputs


@dataclass(frozen=True)
class Ready:
    """After the warm-up: the loss of each of its steps; launches of one more step of zerolite (None elsewhere)."""

    losses: list[float]
    gathers: int | None = None
    reductions: int | None = None


@dataclass(frozen=True)
class Turn:
    """Seconds of each step, CPU seconds of all of them, seconds of each that went to collectives that only pretend."""

    step_s: list[float]
    cpu_s: float
    fake_s: list[float]


def train(trainee: Trainee, inputs: Sequence[Tensor], steps: int) -> Turn:
    """Take `steps` steps and time each."""
    now, seconds, fake = time.perf_counter, [], []
    cpu = time.process_time()
    for number in range(steps):
        fake_before, begin = trainee.clock.seconds, now()
        trainee.step(inputs[number % len(inputs)])
        seconds.append(now() - begin)
        fake.append(trainee.clock.seconds - fake_before)
    return Turn(seconds, time.process_time() - cpu, fake)


def warm_up(trainee: Trainee, inputs: Sequence[Tensor], steps: int) -> Ready:
    """Raises RuntimeError if stage 3 does not follow its plan afterwards: then something else would be measured."""
    losses = [float(trainee.step(inputs[number % len(inputs)])) for number in range(steps)]
    if trainee.coordinator is None:
        return Ready(losses)
    if not trainee.coordinator.schedule.following:
        raise RuntimeError(
            f"expected stage 3 to follow its plan after {steps} steps, got one that works on demand; warm up for longer"
        )
    from zerolite.comm import record

    with record() as calls:
        trainee.step(inputs[0])
    return Ready(losses, calls.count("all_gather", "parameters"), calls.count("reduce_scatter", "gradients"))


def serve_stack(pipe: Connection, rank: int, setting: Setting, name: str, layers: int, warmup: int) -> None:
    """Serve the `Workers` of `host_overhead.py`: replies are a `Ready`, then `Turn`s."""
    competitor, inputs = COMPETITORS[name], make_inputs()
    trainee = competitor.build(build_stack(layers), **competitor.options)
    pipe.send(warm_up(trainee, inputs, warmup))
    while (steps := pipe.recv()) > 0:
        pipe.send(train(trainee, inputs, steps))
