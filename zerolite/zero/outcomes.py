"""Outcomes of steps: the host reads them when needed, then updates counters, loss scale and schedules."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zerolite.comm.ranks import name_ranks
from zerolite.precision.loss_scaler import LossScaler
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.checks import UpdateChecks
from zerolite.zero.grad_stats import GradStats, StatsVector
from zerolite.zero.layout import Slot
from zerolite.zero.observers import Observers
from zerolite.zero.optim_shards import UpdateMethod
from zerolite.zero.stage3.fetch_schedule import ScheduleAgreement

logger = logging.getLogger("zerolite")


@dataclass
class StepCounters:
    """Counters of training.

    Attributes:
        micro_steps: backwards.
        global_steps: updates, skipped ones included.
        last_norm: of the last step's gradient.
        weight_unit: see :meth:`~zerolite.zero.gradient_scale.GradientScale.weight_unit`.
    """

    micro_steps: int = 0
    global_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    last_norm: float | None = None
    weight_unit: float = 1.0

    def count(self, outcome: GradStats, divisor: float, skipped: bool, scaled: bool) -> float:
        """Count one more step and return its norm. scaled: a loss scale may change the unit of weights."""
        self.global_steps += 1
        self.last_norm = outcome.norm / divisor
        if outcome.weight and scaled and math.isfinite(outcome.weight):
            self.weight_unit *= 2.0 ** round(math.log2(outcome.weight))
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        return self.last_norm

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])

    def describe_skip(self, outcome: GradStats, slots: Sequence[Slot], blame: str = "") -> str:
        """Describe the skip that was counted last. blame: what else made its gradients non-finite."""
        names = [slots[index].name for index in outcome.bad_parameters]
        where = f"in parameter '{names[0]}'" if names else "in the sum over parameters"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        ranks = ", ".join(map(str, outcome.bad_ranks))
        if outcome.elsewhere:
            where, more = "in a part of the model that other ranks have", ""
        source = "although every rank's own gradients are finite (their sum overflows)"
        if ranks or outcome.elsewhere:
            source = f"from rank {ranks}" if ranks else "from there"
        if blame:
            source = f"because {blame}"
        return (
            f"step {self.global_steps} skipped on all ranks: non-finite gradient {where}{more}, {source}; "
            f"{self.skipped_in_a_row} in a row, {self.skipped_steps} in all"
        )

    def raise_if_hopeless(self, said: str, limit: int, minimum: float | None) -> None:
        """Give up after too many skipped steps, the last of which is described by ``said``.

        Args:
            limit: skipped steps in a row, 0 for no limit.
            minimum: the loss scale if it cannot fall further.

        Raises FloatingPointError.
        """
        if minimum is not None:
            raise FloatingPointError(
                f"{said}. The fp16 loss scale is at its minimum, {minimum:g}, and cannot fall further. Try bf16 "
                '("bf16": {"enabled": true}), or look for the cause in that parameter and rank.'
            )
        if limit and self.skipped_in_a_row >= limit:
            raise FloatingPointError(
                f"{said}. max_consecutive_skipped_steps is {limit}: training has stopped. Look at the data and the "
                "loss of that rank, lower the learning rate, or clip the gradients."
            )


def describe_bad_losses(step: int, ranks: Sequence[int]) -> str:
    """Return the warning about losses that are not finite, in a step that was applied."""
    return (
        f"step {step}: a loss on {name_ranks(ranks)} is not finite although all gradients are; the step was applied. "
        "The part of the loss that is not finite has no gradient (a mask, torch.where, detach()): look for it there"
    )


class UnusedParameters:
    """Parameters that get no gradient on any rank: fine, an error because the config says so, or the sign that the
    model has lost them. gone(indices): those of them that the model no longer has."""

    def __init__(self, fine: bool, gone: Callable[[list[int]], list[int]]) -> None:
        self._gone = gone
        self._fine = fine
        self._last_used: frozenset[int] | None = None

    def check(self, used: frozenset[int], slots: Sequence[Slot], elsewhere: int = 0) -> None:
        """elsewhere: unused parameters of other parts of the model. Raises RuntimeError, on all ranks."""
        if len(used) < len(slots) and used != self._last_used:
            gone = self._gone([index for index in range(len(slots)) if index not in used])
            if gone:
                raise RuntimeError(
                    f"parameter '{slots[gone[0]].name}' is not in the model any more ({len(gone)} in all): it was "
                    "replaced after zerolite.initialize by an object that nothing trains (module.x = nn.Parameter(), "
                    "load_state_dict(assign=True), nn.utils.parametrizations); do that before zerolite.initialize, or "
                    "write the values into the parameter that is there"
                )
        self._last_used = used
        if self._fine:
            return
        unused = [slot.name for slot in slots if slot.index not in used and slot.numel]
        if unused:
            raise RuntimeError(
                f"zero_optimization.ignore_unused_parameters is false and {len(unused)} parameters got no "
                "gradient on any rank: "
                f"{', '.join(unused[:8])}{' …' if len(unused) > 8 else ''}. Use them in the loss, freeze them, or "
                "set the key to true."
            )
        if elsewhere:
            raise RuntimeError(
                f"zero_optimization.ignore_unused_parameters is false and {elsewhere} parameters in other parts of the "
                "model got no gradient; the ranks that have them name them"
            )


def mean_weight(outcome: GradStats) -> float:
    """Return the divisor that turns a sum over weighted gradients into the joint batch's gradient. Raises RuntimeError,
    on all ranks, if there is no such thing."""
    if outcome.mixed:
        raise RuntimeError(
            "engine.backward: some ranks gave a weight in this step and others did not; pass weight= on all ranks, or "
            "on none"
        )
    if outcome.weight is None:
        return 1.0
    if not 0 < outcome.weight < math.inf:
        raise RuntimeError(
            f"engine.backward: the weights of this step are {outcome.weight:g} per rank on average, and the mean over "
            "nothing has no gradient; leave such a step out: engine.zero_grad() on all ranks instead of engine.step()"
        )
    return outcome.weight


@dataclass(frozen=True)
class _Unread:
    """A step whose outcome the host has not read yet. maybe_unused: parameters that this rank has not used, which the
    device has left out of the update if no other rank has."""

    stats: StatsVector
    divisor: float
    maybe_unused: frozenset[int]


class Outcomes:
    """Results of steps. A step is *settled* when the host has read its statistics.

    If the device decides about a skip, each rank settles the step when it first needs the result: rank 0 to print a
    loss scale, for example. An error found there is kept, and the next update raises it on all ranks. If it were
    raised at once, the other ranks would wait for this one in their next collective.
    """

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
        checks: UpdateChecks | None = None,
    ) -> None:
        """
        Args:
            check_finite: steps with non-finite gradients are skipped.
            max_skipped_in_a_row: raise after so many, 0 for never.
            says: this rank logs.
            checks: what else the statistics are looked at for.
        """
        self.counters = StepCounters()
        self.check_finite = check_finite
        self.checks = checks
        self.schedules: ScheduleAgreement | None = None  # at stage 3
        self._method, self._buffer, self._scaler, self._unused = method, buffer, scaler, unused
        self._observers, self._limit, self._says = observers, max_skipped_in_a_row, says
        self._unread: _Unread | None = None
        self._failure: Exception | None = None  # found while an outcome was read; raised by the next update
        self._bad_losses: tuple[int, ...] = ()  # ranks whose loss was not finite in the last step

    def compare(self, schedules: ScheduleAgreement) -> None:
        """Compare the ranks' schedules of stage 3 from now on."""
        self.schedules = schedules

    def state_dict(self) -> dict[str, Any]:
        """Counters and the loss scale, as plain data."""
        self.settle()
        return {"counters": self.counters.state_dict(), "loss_scaler": self._scaler and self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`. A loss scale of another precision is left out."""
        if self._scaler is not None and state["loss_scaler"] is not None:
            self._scaler.load_state_dict(state["loss_scaler"])
        self.counters.load_state_dict(state["counters"])

    @property
    def global_steps(self) -> int:
        """Steps so far, those that are not settled included."""
        return self.counters.global_steps + (self._unread is not None)

    def applies(self, outcome: GradStats) -> bool:
        """Return True if a step with these gradients updates anything."""
        return not self.check_finite or math.isfinite(outcome.norm)

    def raise_errors(self, outcome: GradStats) -> None:
        """Raise the errors that the statistics show. All ranks read the same ones here, so all of them raise."""
        if not outcome.inputs_agree:
            outcome.check_inputs()
        if self.checks is not None:
            self.checks.note(outcome.extra)
            self.checks.raise_errors()

    def leave_unread(self, stats: StatsVector, divisor: float, maybe_unused: frozenset[int]) -> None:
        """Keep the statistics of a step that the device takes or skips. The host reads them later."""
        stats.start_read()
        self._unread = _Unread(stats, divisor, maybe_unused)

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
        # One rank alone may be here. So nothing below may communicate, and what is wrong is kept for the next update,
        # in which all ranks raise it.
        outcome = unread.stats.get()
        if outcome.weight == 0 or outcome.mixed or not self.applies(outcome):
            self._method.on_update_skipped()
        elif unread.maybe_unused:
            self._method.on_left_out(unread.maybe_unused - outcome.used)
        if self.checks is not None:
            self.checks.note(outcome.extra)
        try:
            outcome.check_inputs()
            divisor = unread.divisor * mean_weight(outcome)
        except RuntimeError as error:
            self._failure, divisor = error, unread.divisor
        try:
            self.end_step(outcome, divisor)  # whatever is wrong with it, the step has been taken, or skipped
            if self.applies(outcome):
                self.check_used(outcome)
        except (RuntimeError, FloatingPointError) as error:
            self._failure = self._failure or error

    def check_used(self, outcome: GradStats) -> None:
        """Raise RuntimeError, on all ranks, for parameters without a gradient where that is an error."""
        self._unused.check(outcome.used, self._buffer.layout.slots, outcome.unused_elsewhere)

    def raise_failure(self) -> None:
        """Settle, and raise what was wrong with a step. Called on all ranks, which have settled the same steps
        then."""
        if self._unread is not None:
            self.settle()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def forget_failure(self) -> None:
        """Drop the kept error of earlier steps, because the weights have been replaced."""
        self.settle()
        self._failure = None

    def end_step(self, outcome: GradStats, divisor: float) -> None:
        """Count a step that was taken or skipped. Raises FloatingPointError if too many have been skipped."""
        if self.schedules is not None:
            self.schedules.note(outcome.schedules_match)
        skipped = not self.applies(outcome)
        norm = self.counters.count(outcome, divisor, skipped, scaled=self._scaler is not None)
        said = ""
        if skipped:
            blame = self.checks.blame if self.checks is not None else ""
            said = self.counters.describe_skip(outcome, self._buffer.layout.slots, blame)
        bad_losses, self._bad_losses = self._bad_losses, outcome.bad_losses
        if self._says and said:
            logger.warning("%s", said)
        if self._says and math.isfinite(outcome.norm) and outcome.bad_losses not in ((), bad_losses):
            logger.warning("%s", describe_bad_losses(self.counters.global_steps, outcome.bad_losses))
        if not skipped:
            for updated in self._observers.on_updated:
                updated()
        change = self._scaler.update(skipped) if self._scaler else None  # last: it changes the scale
        for settled in self._observers.on_settled:
            settled(self.global_steps, norm)
        if skipped:
            at_minimum = change is not None and change.at_minimum
            self.counters.raise_if_hopeless(said, self._limit, change.after if change and at_minimum else None)
