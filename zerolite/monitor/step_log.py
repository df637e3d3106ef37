"""Values that the engine writes to its monitors after every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from zerolite.precision.loss_scaler import LossScaler
from zerolite.utils.accelerator import HostRead
from zerolite.zero.observers import StepObserver
from zerolite.zero.optimizer import ShardedOptimizer

from .monitor import Monitor


@dataclass
class _Losses:
    """Losses of one gradient accumulation."""

    parts: list[tuple[HostRead, float]] = field(default_factory=list)  # (loss, factor) of each backward
    weight: float = 0.0  # sum of the weights, if it has weights
    factor: float = 1.0  # another one if the accumulation was closed early


class StepLog(StepObserver):
    """Observer on rank 0 that writes the values of every step to the monitors.

    A step is written when it is known to be applied, or skipped after an overflow. On CUDA this is up to one step
    later, because the host does not wait for the device. Nothing is sent either, so the loss is the one of this rank.

    Args:
        monitor: receives the values.
        samples_per_step: samples of all ranks in a step; the x axis is samples. None: the x axis is steps.
        optimizer: its groups have the learning rates.
        scaler: the loss scaler, or None.
    """

    def __init__(
        self, monitor: Monitor, samples_per_step: int | None, optimizer: ShardedOptimizer, scaler: LossScaler | None
    ) -> None:
        self._monitor = monitor
        self._samples_per_step = samples_per_step
        self._optimizer = optimizer
        self._scaler = scaler
        self._scale = scaler.scale if scaler is not None else 1.0  # of the step whose outcome comes next
        self._rates: list[float] | None = None  # of the latest update, before the schedule's step
        self._losses: dict[int, _Losses] = {}  # by the number of steps before the gradient accumulation

    def add_loss(self, loss: torch.Tensor, factor: float, steps: int, first: bool, weight: float | None = None) -> None:
        """Add the loss of one backward. Its copy to the host starts now and is read when the step is written.

        Args:
            loss: one element.
            factor: factor of the loss in the gradient.
            steps: number of steps before this gradient accumulation.
            first: True for the first loss of the accumulation.
            weight: weight of the loss, in place of ``factor``.
        """
        if first:
            self._losses[steps] = _Losses()
        losses = self._losses.setdefault(steps, _Losses())
        if weight is not None:
            factor = weight
            losses.weight += weight
        if factor:
            losses.parts.append((HostRead(loss.reshape(-1)), factor))

    def close_early(self, factor: float, steps: int) -> None:
        """Multiply the loss of the accumulation after ``steps`` steps by ``factor``, as its gradient is.

        Called if the accumulation ends with fewer backwards than configured.
        """
        self._losses.setdefault(steps, _Losses()).factor = factor

    def on_updated(self) -> None:
        """Remember the learning rates of this update, before the schedule changes them."""
        self._rates = self._current_rates()

    def on_settled(self, step: int, norm: float) -> None:
        """Write the values of step number ``step``, applied or skipped."""
        rates, self._rates = self._rates or self._current_rates(), None
        scale, self._scale = self._scale, self._scaler.scale if self._scaler is not None else 1.0
        values = {"lr" if group == 0 else f"lr_group{group}": rate for group, rate in enumerate(rates)}
        loss = self._pop_loss(step - 1)
        if loss is not None:
            values = {"train_loss": loss, **values}
        values |= {"grad_norm": norm, "loss_scale": scale, "global_steps": step}
        self.write(step, values)

    def write(self, steps: int, values: Mapping[str, float], section: str | None = None) -> None:
        """Write values as ``Train/<section>/<name>``.

        Args:
            steps: number of the step, which gives the position on the x axis.
            values: by name.
            section: None for the name of the x axis, "Samples" or "Steps".
        """
        by_samples = self._samples_per_step is not None
        position = steps * (self._samples_per_step or 1)
        section = section or ("Samples" if by_samples else "Steps")
        self._monitor.write([(f"Train/{section}/{name}", value, position) for name, value in values.items()])

    def _current_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _pop_loss(self, steps: int) -> float | None:
        """Return the loss of the accumulation after ``steps`` steps; None if ``engine.backward`` was not used."""
        losses = self._losses.pop(steps, _Losses())
        # Older ones belong to accumulations that never ended in a step.
        self._losses = {key: later for key, later in self._losses.items() if key > steps}
        factor = losses.factor / (losses.weight or 1.0)
        return factor * sum(part * read.get().tolist()[0] for read, part in losses.parts) if losses.parts else None
