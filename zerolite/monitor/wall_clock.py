"""``wall_clock_breakdown``: time of each phase of a step on this rank, without waiting for the device.

It is an observer of the engine's steps and two hooks on the module. An engine without a breakdown has none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch.utils.hooks import RemovableHandle

from zerolite.monitor.device_timers import DeviceTimers, TimingEvent
from zerolite.utils.module_hook import WeakHook
from zerolite.zero.observers import GATHER, REDUCE_WAIT, STEP, StepObserver

FORWARD, BACKWARD, OTHER = "forward", "backward", "other"
PHASES = (FORWARD, BACKWARD, REDUCE_WAIT, GATHER, STEP, OTHER)
"""FORWARD is the module's forward in training mode, BACKWARD the time from the first gradient to the last. REDUCE_WAIT,
GATHER and STEP are the phases of :mod:`zerolite.zero.observers`. OTHER is the rest: data loader, loss, evaluation."""

DEFAULT_STEPS = 10  # DeepSpeed's steps_per_print

Report = Callable[[int, Mapping[str, float]], None]
"""Function (step, mean milliseconds per step by phase), called with the means since the last report."""


class PhaseClock(StepObserver):
    """Observer that sums the time in each phase. Phases nest: time in an inner phase does not count for the outer one.

    On CUDA, times are events on the stream. They are read at the end of a step, if the device has passed them, so a
    report can be a step late.

    Args:
        device: the engine's device.
        every: a report is made after each step whose number is a multiple of it.
        report: receives the means.
    """

    def __init__(self, device: torch.device, every: int, report: Report) -> None:
        self._timers = DeviceTimers(device)
        self._every = every
        self._report = report
        self._phases = [OTHER]
        self._last: TimingEvent | None = None  # when the current phase began or was resumed
        self._sums = dict.fromkeys(PHASES, 0.0)
        self._steps = 0  # since the last report
        self._ended = 0  # number of the step that ended last

    def on_phase_begin(self, phase: str) -> None:
        self._add_elapsed()
        self._phases.append(phase)

    def on_phase_end(self, phase: str) -> None:
        """End ``phase``, and inner phases that an exception has left open. Do nothing if ``phase`` is not open."""
        if phase in self._phases:
            self._add_elapsed()
            while self._phases.pop() != phase:
                pass

    def on_backward_begin(self) -> None:
        if BACKWARD not in self._phases:  # a backward that raised has not ended its phase
            self.on_phase_begin(BACKWARD)

    def on_backward_end(self) -> None:
        self.on_phase_end(BACKWARD)

    def on_step_end(self, step: int) -> None:
        """Note the end of step number ``step``, and make the reports whose times are known by now.

        A second call with the same number does nothing.
        """
        if step == self._ended:
            return
        self._add_elapsed()
        self._ended = step
        self._steps += 1
        if step % self._every == 0:
            self._timers.add(self._last, self._last, functools.partial(self._report_means, step, self._steps))
            self._steps = 0
        self._timers.read()

    def _add_elapsed(self) -> None:
        """Add the time since the last call to the innermost open phase."""
        now = self._timers.now()
        if self._last is not None:
            self._timers.add(self._last, now, functools.partial(self._add, self._phases[-1]))
        self._last = now

    def _add(self, phase: str, milliseconds: float) -> None:
        self._sums[phase] += milliseconds

    def _report_means(self, step: int, steps: int, _milliseconds: float) -> None:
        means = {phase: total / steps for phase, total in self._sums.items()}
        self._sums = dict.fromkeys(PHASES, 0.0)
        self._report(step, means)


def watch_forward(clock: PhaseClock, module: torch.nn.Module) -> list[RemovableHandle]:
    """Hook ``module`` so that ``clock`` measures its forwards in training mode. Returns the handles of the hooks."""
    return [
        _BeforeForward(clock).install(module.register_forward_pre_hook, prepend=True),
        _AfterForward(clock).install(module.register_forward_hook, always_call=True),
    ]


class _BeforeForward(WeakHook[PhaseClock]):
    def __call__(self, module: torch.nn.Module, args: object) -> None:
        clock = self.owner()
        if clock is not None and module.training:
            clock.on_phase_begin(FORWARD)


class _AfterForward(WeakHook[PhaseClock]):
    def __call__(self, module: torch.nn.Module, args: object, output: object) -> None:
        clock = self.owner()
        if clock is not None:
            clock.on_phase_end(FORWARD)


def describe(step: int, means: Mapping[str, float]) -> str:
    """Return the line that is printed."""
    parts = ", ".join(f"{phase.replace('_', ' ')} {mean:.2f}" for phase, mean in means.items())
    return f"step {step}: ms a step: {parts}, all {sum(means.values()):.2f}"
