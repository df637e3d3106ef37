"""Observers of an engine's steps: their interface, and the lists of callbacks that the engine calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zerolite.comm import collective

if TYPE_CHECKING:
    from zerolite.zero.grads import Change
    from zerolite.zero.stats import GradStats

REDUCE_WAIT, GATHER, STEP = "reduce_wait", "gather", "step"
"""Phases, which may nest. REDUCE_WAIT: waiting for reductions that did not end during backward. GATHER: launching
parameter all-gathers and waiting for them, anywhere. STEP: statistics, update, and all-gather of the updated
parameters."""


class UpdateFacts(NamedTuple):
    """Numbers that an update uses beside gradients and states; equal on all ranks, unless something is wrong.

    Attributes:
        step: updates before this one.
        backwards: backwards so far.
        divisor: of the summed gradient, without the mean weight.
        max_norm: L2 norm to which gradients are clipped; 0 for none.
        changes: what the user has done to these gradients in place.
    """

    step: int
    backwards: int
    divisor: float
    max_norm: float
    changes: tuple[Change, ...] = ()


class StepObserver:
    """Callbacks for the events of an engine's steps. In this base class all of them do nothing.

    An observer may have a *slice* of the statistics' vector: it writes numbers there, which are added over all ranks of
    the job in the all-reduce that a step has anyway, and reads the sums.

    Events come in the same order on all ranks, except those of gathers and reads. An exception in an observer reaches
    the user.

    Attributes:
        slice_size: length of the slice, the same on all ranks.
    """

    slice_size = 0

    def write_slice(self, numbers: torch.Tensor) -> Any:
        """Write this rank's numbers into its slice, [size] float64 zeros, before they are added over ranks.

        The result comes back with the sums. It says what they belong to, since the next statistics may begin before.
        """

    def read_slice(self, written: Any, sums: torch.Tensor) -> Exception | None:
        """Read the sums, on the host. Return an error for all ranks to raise together.

        Each rank calls this when it reads a step's statistics, which may be at different times: it must not
        communicate.

        Args:
            written: the result of :meth:`write_slice`.
            sums: [slice_size] float64.
        """
        return None

    def on_unused(self, stats: GradStats) -> Exception | None:
        """Called like :meth:`read_slice`, for a step that updates something and lacks gradients of some parameters."""
        return None

    @collective
    def raise_errors(self) -> None:
        """Raise what the statistics have shown, with the help of the other ranks. Called once all ranks have read
        the same statistics."""

    def before_forward(self) -> None:
        """Called at stage 3 before a forward that may have a backward, when nothing has been gathered for it yet."""

    def before_backward(self) -> None:
        """Called before a backward."""

    def on_backward_begin(self) -> None:
        """Called when the backward has begun, before its first gradient."""

    def on_backward_end(self) -> None:
        """Called when the backward has ended or raised, and its reductions have been launched."""

    def on_reduced(self) -> None:
        """Called when the gradients are reduced, maybe several times for the same ones. It may communicate."""

    def before_offload(self, bucket: int, gradient: torch.Tensor) -> None:
        """Called when the mean gradient of a bucket is about to leave the device.

        Args:
            bucket: index of the bucket.
            gradient: the mean gradient, on the device.
        """

    def on_phase_begin(self, phase: str) -> None:
        """Called when a phase begins."""

    def on_phase_end(self, phase: str) -> None:
        """Called when a phase has ended or raised."""

    def before_update(self, facts: UpdateFacts) -> None:
        """Called before every update, before its statistics are needed. It may communicate and raise."""

    def on_update_begin(self) -> None:
        """Called when an update begins to change the masters."""

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

    def before_save(self, facts: UpdateFacts) -> None:
        """Called between two steps, before the slices are exchanged alone. It may communicate and raise."""

    def on_weights_written(self, all_of_them: bool) -> None:
        """Called when values have been written into parameters. all_of_them: all weights are new."""

    def on_layout_changed(self) -> None:
        """Called when there are other buckets."""


class WrittenSlice(NamedTuple):
    """Numbers that an observer has written into the statistics.

    Attributes:
        observer: it.
        size: length of its slice.
        written: the result of :meth:`StepObserver.write_slice`.
    """

    observer: StepObserver
    size: int
    written: Any


class Observers:
    """Lists of callbacks by event, in the order in which they were added. The events are those of
    :class:`StepObserver`.

    Attributes:
        slices: observers that have a slice of the statistics' vector.
    """

    def __init__(self) -> None:
        self.slices: list[StepObserver] = []
        self.on_unused: list[Callable[[GradStats], Exception | None]] = []
        self.raise_errors: list[Callable[[], None]] = []
        self.before_forward: list[Callable[[], None]] = []
        self.before_backward: list[Callable[[], None]] = []
        self.on_backward_begin: list[Callable[[], None]] = []
        self.on_backward_end: list[Callable[[], None]] = []
        self.on_reduced: list[Callable[[], None]] = []
        self.before_offload: list[Callable[[int, torch.Tensor], None]] = []
        self.on_phase_begin: list[Callable[[str], None]] = []
        self.on_phase_end: list[Callable[[str], None]] = []
        self.before_update: list[Callable[[UpdateFacts], None]] = []
        self.on_update_begin: list[Callable[[], None]] = []
        self.on_step_end: list[Callable[[int], None]] = []
        self.on_parameters_updated: list[Callable[[], None]] = []
        self.on_updated: list[Callable[[], None]] = []
        self.on_settled: list[Callable[[int, float], None]] = []
        self.on_gradients_dropped: list[Callable[[], None]] = []
        self.before_save: list[Callable[[UpdateFacts], None]] = []
        self.on_weights_written: list[Callable[[bool], None]] = []
        self.on_layout_changed: list[Callable[[], None]] = []

    def add(self, observer: StepObserver) -> None:
        """Register the methods that the class of ``observer`` overrides. Called before the first step.

        Methods that it does not override are never called: an event without observers costs nothing.
        """
        for event, listeners in vars(self).items():
            if event == "slices":
                if type(observer).write_slice is not StepObserver.write_slice:
                    self.slices.append(observer)
            elif getattr(type(observer), event) is not getattr(StepObserver, event):
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
