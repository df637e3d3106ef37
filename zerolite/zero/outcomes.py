"""Outcomes of steps: when the host reads one, it updates counters, loss scale and learning rates."""

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
from zerolite.zero.stage3.fetch_schedule import ScheduleAgreement
from zerolite.zero.update import UpdateMethod

logger = logging.getLogger("zerolite")


@dataclass
class StepCounters:
    """Counters of training.

    Attributes:
        micro_steps: backwards.
        global_steps: updates, skipped ones included.
        skipped_steps: skipped updates.
        skipped_in_a_row: skipped updates since the last one that was applied.
        last_norm: L2 norm of the last step's unscaled gradient before clipping; None before the first step.
        weight_unit: see :meth:`~zerolite.zero.gradient_scale.GradientScale.weight_unit`.
    """

    micro_steps: int = 0
    global_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    last_norm: float | None = None
    weight_unit: float = 1.0

    def count(self, outcome: GradStats, divisor: float, skipped: bool, scaled: bool) -> float:
        """Count one more step and return its norm. scaled: a loss scale is used, which may change the unit of
        weights."""
        self.global_steps += 1
        self.last_norm = outcome.norm / divisor
        if outcome.weight and scaled and math.isfinite(outcome.weight):
            self.weight_unit *= 2.0 ** round(math.log2(outcome.weight))
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        return self.last_norm

    def set_micro_steps(self, count: int) -> None:
        """Set the count, if backwards of parts of the model have been counted as micro-steps."""
        self.micro_steps = count

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])

    def describe_skip(self, outcome: GradStats, slots: Sequence[Slot], cause: str = "") -> str:
        """Describe the skip that was counted last.

        Args:
            outcome: statistics of the skipped step.
            slots: slots of the parameters, for their names.
            cause: an earlier update that made weights non-finite.
        """
        names = [slots[index].name for index in outcome.bad_parameters]
        where = f"in parameter '{names[0]}'" if names else "in the sum over parameters"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        ranks = ", ".join(map(str, outcome.bad_ranks))
        if outcome.elsewhere:
            where, more = "in a part of the model that other ranks have", ""
        source = "although every rank's own gradients are finite (their sum overflows)"
        if ranks or outcome.elsewhere:
            source = f"from rank {ranks}" if ranks else "from there"
        if cause:
            source = f"because {cause}"
        return (
            f"step {self.global_steps} skipped on all ranks: non-finite gradient {where}{more}, {source}; "
            f"{self.skipped_in_a_row} in a row, {self.skipped_steps} in all"
        )

    def check_skips(self, skip: str, limit: int, minimum: float | None) -> None:
        """Check after a skipped step that training can go on.

        Args:
            skip: description of the skipped step.
            limit: allowed skipped steps in a row, 0 for no limit.
            minimum: the loss scale if it cannot fall further.

        Raises:
            FloatingPointError: it cannot.
        """
        if minimum is not None:
            raise FloatingPointError(
                f"{skip}. The fp16 loss scale is at its minimum, {minimum:g}, and cannot fall further. Try bf16 "
                '("bf16": {"enabled": true}), or look for the cause in that parameter and rank.'
            )
        if limit and self.skipped_in_a_row >= limit:
            raise FloatingPointError(
                f"{skip}. max_consecutive_skipped_steps is {limit}: training has stopped. Look at the data and the "
                "loss of that rank, lower the learning rate, or clip the gradients."
            )


def describe_bad_losses(step: int, ranks: Sequence[int]) -> str:
    """Return the warning about non-finite losses in a step that was applied."""
    return (
        f"step {step}: a loss on {name_ranks(ranks)} is not finite although all gradients are; the step was applied. "
        "The part of the loss that is not finite has no gradient (a mask, torch.where, detach()): look for it there"
    )


