"""Detection of updates that make weights non-finite, by param group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerolite.diagnostics.consistency import LatestNumbers, UpdateNumbers
from zerolite.diagnostics.rank_comparison import describe_value
from zerolite.zero.observers import StepObserver
from zerolite.zero.update import UpdateMethod


class UpdatedWeights(StepObserver):
    """Flags of the param groups in which the last update has turned a finite master into a non-finite one.

    The update sets them where it has the values at hand. They stay on the device and are added over ranks with the next
    step's statistics.
    """

    def __init__(
        self, method: UpdateMethod, optimizer: torch.optim.Optimizer, most_groups: int, latest: LatestNumbers
    ) -> None:
        """
        Args:
            method: makes the updates.
            optimizer: its param groups are those of the flags.
            most_groups: the largest number of param groups of any rank. Pipeline stages may have different numbers, and
                all ranks must put the same number of values into the statistics.
            latest: numbers of the updates, for the error.
        """
        method.find_broken()
        self._method, self._optimizer, self._latest = method, optimizer, latest
        self._more = most_groups - len(optimizer.param_groups)
        self._numbers: UpdateNumbers | None = None  # of the last update
        self._problem = ""  # a sentence about the update that made weights non-finite

    def on_update_begin(self) -> None:
        for flags in (self._method.broken or {}).values():
            flags.zero_()
        self._numbers = self._latest.numbers
        self.slice_size = self._more + len(self._optimizer.param_groups)  # the same on all ranks

    def on_weights_written(self, all_of_them: bool) -> None:
        """Forget the flags if the outcome of the last update does not matter any more."""
        if all_of_them or self._problem:
            for flags in (self._method.broken or {}).values():
                flags.zero_()
        if all_of_them:
            self._problem = ""

    def write_slice(self, numbers: torch.Tensor) -> UpdateNumbers | None:
        for flags in (self._method.broken or {}).values():  # one small tensor for each device where masters are
            if numbers.is_cuda and not flags.is_cuda:  # a copy from pageable memory would wait for the stream
                flags = flags.pin_memory()
            numbers[: len(flags)] += flags.to(numbers.device, non_blocking=numbers.is_cuda)
        return self._numbers

    def read_slice(self, written: UpdateNumbers | None, sums: torch.Tensor) -> Exception | None:
        """Return an error if the update has made weights of a param group non-finite."""
        self._problem = ""
        if written is None or not sums.any():
            return None
        self._problem = _describe_update([int(group) for group in torch.nonzero(sums).flatten()], written)
        return FloatingPointError(
            f"{self._problem}. These weights are lost: start again from the last checkpoint, and look at the value "
            "that did it (a learning rate or schedule that runs away, an eps of 0, a loss scale near 0)."
        )

    def explain_skip(self) -> str:
        return self._problem


def _describe_update(groups: Sequence[int], numbers: UpdateNumbers) -> str:
    which = f"param group {groups[0]}" + (f" and {len(groups) - 1} more" if len(groups) > 1 else "")
    # Another pipeline stage may have more param groups than this rank knows.
    known = numbers.groups[groups[0]] if groups[0] < len(numbers.groups) else {}
    values = {key: value for key, value in known.items() if _is_number(value)}
    used = ", ".join(f"{key}={describe_value(value)}" for key, value in values.items())
    scaled = f", gradients divided by {numbers.divisor:g} (loss scale)" if numbers.divisor != 1.0 else ""
    return (
        f"the update of step {numbers.step + 1} made weights of {which} non-finite, from finite gradients and weights, "
        f"with {used}{scaled}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (float, int, tuple, torch.Tensor)) and not isinstance(value, bool)
