"""Divisor of an accumulation's gradients: the number that makes them the gradients of the joint batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zerolite.precision.loss_scaler import LossScaler
from zerolite.zero.accumulation import GradAccumulation
from zerolite.zero.grad_stats import StatsVector
from zerolite.zero.outcomes import Outcomes


class GradientScale:
    """Loss scale, correction of a partial accumulation, and mean weight: the factors of the divisor.

    The loss scale of an accumulation is captured when it is first read, before anything can change it.
    """

    def __init__(self, accumulation: GradAccumulation, scaler: LossScaler | None, outcomes: Outcomes) -> None:
        self._accumulation, self._scaler, self._outcomes = accumulation, scaler, outcomes
        self._captured: float | None = None  # loss scale of the accumulation, once it has been read
        self._flush = (0, 1.0)  # number of backwards that it is of, and the factor of their gradient
        self._mean_weight: tuple[int, torch.Tensor] | None = None  # with the number of backwards that it is of

    @property
    def weighted(self) -> bool:
        """True if the backwards of this accumulation have weights."""
        return bool(self._accumulation.weighted)

    def begin_accumulation(self) -> None:
        self._captured = self._mean_weight = None
        self._flush = (0, 1.0)

    def refuse_grad_scaler(self) -> None:
        """Raise RuntimeError if the engine scales losses itself: gradients would be unscaled twice."""
        if self._scaler is not None:
            raise RuntimeError(
                'torch.amp.GradScaler was to unscale FP16 gradients, but with "fp16": {"enabled": true} in the config '
                "the engine scales the loss itself; leave one of them out"
            )

    def flush(self) -> None:
        """End the accumulation before it is full: its gradient becomes the mean over the micro-batches it contains."""
        self._flush = self._accumulation.backwards, self._accumulation.flush_factor()

    def loss_scale(self) -> float:
        """Return the loss scale of this accumulation; the same from its first backward to its step."""
        if self._scaler is None:
            return 1.0
        if self._captured is None:
            self._outcomes.settle()
            self._captured = self._scaler.scale
        return self._captured

    def next_loss_scale(self) -> float:
        """Return the loss scale that the next backward will use."""
        if self._scaler is None:
            return 1.0
        if self._captured is not None:
            return self._captured
        self._outcomes.settle()
        return self._scaler.scale

    def weight_unit(self) -> float:
        """Return the number by which weights are divided before they multiply losses, so that fp16 gradients stay in
        range.

        It is a power of two near the mean weight of the previous step, or 1 without a loss scale. It is the same on all
        ranks and for the whole accumulation.
        """
        self.loss_scale()
        return self._outcomes.counters.weight_unit

    def local_divisor(self) -> float:
        """Compute the divisor from local values only, without the mean weight, which needs a collective."""
        scale = 1.0 if self._scaler is None else self.loss_scale()
        backwards, factor = self._flush
        # A flush that has raised must not divide a gradient to which more backwards were added.
        return scale / factor if backwards == self._accumulation.backwards else scale

    def device_divisor(self, stats: StatsVector) -> float | torch.Tensor:
        """Return the divisor of the accumulated gradient, without a wait of the host for the weights in it."""
        return self.local_divisor() * (stats.weight() if self.weighted else 1.0)

    def shown_divisor(self, stats: Callable[[], StatsVector]) -> float | torch.Tensor:
        """Return the divisor of the gradients that ``p.grad`` shows.

        The mean weight is kept until the next backward: changes of gradients discard the statistics, and collecting
        them again would be a collective.

        Args:
            stats: collects the statistics; called only if the mean weight is not known.
        """
        if not self.weighted:
            return self.local_divisor()
        backwards = self._accumulation.backwards
        if self._mean_weight is None or self._mean_weight[0] != backwards:
            self._mean_weight = backwards, stats().weight()
        return self.local_divisor() * self._mean_weight[1]