class UnusedParameters:
    """Check of parameters that get no gradient on any rank."""

    def __init__(self, allowed: bool, find_removed: Callable[[list[int]], list[int]]) -> None:
        """
        Args:
            allowed: the config allows unused parameters.
            find_removed: returns those of the given parameters that the model no longer has.
        """
        self._find_removed = find_removed
        self._allowed = allowed
        self._last_used: frozenset[int] | None = None

    def check(self, used: frozenset[int], slots: Sequence[Slot], elsewhere: int = 0) -> None:
        """Check one step. Called on all ranks.

        Args:
            used: parameters with a gradient on some rank.
            slots: slots of all parameters.
            elsewhere: number of unused parameters on ranks with other parts of the model.

        Raises:
            RuntimeError: on all ranks, because the model has lost a parameter, or unused parameters are not allowed.
        """
        if len(used) < len(slots) and used != self._last_used:
            removed = self._find_removed([index for index in range(len(slots)) if index not in used])
            if removed:
                raise RuntimeError(
                    f"parameter '{slots[removed[0]].name}' is not in the model any more ({len(removed)} in all): it "
                    "was replaced after zerolite.initialize by an object that nothing trains (module.x = "
                    "nn.Parameter(), load_state_dict(assign=True), nn.utils.parametrizations); do that before "
                    "zerolite.initialize, or write the values into the parameter that is there"
                )
        self._last_used = used
        if self._allowed:
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
    """Return the divisor that turns a sum of weighted gradients into the gradient of the joint batch.

    Raises:
        RuntimeError: on all ranks, because the weights give no mean.
    """
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
class _UnreadStep:
    """Step whose statistics the host has not read yet.

    Attributes:
        stats: its statistics.
        divisor: divisor of its gradient, from what this rank knows.
        maybe_unused: parameters that this rank has not used. The device has left them out of the update if no other
            rank has used them.
    """

    stats: StatsVector
    divisor: float
    maybe_unused: frozenset[int]


