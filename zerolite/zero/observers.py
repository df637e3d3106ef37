"""Observers of an engine's steps: their interface, and the lists of callbacks that the engine calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

REDUCE_WAIT, GATHER, STEP = "reduce_wait", "gather", "step"
"""Phases, which may nest. REDUCE_WAIT: waiting for reductions that did not end during backward. GATHER: launching
parameter all-gathers and waiting for them, anywhere. STEP: statistics, update, and all-gather of the updated
parameters."""


class StepObserver:
    """Callbacks for the events of an engine's steps. In this base class all of them do nothing.

    Events come in the same order on all ranks, except those of gathers. An exception in an observer reaches the user.
    """

    def before_forward(self) -> None:
        """Called at stage 3 before a forward that may have a backward, when nothing has been gathered for it yet."""

    def before_backward(self) -> None:
        """Called before a backward."""

    def on_backward_begin(self) -> None:
        """Called when the backward has begun, before its first gradient."""

    def on_backward_end(self) -> None:
        """Called when the backward has ended or raised, and its reductions have been launched."""

    def on_phase_begin(self, phase: str) -> None:
        """Called when a phase begins."""

    def on_phase_end(self, phase: str) -> None:
        """Called when a phase has ended or raised."""

    def on_step_end(self, step: int) -> None:
        """Called when the update has been launched or skipped, or has raised. step: number of steps, this one
        included."""

    def on_parameters_updated(self) -> None:
        """Called when all buckets are updated and their all-gathers are launched."""

    def on_updated(self) -> None:
        """Called when it is known that a step was not skipped. The learning rate schedule is such an observer."""

    def on_settled(self, step: int, norm: float) -> None:
        """Called when the outcome of a step is known.

        Args:
            step: number of the step.
            norm: L2 norm of its unscaled gradient before clipping.
        """

    def on_gradients_dropped(self) -> None:
        """Called before all gradients since the last step are dropped."""


class Observers:
    """Lists of callbacks by event, in the order in which they were added. The events are those of
    :class:`StepObserver`."""

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
        """Register the methods that the class of ``observer`` overrides. Called before the first step.

        Methods that it does not override are never called: an event without observers costs nothing.
        """
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
