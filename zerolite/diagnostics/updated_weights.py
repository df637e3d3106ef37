"""Detection of updates that make weights non-finite, by param group."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerolite.diagnostics.rank_comparison import describe_value
from zerolite.zero.observers import StepObserver
from zerolite.zero.step_state import StepState
from zerolite.zero.update import UpdateMethod


class _Update(NamedTuple):
    """Facts about an update, for the error.

    Attributes:
        step: its number.
        divisor: divisor of the gradient.
        groups: values of its param groups.
    """

    step: int
    divisor: float
    groups: Sequence[Mapping[str, Any]]


class UpdatedWeights(StepObserver):
    """Flags of the param groups in which the last update has turned a finite master into a non-finite one.

    The update sets them where it has the values at hand. They stay on the device and are added over ranks with the next
    step's statistics.
    """

    def __init__(
        self, method: UpdateMethod, optimizer: torch.optim.Optimizer, most_groups: int, state: StepState
    ) -> None:
        """
        Args:
            method: makes the updates.
            optimizer: its param groups are those of the flags.
            most_groups: the largest number of param groups of any rank. Pipeline stages may have different numbers, and
                all ranks must put the same number of values into the statistics.
            state: knows the number of the step, for the error.
        """
        method.broken = {}
        self._method, self._optimizer, self._state = method, optimizer, state
        self._more = most_groups - len(optimizer.param_groups)
        self._update: _Update | None = None  # the last one
        self._problem = ""  # a sentence about the update that made weights non-finite

    def on_update_begin(self) -> None:
        for flags in (self._method.broken or {}).values():
            flags.zero_()
        groups = [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in self._optimizer.param_groups
        ]
        self._update = _Update(self._state.counters.global_steps + 1, self._state.local_divisor(), groups)
        self.slice_size = self._more + len(groups)  # the same on all ranks

    def on_weights_written(self, all_of_them: bool) -> None:
        """Forget the flags if the outcome of the last update does not matter any more."""
        if all_of_them or self._problem:
            for flags in (self._method.broken or {}).values():
                flags.zero_()
        if all_of_them:
            self._problem = ""

    def write_slice(self, numbers: torch.Tensor) -> _Update | None:
        for flags in (self._method.broken or {}).values():  # one small tensor for each device where masters are
            if numbers.is_cuda and not flags.is_cuda:  # a copy from pageable memory would wait for the stream
                flags = flags.pin_memory()
            numbers[: len(flags)] += flags.to(numbers.device, non_blocking=numbers.is_cuda)
        return self._update

    def read_slice(self, written: _Update | None, sums: torch.Tensor) -> Exception | None:
        """Return an error if the update has made weights of a param group non-finite."""
        self._problem = ""
        if written is None or not sums.any():
            return None
        broken = [int(group) for group in torch.nonzero(sums).flatten()]
        self._problem = _describe_update(broken, written, self._optimizer.defaults)
        return FloatingPointError(
            f"{self._problem}. These weights are lost: start again from the last checkpoint, and look at the value "
            "that did it (a learning rate or schedule that runs away, an eps of 0, a loss scale near 0)."
        )

    def explain_skip(self) -> str:
        return self._problem


def _describe_update(groups: Sequence[int], update: _Update, defaults: Container[str]) -> str:
    which = f"param group {groups[0]}" + (f" and {len(groups) - 1} more" if len(groups) > 1 else "")
    # Another pipeline stage may have more param groups than this rank knows.
    known = update.groups[groups[0]] if groups[0] < len(update.groups) else {}
    values = {key: value for key, value in known.items() if key in defaults and _is_number(value)}
    used = ", ".join(f"{key}={describe_value(value)}" for key, value in values.items())
    scaled = f", gradients divided by {update.divisor:g} (loss scale)" if update.divisor != 1.0 else ""
    return (
        f"the update of step {update.step} made weights of {which} non-finite, from finite gradients and weights, "
        f"with {used}{scaled}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (float, int, tuple, list, torch.Tensor)) and not isinstance(value, bool)
