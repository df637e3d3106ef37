"""``wall_clock_breakdown``: time of each phase of a step on this rank, without waiting for the device.

Only what is measured is touched: methods of the pipeline and the reducer are wrapped, and hooks put on the module, when
the engine is built. An engine without a breakdown has none of it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from zerolite.utils.module_hook import WeakHook
from zerolite.utils.moments import Moment, Moments

FORWARD, BACKWARD, REDUCE_WAIT, GATHER, STEP, OTHER = PHASES = (
    "forward",
    "backward",
    "reduce_wait",
    "gather",
    "step",
    "other",
)
"""The module's forward in training; from the first gradient to the last; waiting for reductions that backward did not
hide; launching and waiting for gathers of parameters, wherever that happens; the rest of the update; everything
between, such as the loader, the loss and evaluation."""

DEFAULT_STEPS = 10  # DeepSpeed's steps_per_print

Report = Callable[[int, Mapping[str, float]], None]
"""(step, milliseconds a step by phase): the means over the steps since the last report."""


class _Span(NamedTuple):
    """A stretch of one phase, not read yet."""

    phase: str
    start: Moment
    end: Moment


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
        self._moments = Moments(device)
        self._every = every
        self._report = report
        self._phases = [OTHER]
        self._last: Moment | None = None  # when the phase in hand began or went on
        self._unread: deque[_Span | _Mark] = deque()
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
        now = self._moments.now()
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
            self._moments.take_back(first.start)
            self._unread.popleft()


class _Pipeline(Protocol):
    @property
    def global_steps(self) -> int: ...


class _Reducer(Protocol):
    @property
    def pass_open(self) -> bool: ...


class Fetch(Protocol):
    """What stage 3's schedule says at the beginning of a use, as far as it takes time."""

    @property
    def launch(self) -> Any: ...

    @property
    def prefetch(self) -> Any: ...

    @property
    def wait(self) -> Any: ...


def watch_phases(clock: PhaseClock, module: torch.nn.Module, pipeline: _Pipeline, reducer: _Reducer) -> list[Any]:
    """Let ``clock`` see the phases of an engine's steps; returns the hooks on ``module``. Before anybody has taken hold
    of a method of ``pipeline`` or ``reducer``."""

    def after_begin() -> None:
        if reducer.pass_open and not clock.is_open(BACKWARD):
            clock.enter(BACKWARD)

    def end_step() -> None:
        clock.leave(STEP)
        clock.end_step(pipeline.global_steps)

    around(pipeline, "begin_backward", lambda: None, after_begin)
    around(reducer, "end_pass", lambda: None, lambda: clock.leave(BACKWARD))
    around(pipeline, "finish_reductions", lambda: clock.enter(REDUCE_WAIT), lambda: clock.leave(REDUCE_WAIT))
    around(pipeline, "apply", lambda: clock.enter(STEP), end_step)
    around(pipeline, "publish", lambda: clock.enter(STEP), lambda: clock.leave(STEP))

    return [
        _BeforeForward(clock).install(module.register_forward_pre_hook, prepend=True),
        _AfterForward(clock).install(module.register_forward_hook, always_call=True),
    ]


class _BeforeForward(WeakHook[PhaseClock]):
    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        clock = self.owner()
        if clock is not None and module.training:
            clock.enter(FORWARD)


class _AfterForward(WeakHook[PhaseClock]):
    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        clock = self.owner()
        if clock is not None:
            clock.leave(FORWARD)


def watch_gathers(clock: PhaseClock, publisher: Any, coordinator: Any | None) -> None:
    """Let ``clock`` see gathers of parameters: at stages 1 and 2 what ``publisher`` waits for; at stage 3 what
    ``coordinator``, which is None below, launches and waits for. After all parts are connected to each other."""
    begin, end = functools.partial(clock.enter, GATHER), functools.partial(clock.leave, GATHER)
    if coordinator is None:
        around(publisher, "wait", begin, end)
        return
    around(publisher, "on_published", begin, end)  # new values for what stays whole
    around(coordinator, "hold", begin, end)
    execute = coordinator._execute

    def timed(fetch: Fetch) -> None:
        if not (fetch.launch or fetch.prefetch or fetch.wait):
            execute(fetch)
            return
        begin()
        try:
            execute(fetch)
        finally:
            end()

    coordinator._execute = timed


def around(owner: Any, method: str, before: Callable[[], None], after: Callable[[], None]) -> None:
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
