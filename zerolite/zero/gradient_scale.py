"""Scale of an accumulation's gradients: what they must be divided by to be those of the joint batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zerolite.precision.loss_scaler import LossScaler
from zerolite.zero.accumulation import GradAccumulation
from zerolite.zero.grad_stats import StatsVector
from zerolite.zero.outcomes import Outcomes


class GradientScale:
    """The loss scale, less what a partial accumulation lacks, and the mean weight. The loss scale of an accumulation is
    captured when it is first asked for, before anything can change it."""

    def __init__(self, accumulation: GradAccumulation, scaler: LossScaler | None, outcomes: Outcomes) -> None:
        self._accumulation, self._scaler, self._outcomes = accumulation, scaler, outcomes
        self._captured: float | None = None  # the loss scale of the accumulation, if it has been asked for
        self._flush_factor = 1.0
        # With the number of backwards for which it holds.
        self._mean_weight: tuple[int, torch.Tensor] | None = None

    @property
    def weighted(self) -> bool:
        """True if the backwards of this accumulation have weights."""
        return bool(self._accumulation.weighted)

    def begin_accumulation(self) -> None:
        self._captured = self._mean_weight = None
        self._flush_factor = 1.0

    def refuse_grad_scaler(self) -> None:
        """Raises RuntimeError if the engine scales losses itself."""
        if self._scaler is not None:
            raise RuntimeError(
                'torch.amp.GradScaler was to unscale FP16 gradients, but with "fp16": {"enabled": true} in the config '
                "the engine scales the loss itself; leave one of them out"
            )

    def flush(self) -> None:
        """The accumulation ends before it is full: what it holds becomes the mean of what it contains."""
        self._flush_factor = self._accumulation.flush_factor()

    def loss_scale(self) -> float:
        """The loss scale of the accumulation in hand; the same from its first backward to its step."""
        if self._scaler is None:
            return 1.0
        if self._captured is None:
            self._outcomes.settle()
            self._captured = self._scaler.scale
        return self._captured

    def next_loss_scale(self) -> float:
        """The loss scale that the next accumulation will use; this one's, if it has begun."""
        if self._scaler is None:
            return 1.0
        if self._captured is not None:
            return self._captured
        self._outcomes.settle()
        return self._scaler.scale

    def weight_unit(self) -> float:
        """Return the number by which weights are divided before they multiply anything, so that fp16 gradients keep
        their size: about the mean weight of the step before, a power of two, the same on all ranks and for the whole
        gradient accumulation; 1 without a loss scale."""
        self.loss_scale()
        return self._outcomes.counters.weight_unit

    def local_divisor(self) -> float:
        """The divisor without what only all ranks know."""
        scale = 1.0 if self._scaler is None else self.loss_scale()
        return scale / self._flush_factor

    def device_divisor(self, stats: StatsVector) -> float | torch.Tensor:
        """The divisor of the accumulated gradient. The host does not wait for the weights in it."""
        return self.local_divisor() * (stats.weight() if self.weighted else 1.0)

    def shown_divisor(self, stats: Callable[[], StatsVector]) -> float | torch.Tensor:
        """Return the divisor of what ``p.grad`` shows. The mean weight is kept until the next backward: changes of
        gradients discard the statistics, and collecting them again would be a collective.

        stats: collects the statistics if that is needed.
        """
        if not self.weighted:
            return self.local_divisor()
        backwards = self._accumulation.backwards
        if self._mean_weight is None or self._mean_weight[0] != backwards:
            self._mean_weight = backwards, stats().weight()
        return self.local_divisor() * self._mean_weight[1]
