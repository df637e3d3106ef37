"""``wall_clock_breakdown``: where the time of a step goes, on this rank, without waiting for the device.

Only what is measured is touched: methods of the pipeline and the reducer are wrapped, and hooks put on the module, when
the engine is built. An engine without a breakdown has none of it.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

FORWARD, BACKWARD, REDUCE_WAIT, STEP, OTHER = PHASES = ("forward", "backward", "reduce_wait", "step", "other")
"""The module's forward in training; from the first gradient to the last; waiting for reductions that backward did not
hide; the rest of the update; everything between, such as the loader, the loss and evaluation."""

DEFAULT_STEPS = 10  # DeepSpeed's steps_per_print

Report = Callable[[int, Mapping[str, float]], None]
"""(step, milliseconds a step by phase): the means over the steps since the last report."""


class _Moment(Protocol):
    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to ``end``; both have passed."""
        ...


class _HostMoment:
    """A moment of the host's clock, with the methods of a CUDA event."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: Any) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostMoment) -> float:
        return (end._at - self._at) * 1000.0


class _Span(NamedTuple):
    """A stretch of one phase, not read yet."""

    phase: str
    start: _Moment
    end: _Moment


class _Mark(NamedTuple):
    """Between spans: ``steps`` steps have ended, the last one with number ``step``, and their means are due."""

    step: int
    steps: int


class PhaseClock:
    """Adds up the time of phases. Phases nest: the inner one's time is not the outer one's.

    On CUDA a moment is an event on the stream; it is read when the device has passed it, at the end of a later step, so
    a report may come a step late. every: steps between reports, which come where the step's number is a multiple of it.
    """

    def __init__(self, device: torch.device, every: int, report: Report) -> None:
        self._device = device
        self._every = every
        self._report = report
        self._phases = [OTHER]
        self._last: _Moment | None = None  # when the phase in hand began or went on
        self._unread: deque[_Span | _Mark] = deque()
        self._spare: list[_Moment] = []
        self._sums = dict.fromkeys(PHASES, 0.0)
        self._steps = 0  # since the last mark
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
            self._unread.append(_Mark(step, self._steps))
            self._steps = 0
        self._read()

    def _cut(self) -> None:
        """The phase in hand ends here, or another begins inside it."""
        cuda = self._device.type == "cuda"
        now = self._spare.pop() if self._spare else _new_moment(cuda)
        now.record(torch.cuda.current_stream(self._device) if cuda else None)
        if self._last is not None:
            self._unread.append(_Span(self._phases[-1], self._last, now))
        self._last = now

    def _read(self) -> None:
        while self._unread:
            first = self._unread[0]
            if isinstance(first, _Mark):
                means = {phase: total / first.steps for phase, total in self._sums.items()}
                self._sums = dict.fromkeys(PHASES, 0.0)
                self._unread.popleft()
                self._report(first.step, means)
                continue
            if not (first.start.query() and first.end.query()):
                return
            self._sums[first.phase] += first.start.elapsed_time(first.end)
            self._spare.append(first.start)
            self._unread.popleft()


def _new_moment(cuda: bool) -> _Moment:
    return torch.cuda.Event(enable_timing=True) if cuda else _HostMoment()


class _Pipeline(Protocol):
    @property
    def global_steps(self) -> int: ...


class _Reducer(Protocol):
    @property
    def pass_open(self) -> bool: ...


def watch_phases(clock: PhaseClock, module: torch.nn.Module, pipeline: _Pipeline, reducer: _Reducer) -> list[Any]:
    """Let ``clock`` see the phases of an engine's steps; returns the hooks on ``module``. Before anybody has taken hold
    of a method of ``pipeline`` or ``reducer``."""

    def after_begin() -> None:
        if reducer.pass_open and not clock.is_open(BACKWARD):
            clock.enter(BACKWARD)

    def end_step() -> None:
        clock.leave(STEP)
        clock.end_step(pipeline.global_steps)

    _around(pipeline, "begin_backward", lambda: None, after_begin)
    _around(reducer, "end_pass", lambda: None, lambda: clock.leave(BACKWARD))
    _around(pipeline, "reduce", lambda: clock.enter(REDUCE_WAIT), lambda: clock.leave(REDUCE_WAIT))
    _around(pipeline, "update", lambda: clock.enter(STEP), end_step)
    _around(pipeline, "publish", lambda: clock.enter(STEP), lambda: clock.leave(STEP))

    def before_forward(watched: torch.nn.Module, args: Any) -> None:
        if watched.training:
            clock.enter(FORWARD)

    def after_forward(watched: torch.nn.Module, args: Any, output: Any) -> None:
        clock.leave(FORWARD)

    return [
        module.register_forward_pre_hook(before_forward, prepend=True),
        module.register_forward_hook(after_forward, always_call=True),
    ]


def _around(owner: Any, method: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before`` and ``after`` around a method of this one object, ``after`` also where it raises."""
    inner = getattr(owner, method)

    @functools.wraps(inner)
    def timed(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return inner(*args, **kwargs)
        finally:
            after()

    setattr(owner, method, timed)


def describe(step: int, means: Mapping[str, float]) -> str:
    """The line for people."""
    parts = ", ".join(f"{phase.replace('_', ' ')} {mean:.2f}" for phase, mean in means.items())
    return f"step {step}: ms a step: {parts}, all {sum(means.values()):.2f}"
