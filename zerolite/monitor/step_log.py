"""Values that the engine writes to its monitors after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from zerolite.utils.accelerator import HostRead
from zerolite.zero.observers import StepObserver

from .monitor import Monitor


class _HasGroups(Protocol):
    @property
    def param_groups(self) -> Sequence[dict[str, Any]]: ...


class _HasScale(Protocol):
    @property
    def scale(self) -> float: ...


class StepLog(StepObserver):
    """Collects the values of a step on rank 0 and writes them when its outcome is known, which on CUDA is up to one
    step later. Nothing waits for the device and nothing travels: the loss is this rank's own.

    Args:
        samples_per_step: over all ranks; the x axis is samples where it is known, steps where it is None.
        scaler: the loss scaler, or None.
    """

    def __init__(
        self, monitor: Monitor, samples_per_step: int | None, optimizer: _HasGroups, scaler: _HasScale | None
    ) -> None:
        self._monitor = monitor
        self._samples_per_step = samples_per_step
        self._optimizer = optimizer
        self._scaler = scaler
        self._scale = scaler.scale if scaler is not None else 1.0  # of the step that is settled next
        self._rates: list[float] | None = None  # before the schedule has moved
        self._losses: dict[int, list[tuple[HostRead, float]]] = {}  # by the steps before theirs: value, factor
        self._weights: dict[int, float] = {}  # of accumulations with weights: their sum
        self._factors: dict[int, float] = {}  # of accumulations that were closed before they were full

    def add_loss(self, loss: torch.Tensor, factor: float, steps: int, first: bool, weight: float | None = None) -> None:
        """A loss, one element, goes backward times ``factor`` in the accumulation after ``steps`` steps, or with
        ``weight``; ``first``: it is the first one of its accumulation. The copy to the host begins, and is read when
        the step is settled."""
        if first:
            self._losses[steps] = []
            self._weights.pop(steps, None)
        if weight is not None:
            factor = weight
            self._weights[steps] = self._weights.get(steps, 0.0) + weight
        if factor:
            self._losses.setdefault(steps, []).append((HostRead(loss.reshape(-1)), factor))

    def close_early(self, factor: float, steps: int) -> None:
        """The accumulation after ``steps`` steps ends before it is full: its gradient, and so its loss, are multiplied
        by ``factor``."""
        self._factors[steps] = factor

    def on_updated(self) -> None:
        """Remember the learning rates: the schedule has not moved yet."""
        self._rates = self._current_rates()

    def on_settled(self, step: int, norm: float) -> None:
        """Write the values of step number ``step``, applied or skipped."""
        rates, self._rates = self._rates or self._current_rates(), None
        scale, self._scale = self._scale, self._scaler.scale if self._scaler is not None else 1.0
        values = {"lr" if group == 0 else f"lr_group{group}": rate for group, rate in enumerate(rates)}
        loss = self._take_loss(step - 1)
        if loss is not None:
            values = {"train_loss": loss, **values}
        values |= {"grad_norm": norm, "loss_scale": scale, "global_steps": step}
        self.write(step, values)

    def write(self, steps: int, values: Mapping[str, float], section: str | None = None) -> None:
        """Write ``values`` at the place of step number ``steps`` on the x axis, as ``Train/<section>/<name>``; the
        section is that of the axis, Samples or Steps, if none is given."""
        by_samples = self._samples_per_step is not None
        place = steps * (self._samples_per_step or 1)
        section = section or ("Samples" if by_samples else "Steps")
        self._monitor.write([(f"Train/{section}/{name}", value, place) for name, value in values.items()])

    def _current_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _take_loss(self, steps: int) -> float | None:
        """The loss whose gradient the step applied; None if ``engine.backward`` has seen none."""
        parts, factor = self._losses.pop(steps, []), self._factors.pop(steps, 1.0)
        factor /= self._weights.pop(steps, 1.0) or 1.0
        kept: dict[int, Any]
        for kept in (self._losses, self._factors, self._weights):
            for old in [known for known in kept if known < steps]:
                del kept[old]
        return factor * sum(part * read.get().tolist()[0] for read, part in parts) if parts else None
