"""Observers of an engine's steps: the interface, and the list of those that an engine has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

REDUCE_WAIT, GATHER, STEP = "reduce_wait", "gather", "step"
"""Phases: waiting for reductions that backward did not hide; launching and waiting for gathers of parameters, wherever
that happens; statistics, update, and bringing updated values to all ranks. Phases nest."""


class StepObserver:
    """An object that is told of what happens in an engine's steps. Every method does nothing here.

    Events come in the same order on all ranks, those of gathers excepted. Called by the parts of the engine; what an
    observer raises reaches the user's call.
    """

    def before_forward(self) -> None:
        """Stage 3: a forward begins that may have a backward; nothing has been gathered for it yet."""

    def before_backward(self) -> None:
        """A backward begins, in which no gradient has come yet."""

    def on_backward_begin(self) -> None:
        """The gradients that come from here on belong to the backward that has begun."""

    def on_backward_end(self) -> None:
        """The backward has ended, or was cut short by an exception; what it reduces has been launched."""

    def on_phase_begin(self, phase: str) -> None:
        """A phase begins."""

    def on_phase_end(self, phase: str) -> None:
        """It has ended, or has raised."""

    def on_step_end(self, step: int) -> None:
        """The update has been launched, skipped, or has raised. step: steps so far, this one included."""

    def on_parameters_updated(self) -> None:
        """The last bucket of a step has its new values."""

    def on_updated(self) -> None:
        """An update is known not to have been skipped. The schedule of learning rates is one of these observers."""

    def on_settled(self, step: int, norm: float) -> None:
        """The outcome of a step is known. norm: of its gradient, unscaled, before clipping."""

    def on_gradients_dropped(self) -> None:
        """All gradients since the last step are about to be dropped."""


class Observers:
    """Listeners by event, in the order in which they were added; see :class:`StepObserver` for what the events are.
    An event without listeners is an empty list, over which the engine's parts loop."""

    def __init__(self) -> None:
        self.before_forward: list[Callable[[], None]] = []
        self.before_backward: list[Callable[[], None]] = []
        self.on_backward_begin: list[Callable[[], None]] = []
        self.on_backward_end: list[Callable[[], None]] = []
        self.on_phase_begin: list[Callable[[str], None]] = []
        self.on_phase_end: list[Callable[[str], None]] = []
        self.on_step_end: list[Callable[[int], None]] = []
        self.on_parameters_updated: list[Callable[[], None]] = []
        self.on_updated: list[Callable[[], None]] = []
        self.on_settled: list[Callable[[int, float], None]] = []
        self.on_gradients_dropped: list[Callable[[], None]] = []

    def add(self, observer: StepObserver) -> None:
        """Tell ``observer`` of the events whose methods its class has. Before the first step."""
        for event, listeners in vars(self).items():
            if getattr(type(observer), event) is not getattr(StepObserver, event):
                listeners.append(getattr(observer, event))

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        for notify in self.on_phase_begin:
            notify(phase)
        try:
            yield
        finally:
            for notify in self.on_phase_end:
                notify(phase)
