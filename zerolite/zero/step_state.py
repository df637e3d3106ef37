"""State of the steps: loss scale and divisor of this one, counters, and outcomes of those before.

::

    backward     the loss scale is captured, before anything can change it
    statistics   they tell norm, overflow and mean weight; the host reads them before the update, or later
    update       applied, or skipped
    settled      counters, learning rates, and last the loss scale: when the host has read the statistics
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch

from zerolite.comm import HostGroup, RaiseTogether, collective
from zerolite.precision.loss_scaler import LossScaler
from zerolite.utils.accelerator import host_value
from zerolite.utils.text import name_ranks
from zerolite.zero.accumulation import GradAccumulation
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.grads import Change, Factor
from zerolite.zero.layout import Slot
from zerolite.zero.observers import Observers, UpdateFacts, WrittenSlice
from zerolite.zero.stats import GradStats, StatsVector, clip_coefficient
from zerolite.zero.update import UpdateMethod

logger = logging.getLogger("zerolite")


@dataclass(frozen=True)
class StepOptions:
    """Options of a step, from the config.

    Attributes:
        max_norm: clip gradients to this L2 norm; 0 for never.
        check_finite: skip steps with non-finite gradients.
        max_skipped_in_a_row: raise after so many skipped steps; 0 for never.
        logs: this rank logs.
        skip_on_device: let the device decide if a step is skipped, where the optimizer can, so that the host need not
            wait for the statistics.
        update_numel: number of master elements that torch's optimizer updates on the device in one call; a larger
            bucket is a call of its own.
        divide_plain_backward: divide the gradients of a backward that the user calls by the number of micro-batches.
        has_parts: other ranks have other parts of the model, so ``p.grad`` is not the whole gradient.
    """

    max_norm: float
    check_finite: bool
    max_skipped_in_a_row: int
    logs: bool
    skip_on_device: bool = False
    update_numel: int = 0
    divide_plain_backward: bool = False
    has_parts: bool = False


@dataclass
class StepCounters:
    """Counters of training.

    Attributes:
        micro_steps: backwards.
        global_steps: updates, skipped ones included.
        skipped_steps: skipped updates.
        skipped_in_a_row: skipped updates since the last one that was applied.
        last_norm: L2 norm of the last step's unscaled gradient before clipping; None before the first step.
        weight_unit: see :meth:`StepState.weight_unit`.
    """

    micro_steps: int = 0
    global_steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    last_norm: float | None = None
    weight_unit: float = 1.0

    def set_micro_steps(self, count: int) -> None:
        """Set the count, if backwards of parts of the model have been counted as micro-steps."""
        self.micro_steps = count

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])


class StepState:
    """See the module. A step is *settled* when the host has read its statistics.

    If the device decides about a skip, each rank settles the step when it first needs the result. For example, rank 0
    may print a loss scale. An error that is found then is kept, and the next update raises it on all ranks. If one rank
    raised it at once, the others would wait for that rank in their next collective.

    A rank *refuses* an update if it cannot make it. The statistics tell all ranks, which update nothing, count no step,
    and raise.

    Attributes:
        accumulation: counters of the backwards since the last step.
        counters: counters of training.
        observers: of the engine's steps.
        options: of the steps.
        left_out: error of this rank alone that no statistics have told the others; the next ones do. It has left out an
            update, because statistics had been collected before, or the disk has lost gradients that were dropped.
    """

    def __init__(
        self,
        accumulation: GradAccumulation,
        scaler: LossScaler | None,
        buffer: ParameterBuffer,
        method: UpdateMethod,
        observers: Observers,
        options: StepOptions,
    ) -> None:
        self.accumulation, self.observers, self.options = accumulation, observers, options
        self.counters = StepCounters()
        self._scaler, self._buffer, self._method = scaler, buffer, method
        self._unread: tuple[StatsVector, float] | None = None  # of the last step, with the divisor that this rank knows
        self._error: Exception | None = None  # of an earlier step; the next update raises it
        self._is_refused = False  # a rank has refused an earlier step, for `_error` if it was this one
        self.left_out: Exception | None = None
        self._bad_losses: tuple[int, ...] = ()  # ranks whose loss was not finite in the last step

    def on_backward(self, scaled: bool, weight: float | None, divided: bool) -> None:
        """Count a backward, before its first gradient, and capture the loss scale: see
        :meth:`GradAccumulation.on_backward`."""
        if self._scaler is not None:
            self.loss_scale()
        self.accumulation.on_backward(scaled, weight, divided)
        self.counters.micro_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the loss scale as plain data."""
        self.settle()
        return {"counters": self.counters.state_dict(), "loss_scaler": self._scaler and self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. A loss scale of another precision is left out."""
        if self._scaler is not None and state["loss_scaler"] is not None:
            self._scaler.load_state_dict(state["loss_scaler"])
        self.counters.load_state_dict(state["counters"])

    # ---------------------------------------------------------------- loss scale and divisor

    def refuse_grad_scaler(self) -> None:
        """Raise RuntimeError if the engine scales losses itself: gradients would be unscaled twice."""
        if self._scaler is not None:
            raise RuntimeError(
                'torch.amp.GradScaler was to unscale FP16 gradients, but with "fp16": {"enabled": true} in the config '
                "the engine scales the loss itself; leave one of them out"
            )

    def loss_scale(self) -> float:
        """Return the loss scale of this accumulation; the same from its first backward to its step."""
        if self._scaler is None:
            return 1.0
        accumulation = self.accumulation
        if accumulation.loss_scale is None:
            self.settle()
            accumulation.loss_scale = self._scaler.scale
        return accumulation.loss_scale

    def next_loss_scale(self) -> float:
        """Return the loss scale that the next backward will use."""
        if self._scaler is None:
            return 1.0
        if self.accumulation.loss_scale is not None:
            return self.accumulation.loss_scale
        self.settle()
        return self._scaler.scale

    def weight_unit(self) -> float:
        """Return the number by which weights are divided before they multiply losses, so that fp16 gradients stay in
        range.

        It is a power of two near the mean weight of the previous step, or 1 without a loss scale. It is the same on all
        ranks and for the whole accumulation.
        """
        self.loss_scale()
        return self.counters.weight_unit

    def local_divisor(self) -> float:
        """Compute the divisor from local values only, without the mean weight, which needs a collective."""
        scale = 1.0 if self._scaler is None else self.loss_scale()
        backwards, factor = self.accumulation.flushed
        # A flush that has raised must not divide a gradient to which more backwards were added.
        return scale / factor if backwards == self.accumulation.backwards else scale

    def device_divisor(self, stats: StatsVector) -> Factor:
        """Return the divisor of the accumulated gradient, without a wait of the host for the weights in it."""
        return self.local_divisor() * (stats.weight() if self.accumulation.weighted else 1.0)

    def shown_divisor(self, stats: Callable[[], StatsVector]) -> Factor:
        """Return the divisor of the gradients that ``p.grad`` shows.

        The mean weight is kept until the next backward: changes of gradients discard the statistics, and collecting
        them again would be a collective.

        Args:
            stats: collects the statistics; called only if the mean weight is not known.
        """
        accumulation, divisor = self.accumulation, self.local_divisor()
        if not accumulation.weighted:
            return divisor
        if accumulation.mean_weight is None or accumulation.mean_weight[0] != accumulation.backwards:
            accumulation.mean_weight = accumulation.backwards, stats().weight()
        return divisor * accumulation.mean_weight[1]

    def facts(self, max_norm: float, changes: Sequence[Change]) -> UpdateFacts:
        """Return what the coming update uses beside gradients and states."""
        counters = self.counters
        return UpdateFacts(counters.global_steps, counters.micro_steps, self.local_divisor(), max_norm, tuple(changes))

    def update_factor(self, vector: StatsVector, stats: GradStats | None, max_norm: float) -> tuple[Factor, float]:
        """Return the number by which the update multiplies gradients, and the divisor in it that the host knows.

        Args:
            vector: statistics of the gradients.
            stats: the same as the host has read them. None: the factor stays a tensor on the device.
            max_norm: L2 norm to which gradients are clipped; 0 for none.

        Raises:
            RuntimeError: on all ranks, because the weights that the host has read give no mean.
        """
        known = self.local_divisor()
        if stats is not None and (stats.mixed or stats.weight is not None):
            known *= mean_weight(stats)
        divisor: Factor = known if stats is not None else self.device_divisor(vector)
        norm: Factor = vector.norm() if stats is None else stats.norm
        factor: Factor = (clip_coefficient(norm / divisor, max_norm) if max_norm else 1.0) / divisor
        if isinstance(factor, torch.Tensor):
            factor = factor.float() if stats is None else float(host_value(factor))
        return factor, known

    # ---------------------------------------------------------------- the outcome

    @property
    def global_steps(self) -> int:
        """Number of steps so far, including one that is not settled."""
        return self.counters.global_steps + (self._unread is not None)

    def grad_norm(self) -> float | None:
        """Return the L2 norm of the last step's unscaled gradient before clipping; None before the first step. There is
        no collective, so one rank alone may call this."""
        self.settle()
        return self.counters.last_norm

    def read(self, vector: StatsVector) -> GradStats:
        """Read the statistics before the update, and raise the errors that they show. All ranks read equal statistics
        here, so all of them raise."""
        stats = vector.get()
        error = self._let_observers_read(stats)
        if stats.refusals:
            self.raise_refusal(vector.take_refusal())
        if error is not None:
            raise error
        for raise_errors in self.observers.raise_errors:
            raise_errors()
        return stats

    def read_later(self, vector: StatsVector, divisor: float) -> None:
        """Keep the statistics of a step that the device applies or skips. The host reads them later."""
        vector.start_read()
        self._unread = vector, divisor

    def settle(self) -> None:
        """Read the outcome of the last step if this rank has not done so. There is no collective."""
        if self._unread is None:
            return
        (vector, divisor), self._unread = self._unread, None
        # One rank alone may be here. So nothing below may communicate, and errors are kept for the next update, in
        # which all ranks raise them.
        stats = vector.get()
        if stats.refusals or stats.weight == 0 or stats.mixed or stats.skipped:
            self._method.on_update_skipped()
        self._error = self._let_observers_read(stats)
        if stats.refusals:
            self._is_refused, self._error = True, vector.take_refusal()
            return
        try:
            divisor *= mean_weight(stats)
        except RuntimeError as error:
            self._error = self._error or error
        try:
            self.end_step(stats, divisor)  # also after an error, because the device has applied or skipped the step
        except FloatingPointError as error:
            self._error = self._error or error

    def _let_observers_read(self, stats: GradStats) -> Exception | None:
        """Let all observers read, and return the first error that they return."""
        error = None if stats.slices is None else self.read_slices(*stats.slices)
        if len(stats.used) < len(self._buffer.layout.slots) and not stats.skipped:
            for notify in self.observers.on_unused:
                error = error or notify(stats)
        return error

    def read_slices(self, written: Sequence[WrittenSlice], sums: torch.Tensor) -> Exception | None:
        """Let the observers read the sums of what they have written, on the host. Return the first error."""
        errors, start = [], 0
        for observer, size, about in written:
            errors.append(observer.read_slice(about, sums[start : start + size]))
            start += size
        return next(filter(None, errors), None)

    @collective
    def raise_error(self) -> None:
        """Settle, and raise the errors of earlier steps. All ranks have then settled the same steps."""
        if self._unread is not None:
            self.settle()
        error, self._error = self._error, None
        if self._is_refused:
            self.raise_refusal(error)
        if error is not None:
            raise error
        for raise_errors in self.observers.raise_errors:
            raise_errors()

    def leave_out(self, error: Exception) -> None:
        """Note that this rank alone leaves out the coming update. The next statistics tell the others."""
        self.left_out = RuntimeError(
            f"{type(error).__name__}: {error}. This was found when the statistics of step {self.global_steps + 1} had "
            "been collected, so this rank alone has left that update out: load the last checkpoint"
        )
        self.left_out.__cause__ = error

    @collective
    def raise_refusal(self, refused: Exception | None) -> NoReturn:
        """Raise on all ranks, because one has refused an update.

        Args:
            refused: this rank's own error. The other ranks quote it.
        """
        self._is_refused, self.left_out = False, None
        self.on_sums_dropped()
        agree = self._buffer.gradient_memory.groups.agree
        RaiseTogether(HostGroup(agree, "errors"), "zerolite", failed="cannot make the update:").exchange(refused)
        raise AssertionError("one of the ranks has an error")

    def on_sums_dropped(self) -> None:
        """Note that no step uses the sums of the last backwards: later ones must not make up for what packing lost."""
        if (compression := self._buffer.gradient_memory.groups.compression) is not None:
            compression.reset()

    @collective
    def on_weights_replaced(self) -> None:
        """Settle, and drop the errors of earlier steps, because all weights have been loaded anew."""
        self.settle()
        self._is_refused, self._error, self.left_out = False, None, None
        self.on_sums_dropped()
        for notify in self.observers.on_weights_written:
            notify(True)

    def end_step(self, stats: GradStats, divisor: float) -> None:
        """Count a step that was applied or skipped.

        Raises:
            FloatingPointError: too many have been skipped.
        """
        counters, skipped = self.counters, stats.skipped
        counters.global_steps += 1
        counters.last_norm = norm = stats.norm / divisor
        if stats.weight and self._scaler is not None and math.isfinite(stats.weight):
            counters.weight_unit *= 2.0 ** round(math.log2(stats.weight))
        counters.skipped_steps += skipped
        if skipped:
            self.on_sums_dropped()
        counters.skipped_in_a_row = counters.skipped_in_a_row + 1 if skipped else 0
        skip = self._describe_skip(stats) if skipped else ""
        if skipped or stats.bad_losses or self._bad_losses:
            self._warn(stats, skip)
        if not skipped:
            for updated in self.observers.on_updated:
                updated()
        # Last, because it changes the scale that this step has used.
        change = self._scaler.update(skipped) if self._scaler else None
        for settled in self.observers.on_settled:
            settled(counters.global_steps, norm)
        if skipped:
            self._check_skips(skip, change.after if change and change.at_minimum else None)

    def _warn(self, stats: GradStats, skip: str) -> None:
        bad_losses, self._bad_losses = self._bad_losses, stats.bad_losses
        if self.options.logs and skip:
            logger.warning("%s", skip)
        if self.options.logs and math.isfinite(stats.norm) and stats.bad_losses not in ((), bad_losses):
            logger.warning("%s", describe_bad_losses(self.counters.global_steps, stats.bad_losses))

    def _describe_skip(self, stats: GradStats) -> str:
        counters, bad = self.counters, describe_bad(stats, self._buffer.layout.slots)
        return (
            f"step {counters.global_steps} skipped on all ranks: {bad}; {counters.skipped_in_a_row} in a row, "
            f"{counters.skipped_steps} in all"
        )

    def _check_skips(self, skip: str, minimum: float | None) -> None:
        """Raise FloatingPointError after a skipped step if training cannot go on.

        Args:
            skip: description of the skipped step.
            minimum: the loss scale if it cannot fall further.
        """
        if minimum is not None:
            raise FloatingPointError(
                f"{skip}. The fp16 loss scale is at its minimum, {minimum:g}, and cannot fall further. Try bf16 "
                '("bf16": {"enabled": true}), or look for the cause in that parameter and rank.'
            )
        limit = self.options.max_skipped_in_a_row
        if limit and self.counters.skipped_in_a_row >= limit:
            raise FloatingPointError(
                f"{skip}. max_consecutive_skipped_steps is {limit}: training has stopped. Look at the data and the "
                "loss of that rank, lower the learning rate, or clip the gradients. If an update has made weights "
                "non-finite (a learning rate that runs away, an eps of 0), go back to a checkpoint from before that."
            )


def describe_bad(stats: GradStats, slots: Sequence[Slot]) -> str:
    """Describe the gradients of a skipped step."""
    names = [slots[index].name for index in stats.bad_parameters]
    where = f"in parameter '{names[0]}'" if names else "in the sum over parameters"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    ranks = ", ".join(map(str, stats.bad_ranks))
    if stats.elsewhere:
        where, more = "in a part of the model that other ranks have", ""
    source = "although every rank's own gradients are finite (their sum overflows)"
    if ranks or stats.elsewhere:
        source = f"from rank {ranks}" if ranks else "from there"
    return f"non-finite gradient {where}{more}, {source}"


def describe_bad_losses(step: int, ranks: Sequence[int]) -> str:
    """Return the warning about non-finite losses in a step that was applied."""
    return (
        f"step {step}: a loss on {name_ranks(ranks)} is not finite although all gradients are; the step was applied. "
        "The part of the loss that is not finite has no gradient (a mask, torch.where, detach()): look for it there"
    )


def mean_weight(stats: GradStats) -> float:
    """Return the divisor that turns a sum of weighted gradients into the gradient of the joint batch.

    Raises:
        RuntimeError: on all ranks, because the weights give no mean.
    """
    if stats.mixed:
        raise RuntimeError(
            "engine.backward: some ranks gave a weight in this step and others did not; pass weight= on all ranks, or "
            "on none"
        )
    if stats.weight is None:
        return 1.0
    if not 0 < stats.weight < math.inf:
        raise RuntimeError(
            f"engine.backward: the weights of this step are {stats.weight:g} per rank on average, and the mean over "
            "nothing has no gradient; leave such a step out: engine.zero_grad() on all ranks instead of engine.step()"
        )
    return stats.weight
