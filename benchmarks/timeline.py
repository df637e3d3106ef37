"""Layers of a pipeline that sleep, the time line that they write, and what it says about the order of operations.

Nothing is computed, so two cores are enough for any number of stages, and every forward, backward for the inputs and
backward for the weights takes the same time on every stage: what is left of a step is the schedule.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FORWARD, INPUTS, WEIGHTS = "F", "B", "W"


@dataclass(frozen=True)
class Event:
    """An operation of `part` (of the model, from the first) on its `number`-th micro-batch. Seconds of the host's
    monotonic clock."""

    rank: int
    kind: str
    part: int
    number: int
    start: float
    end: float


class Diary:
    """Notes of the layers of one process. live, most_live: activations that are kept for backward, now and at
    the most."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: list[Event] = []
        self.live = self.most_live = 0
        self._numbers: dict[tuple[str, int], int] = defaultdict(int)

    def sleep(self, kind: str, part: int, seconds: float) -> None:
        start = time.monotonic()
        time.sleep(seconds)
        number = self._numbers[kind, part]
        self._numbers[kind, part] += 1
        self.events.append(Event(self.rank, kind, part, number, start, time.monotonic()))

    def clear(self) -> None:
        self.events = []
        self._numbers.clear()


class Sleeper(nn.Module):
    """A layer that takes `seconds` for a forward, for the gradient of its input and for that of its weight. It keeps
    `kept_bytes` for the backward, and gives its input plus its weight, `(batch, width)`."""

    def __init__(self, part: int, width: int, seconds: float, kept_bytes: int, diary: Diary) -> None:
        super().__init__()
        self.part, self.seconds, self.kept_bytes, self.diary = part, seconds, kept_bytes, diary
        self.weight = nn.Parameter(torch.zeros(width))
        self.lift = nn.Parameter(torch.ones(width)) if part == 0 else None  # the data need no gradient, and this does

    def forward(self, x: Tensor) -> Tensor:
        if self.lift is not None:
            x = x * self.lift
        passed: Tensor = _InputSide.apply(x, self)  # type: ignore[no-untyped-call]
        weight: Tensor = _WeightSide.apply(self.weight, self)  # type: ignore[no-untyped-call]
        return passed + weight


class _Kept:
    """Alive as long as the node of the graph that has it."""

    def __init__(self, diary: Diary) -> None:
        self.diary = diary
        diary.live += 1
        diary.most_live = max(diary.most_live, diary.live)

    def __del__(self) -> None:
        self.diary.live -= 1


class _InputSide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):  # type: ignore[no-untyped-def]
        layer.diary.sleep(FORWARD, layer.part, layer.seconds)
        ctx.layer, ctx.kept = layer, _Kept(layer.diary)
        ctx.save_for_backward(torch.zeros(layer.kept_bytes, dtype=torch.uint8))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.layer.diary.sleep(INPUTS, ctx.layer.part, ctx.layer.seconds)
        return grad, None


class _WeightSide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, layer):  # type: ignore[no-untyped-def]
        ctx.layer = layer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.layer.diary.sleep(WEIGHTS, ctx.layer.part, ctx.layer.seconds)
        return grad, None


def idle_shares(events: Sequence[Event]) -> list[float]:
    """Return for each rank the share of the step in which none of its layers works. The step begins and ends with the
    first and the last operation of all ranks."""
    begin, end = min(e.start for e in events), max(e.end for e in events)
    busy: dict[int, float] = defaultdict(float)
    for event in events:
        busy[event.rank] += event.end - event.start
    return [1 - busy[rank] / (end - begin) for rank in sorted(busy)]


def least_idle(events: Sequence[Event], parts: int, split_backward: bool) -> float:
    """The idle share that this order of operations has where each takes the same time and sending takes none.

    split_backward: gradients of inputs are sent on before those of weights are computed; otherwise both are one.
    """
    queues: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        queues[event.rank].append(event)
    done: dict[tuple[str, int, int], float] = {}
    clock = dict.fromkeys(queues, 0.0)
    while any(queues.values()):
        for rank, queue in queues.items():
            while queue and (ready := _ready(queue[0], done, parts, split_backward)) is not None:
                event = queue.pop(0)
                clock[rank] = max(clock[rank], ready) + 1
                done[event.kind, event.part, event.number] = clock[rank]
    return 1 - len(events) / len(clock) / max(clock.values())


def _ready(event: Event, done: dict[tuple[str, int, int], float], parts: int, split_backward: bool) -> float | None:
    """When what `event` needs from other ranks is there, and None if it is not yet."""
    if event.kind == FORWARD:
        needs = [(FORWARD, event.part - 1)] if event.part > 0 else []
    elif event.part == parts - 1 or event.kind == WEIGHTS and split_backward:
        needs = []
    else:
        needs = [(kind, event.part + 1) for kind in ((INPUTS,) if split_backward else (INPUTS, WEIGHTS))]
    times = [done.get((kind, part, event.number)) for kind, part in needs]
    return None if None in times else max((t for t in times if t is not None), default=0.0)
