"""``activation_checkpointing.profile``: time spent in checkpoints, measured without waiting for the device."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch

from zerolite.utils.moments import Moment, Moments

FORWARD, RECOMPUTATION, TO_HOST, TO_DEVICE, GATHER = PHASES = (
    "forward",
    "recomputation",
    "to_host",
    "to_device",
    "gather",
)
"""Of the functions that are checkpointed, for the first time and again in backward; copies, which run beside the rest
on CUDA; gathers of inputs that are cut."""

Tell = Callable[[int, Mapping[str, float]], None]
"""(step, milliseconds by phase)."""


class CheckpointClock:
    """Adds up the time of phases. On CUDA what has been measured is read when the device has passed it, so a step may
    be told at the end of a later one."""

    def __init__(self, device: torch.device, tell: Tell) -> None:
        self._moments = Moments(device)
        self._tell = tell
        self._unread: deque[tuple[str, Moment, Moment] | int] = deque()  # an int is the end of the step of that number
        self._sums = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """The time inside is that of ``phase``, on the current stream."""
        start = self._moments.now()
        try:
            yield
        finally:
            self._unread.append((phase, start, self._moments.now()))

    def end_step(self, step: int) -> None:
        """Step number ``step`` has ended: tell what is known."""
        self._unread.append(step)
        while self._unread:
            first = self._unread[0]
            if isinstance(first, int):
                sums, self._sums = self._sums, dict.fromkeys(PHASES, 0.0)
                self._tell(first, sums)
            else:
                phase, start, end = first
                if not (start.query() and end.query()):
                    return
                self._sums[phase] += start.elapsed_time(end)
                self._moments.take_back(start)
                self._moments.take_back(end)
            self._unread.popleft()


def span(clock: CheckpointClock | None, phase: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if clock is None else clock.span(phase)


def describe(step: int, times: Mapping[str, float]) -> str:
    """The line for people."""
    parts = ", ".join(f"{phase.replace('_', ' ')} {time:.2f}" for phase, time in times.items())
    return f"step {step}: activation checkpointing, ms: {parts}"