class Outcomes:
    """Results of steps. A step is *settled* when the host has read its statistics.

    If the device decides about a skip, each rank settles the step when it first needs the result. For example, rank 0
    may print a loss scale. An error that is found then is kept, and the next update raises it on all ranks. If one rank
    raised it at once, the others would wait for that rank in their next collective.

    Attributes:
        counters: counters of training.
        check_finite: steps with non-finite gradients are skipped.
        checks: checks whose numbers are reduced with the statistics.
        schedules: comparison of the ranks' schedules, at stage 3.
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
        logs: bool,
        checks: UpdateChecks | None = None,
    ) -> None:
        """
        Args:
            max_skipped_in_a_row: raise after so many skipped steps, 0 for never.
            logs: this rank logs.
        """
        self.counters = StepCounters()
        self.check_finite = check_finite
        self.checks = checks
        self.schedules: ScheduleAgreement | None = None
        self._method, self._buffer, self._scaler, self._unused = method, buffer, scaler, unused
        self._observers, self._limit, self._logs = observers, max_skipped_in_a_row, logs
        self._unread: _UnreadStep | None = None
        self._error: Exception | None = None  # of an earlier step; the next update raises it
        self._bad_losses: tuple[int, ...] = ()  # ranks whose loss was not finite in the last step

    def use_schedules(self, schedules: ScheduleAgreement) -> None:
        """Compare the ranks' schedules of stage 3 from now on."""
        self.schedules = schedules

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the loss scale as plain data."""
        self.settle()
        return {"counters": self.counters.state_dict(), "loss_scaler": self._scaler and self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. A loss scale of another precision is left out."""
        if self._scaler is not None and state["loss_scaler"] is not None:
            self._scaler.load_state_dict(state["loss_scaler"])
        self.counters.load_state_dict(state["counters"])

    @property
    def global_steps(self) -> int:
        """Number of steps so far, including one that is not settled."""
        return self.counters.global_steps + (self._unread is not None)

    def applies(self, outcome: GradStats) -> bool:
        """Return True if a step with these gradients updates anything."""
        return not self.check_finite or math.isfinite(outcome.norm)

    def raise_errors(self, outcome: GradStats) -> None:
        """Raise the errors that the statistics show. All ranks read equal statistics here, so all of them raise."""
        if not outcome.inputs_agree:
            outcome.check_inputs()
        if self.checks is not None:
            self.checks.on_stats_read(outcome.extra)
            self.checks.raise_errors()

    def read_later(self, stats: StatsVector, divisor: float, maybe_unused: frozenset[int]) -> None:
        """Keep the statistics of a step that the device applies or skips. The host reads them later."""
        stats.start_read()
        self._unread = _UnreadStep(stats, divisor, maybe_unused)

    def grad_norm(self) -> float | None:
        """Return the L2 norm of the last step's unscaled gradient before clipping; None before the first step. There is
        no collective, so one rank alone may call this."""
        self.settle()
        return self.counters.last_norm

    def settle(self) -> None:
        """Read the outcome of the last step if this rank has not done so. There is no collective."""
        if self._unread is None:
            return
        unread, self._unread = self._unread, None
        # One rank alone may be here. So nothing below may communicate, and errors are kept for the next update, in
        # which all ranks raise them.
        outcome = unread.stats.get()
        if outcome.weight == 0 or outcome.mixed or not self.applies(outcome):
            self._method.on_update_skipped()
        elif unread.maybe_unused:
            self._method.on_left_out(unread.maybe_unused - outcome.used)
        if self.checks is not None:
            self.checks.on_stats_read(outcome.extra)
        try:
            outcome.check_inputs()
            divisor = unread.divisor * mean_weight(outcome)
        except RuntimeError as error:
            self._error, divisor = error, unread.divisor
        try:
            self.end_step(outcome, divisor)  # also after an error, because the device has applied or skipped the step
            if self.applies(outcome):
                self.check_used(outcome)
        except (RuntimeError, FloatingPointError) as error:
            self._error = self._error or error

    def check_used(self, outcome: GradStats) -> None:
        """Raise RuntimeError, on all ranks, for parameters without a gradient if that is an error."""
        self._unused.check(outcome.used, self._buffer.layout.slots, outcome.unused_elsewhere)

    def raise_error(self) -> None:
        """Settle, and raise the error of an earlier step. Called on all ranks, which have then settled the same
        steps."""
        if self._unread is not None:
            self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def drop_error(self) -> None:
        """Settle, and drop the error of an earlier step, because the weights have been replaced."""
        self.settle()
        self._error = None

    def end_step(self, outcome: GradStats, divisor: float) -> None:
        """Count a step that was applied or skipped. Raises FloatingPointError if too many have been skipped."""
        if self.schedules is not None:
            self.schedules.note(outcome.schedules_match)
        skipped = not self.applies(outcome)
        norm = self.counters.count(outcome, divisor, skipped, scaled=self._scaler is not None)
        skip = ""
        if skipped:
            cause = self.checks.nonfinite_update if self.checks is not None else ""
            skip = self.counters.describe_skip(outcome, self._buffer.layout.slots, cause)
        bad_losses, self._bad_losses = self._bad_losses, outcome.bad_losses
        if self._logs and skip:
            logger.warning("%s", skip)
        if self._logs and math.isfinite(outcome.norm) and outcome.bad_losses not in ((), bad_losses):
            logger.warning("%s", describe_bad_losses(self.counters.global_steps, outcome.bad_losses))
        if not skipped:
            for updated in self._observers.on_updated:
                updated()
        # Last, because it changes the scale that this step has used.
        change = self._scaler.update(skipped) if self._scaler else None
        for settled in self._observers.on_settled:
            settled(self.global_steps, norm)
        if skipped:
            at_minimum = change is not None and change.at_minimum
            self.counters.check_skips(skip, self._limit, change.after if change and at_minimum else None)
