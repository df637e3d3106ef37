"""Outcomes of steps: read when they are needed, they bring counters, loss scale and schedule up to date."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from zerolite.precision.loss_scaler import LossScaler
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.checks import UpdateChecks
from zerolite.zero.grad_stats import GradStats, StatsVector
from zerolite.zero.observers import Observers
from zerolite.zero.pieces import UpdateMethod
from zerolite.zero.stage3.trace_agreement import TraceAgreement
from zerolite.zero.step_outcome import StepCounters, UnusedParameters, describe_bad_losses, mean_weight

logger = logging.getLogger("zerolite")


@dataclass(frozen=True)
class _Unread:
    """A step whose outcome the host has not read yet. doubtful: parameters that this rank has not used, which the
    device has left out of the update if no other rank has."""

    stats: StatsVector
    divisor: float
    doubtful: frozenset[int]


class Outcomes:
    """A step is *settled* when the host has read its statistics. Where the device decides whether a step is skipped,
    each rank settles it when it first needs what follows from it (rank 0 to print a loss scale, say). So what is wrong
    with it is not raised then: the other ranks would wait for this one in their next collective. The next update raises
    it, on all ranks."""

    def __init__(
        self,
        method: UpdateMethod,
        buffer: ParameterBuffer,
        scaler: LossScaler | None,
        unused: UnusedParameters,
        observers: Observers,
        check_finite: bool,
        max_skipped_in_a_row: int,
        says: bool,
    ) -> None:
        """check_finite: steps with non-finite gradients are skipped. max_skipped_in_a_row: raise after so many, 0 for
        never. says: this rank logs."""
        self.counters = StepCounters()
        self.check_finite = check_finite
        self.checks: UpdateChecks | None = None
        self.trace: TraceAgreement | None = None  # at stage 3
        self._method, self._buffer, self._scaler, self._unused = method, buffer, scaler, unused
        self._observers, self._limit, self._says = observers, max_skipped_in_a_row, says
        self._unread: _Unread | None = None
        self._minimum: float | None = None  # the loss scale, if the last step was skipped and it cannot fall further
        self._failure: Exception | None = None  # found while an outcome was read; raised by the next update
        self._bad_losses: tuple[int, ...] = ()  # ranks whose loss was not finite in the last step

    @property
    def global_steps(self) -> int:
        """Steps so far, those that are not settled included."""
        return self.counters.global_steps + (self._unread is not None)

    def applies(self, outcome: GradStats) -> bool:
        """Return True if a step with these gradients updates anything."""
        return outcome.finite or not self.check_finite

    def act(self, outcome: GradStats) -> None:
        """Raise what else the statistics have shown, on all ranks, which all read them here."""
        if self.checks is not None:
            self.checks.note(outcome.extra)
            self.checks.act()

    def leave_unread(self, stats: StatsVector, divisor: float, doubtful: frozenset[int]) -> None:
        """A step has been taken, or skipped, by the device, for which the host does not wait."""
        stats.start_read()
        self._unread = _Unread(stats, divisor, doubtful)

    def grad_norm(self) -> float | None:
        """L2 norm of the last step's gradient, unscaled, before clipping; None before the first step. No collective
        follows, so one rank alone may ask, whatever is pending."""
        self.settle()
        return self.counters.last_norm

    def settle(self) -> None:
        """Read the outcome of the last step if that has not happened."""
        if self._unread is None:
            return
        unread, self._unread = self._unread, None
        outcome = unread.stats.get()
        if outcome.weight == 0 or outcome.mixed or not self.applies(outcome):
            self._method.forget_last()
        elif unread.doubtful:
            self._method.leave_out(unread.doubtful - outcome.used)
        if self.checks is not None:
            self.checks.note(outcome.extra)
        try:
            outcome.check_inputs()
            divisor = unread.divisor * mean_weight(outcome)
        except RuntimeError as error:
            self._failure, divisor = error, unread.divisor
        self._count(outcome, divisor)  # whatever is wrong with it, the step has been taken, or skipped
        try:
            if self.applies(outcome):
                self.check_used(outcome)
            self._raise_if_hopeless(outcome)
        except (RuntimeError, FloatingPointError) as error:
            self._failure = self._failure or error

    def end_step(self, outcome: GradStats, divisor: float) -> None:
        """A step has been taken, or skipped, by the host. Raises FloatingPointError, on all ranks, if too many have
        been skipped."""
        self._count(outcome, divisor)
        self._raise_if_hopeless(outcome)

    def check_used(self, outcome: GradStats) -> None:
        """Raise RuntimeError, on all ranks, for parameters without a gradient where that is an error."""
        self._unused.check(outcome.used, self._buffer.layout.slots, outcome.unused_elsewhere)

    def raise_failure(self) -> None:
        """Raise what was wrong with a step that has been settled. Called on all ranks, which have settled the same
        steps by then."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def forget_failure(self) -> None:
        """The weights have been replaced: what was wrong with steps before does not matter any more."""
        self.settle()
        self._failure = None

    def _count(self, outcome: GradStats, divisor: float) -> None:
        if self.trace is not None:
            self.trace.note(outcome.agreed)
        skipped = not self.applies(outcome)
        norm = self.counters.count(outcome, divisor, skipped, scaled=self._scaler is not None)
        if skipped and self._says:
            logger.warning("%s", self._describe(outcome))
        if outcome.finite and outcome.bad_losses not in ((), self._bad_losses) and self._says:
            logger.warning("%s", describe_bad_losses(self.counters.global_steps, outcome.bad_losses))
        self._bad_losses = outcome.bad_losses
        if not skipped:
            for updated in self._observers.on_updated:
                updated()
        change = self._scaler.update(skipped) if self._scaler else None  # last: it changes the scale
        self._minimum = change.after if skipped and change is not None and change.at_minimum else None
        for settled in self._observers.on_settled:
            settled(self.global_steps, norm)

    def _raise_if_hopeless(self, outcome: GradStats) -> None:
        if not self.applies(outcome):
            self.counters.raise_if_hopeless(self._describe(outcome), self._limit, self._minimum)

    def _describe(self, outcome: GradStats) -> str:
        blame = self.checks.blame if self.checks is not None else ""
        return self.counters.describe_skip(outcome, self._buffer.layout.slots, blame)
