"""``activation_checkpointing.profile``: time spent in checkpoints, measured without waiting for the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import torch

from zerolite.utils.moments import Spans

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
        self._spans = Spans(device)
        self._tell = tell
        self._sums = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """The time inside is that of ``phase``, on the current stream."""
        start = self._spans.now()
        try:
            yield
        finally:
            self._spans.add(start, self._spans.now(), functools.partial(self._add, phase))

    def end_step(self, step: int) -> None:
        """Step number ``step`` has ended: tell what is known."""
        self._spans.then(functools.partial(self._tell_step, step))
        self._spans.read()

    def _add(self, phase: str, milliseconds: float) -> None:
        self._sums[phase] += milliseconds

    def _tell_step(self, step: int) -> None:
        sums, self._sums = self._sums, dict.fromkeys(PHASES, 0.0)
        self._tell(step, sums)


def span(clock: CheckpointClock | None, phase: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if clock is None else clock.span(phase)


def describe(step: int, times: Mapping[str, float]) -> str:
    """The line for people."""
    parts = ", ".join(f"{phase.replace('_', ' ')} {time:.2f}" for phase, time in times.items())
    return f"step {step}: activation checkpointing, ms: {parts}"
