"""``wall_clock_breakdown``: time of each phase of a step on this rank, without waiting for the device.

An observer of the engine's steps and two hooks on the module; an engine without a breakdown has none of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch.utils.hooks import RemovableHandle

from zerolite.utils.device_timers import DeviceTimers, TimingEvent
from zerolite.utils.module_hook import WeakHook
from zerolite.zero.observers import GATHER, REDUCE_WAIT, STEP, StepObserver

FORWARD, BACKWARD, OTHER = "forward", "backward", "other"
PHASES = (FORWARD, BACKWARD, REDUCE_WAIT, GATHER, STEP, OTHER)
"""The module's forward in training; from the first gradient to the last; the phases of observers; everything between,
such as the loader, the loss and evaluation."""

DEFAULT_STEPS = 10  # DeepSpeed's steps_per_print

Report = Callable[[int, Mapping[str, float]], None]
"""(step, milliseconds a step by phase): the means over the steps since the last report."""


class PhaseClock:
    """Adds up the time of phases. Phases nest: the inner one's time is not the outer one's.

    On CUDA a moment is an event on the stream; it is read when the device has passed it, at the end of a later step, so
    a report may come a step late. every: steps between reports, which come where the step's number is a multiple of it.
    """

    def __init__(self, device: torch.device, every: int, report: Report) -> None:
        self._timers = DeviceTimers(device)
        self._every = every
        self._report = report
        self._phases = [OTHER]
        self._last: TimingEvent | None = None  # when the phase in hand began or went on
        self._sums = dict.fromkeys(PHASES, 0.0)
        self._steps = 0  # since the last report
        self._ended = 0  # number of the step that ended last

    def is_open(self, phase: str) -> bool:
        return phase in self._phases

    def enter(self, phase: str) -> None:
        self._cut()
        self._phases.append(phase)

    def leave(self, phase: str) -> None:
        """End ``phase`` and whatever an exception has left open inside it; nothing if it is not open."""
        if self.is_open(phase):
            self._cut()
            while self._phases.pop() != phase:
                pass

    def end_step(self, step: int) -> None:
        """Step number ``step`` has ended, if its number is not that of the call before. Reports what is due and
        known."""
        if step == self._ended:
            return
        self._cut()
        self._ended = step
        self._steps += 1
        if step % self._every == 0:
            self._timers.then(functools.partial(self._tell, step, self._steps))
            self._steps = 0
        self._timers.read()

    def _cut(self) -> None:
        """The phase in hand ends here, or another begins inside it."""
        now = self._timers.now()
        if self._last is not None:
            self._timers.add(self._last, now, functools.partial(self._add, self._phases[-1]), goes_on=True)
        self._last = now

    def _add(self, phase: str, milliseconds: float) -> None:
        self._sums[phase] += milliseconds

    def _tell(self, step: int, steps: int) -> None:
        means = {phase: total / steps for phase, total in self._sums.items()}
        self._sums = dict.fromkeys(PHASES, 0.0)
        self._report(step, means)


class PhaseObserver(StepObserver):
    """Tell a clock of the phases of an engine's steps."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock

    def on_backward_begin(self) -> None:
        if not self._clock.is_open(BACKWARD):
            self._clock.enter(BACKWARD)

    def on_backward_end(self) -> None:
        self._clock.leave(BACKWARD)

    def on_phase_begin(self, phase: str) -> None:
        self._clock.enter(phase)

    def on_phase_end(self, phase: str) -> None:
        self._clock.leave(phase)

    def on_step_end(self, step: int) -> None:
        self._clock.end_step(step)


def watch_forward(clock: PhaseClock, module: torch.nn.Module) -> list[RemovableHandle]:
    """Let ``clock`` see the forwards of ``module`` in training; returns the hooks."""
    return [
        _BeforeForward(clock).install(module.register_forward_pre_hook, prepend=True),
        _AfterForward(clock).install(module.register_forward_hook, always_call=True),
    ]


class _BeforeForward(WeakHook[PhaseClock]):
    def __call__(self, module: torch.nn.Module, args: object) -> None:
        clock = self.owner()
        if clock is not None and module.training:
            clock.enter(FORWARD)


class _AfterForward(WeakHook[PhaseClock]):
    def __call__(self, module: torch.nn.Module, args: object, output: object) -> None:
        clock = self.owner()
        if clock is not None:
            clock.leave(FORWARD)


def describe(step: int, means: Mapping[str, float]) -> str:
    """The line for people."""
    parts = ", ".join(f"{phase.replace('_', ' ')} {mean:.2f}" for phase, mean in means.items())
    return f"step {step}: ms a step: {parts}, all {sum(means.values()):.2f}"
