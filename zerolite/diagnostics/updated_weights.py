"""Detection of updates that make weights non-finite, by param group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerolite.diagnostics.consistency import LatestNumbers, UpdateNumbers
from zerolite.diagnostics.rank_comparison import describe_value
from zerolite.zero.observers import StepObserver, Update
from zerolite.zero.stats import SquaresPlan
from zerolite.zero.update import SpanTensors

Sums = dict[torch.device, torch.Tensor]  # of the squares of masters by param group, float64, where the masters are


class UpdatedWeights(StepObserver):
    """Squared norms of this rank's masters by param group, before and after the last update.

    A sum of squares is finite exactly if all its masters are. Sums stay on the device and are added over ranks with the
    next step's statistics. The sums after one update are those before the next, so each update reads the masters once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, most_groups: int, latest: LatestNumbers) -> None:
        """
        Args:
            optimizer: its param groups are those of the sums.
            most_groups: the largest number of param groups of any rank. Pipeline stages may have different numbers, and
                all ranks must put the same number of values into the statistics.
            latest: numbers of the updates, for the error.
        """
        self._more = most_groups - len(optimizer.param_groups)
        self._optimizer, self._latest = optimizer, latest
        self._before: Sums = {}
        self._after: Sums = {}
        self._unchanged = False  # masters are still those that the last update has left
        self._count = 0  # param groups in the last update
        self._numbers: UpdateNumbers | None = None  # of the last update
        self._problem = ""  # a sentence about the update that made weights non-finite
        self._plan = SquaresPlan(
            lambda bucket: [(p.fragment.shard_start, p.fragment.numel, p.group) for p in bucket.shards]
        )

    def on_layout_changed(self) -> None:
        self._plan.clear()
        self._unchanged = False

    def on_weights_written(self, all_of_them: bool) -> None:
        """Forget the sums. If all weights are new, the outcome of the last update does not matter any more."""
        self._unchanged = False
        if all_of_them or self._problem:
            self._before, self._after = {}, {}
        if all_of_them:
            self._problem = ""

    # ---------------------------------------------------------------- the update

    def observe_update(self, update: Update) -> Update:
        """Add the sums before and after each call; before, only if they are not known."""
        count = self._more + len(self._optimizer.param_groups)
        known = self._unchanged and count == self._count
        self._numbers, self._unchanged = self._latest.numbers, True
        self._before, self._after, self._count = self._after if known else {}, {}, count
        self.slice_size = 2 * count  # the same on all ranks, whatever each of them has updated

        def watched(sub_group: Sequence[SpanTensors]) -> None:
            if not known:
                self._add(self._before, sub_group)
            update(sub_group)
            self._add(self._after, sub_group)

        return watched

    @torch.no_grad()
    def _add(self, sums: Sums, sub_group: Sequence[SpanTensors]) -> None:
        device = sub_group[0].master.device
        # Offloaded masters are summed where they are: one small tensor for each device.
        if device not in sums:
            sums[device] = torch.zeros(self._count, dtype=torch.float64, device=device)
        self._plan.add(
            sums[device], tuple(tensors.span for tensors in sub_group), [tensors.master for tensors in sub_group]
        )

    # ---------------------------------------------------------------- the outcome

    def write_slice(self, numbers: torch.Tensor) -> UpdateNumbers | None:
        for place, sums in enumerate((self._before, self._after)):
            for of_device in sums.values():
                numbers[place * self._count : (place + 1) * self._count] += of_device.to(numbers.device)
        return self._numbers

    def read_slice(self, written: UpdateNumbers | None, sums: torch.Tensor) -> Exception | None:
        """Return an error if the update has made weights of a param group non-finite."""
        self._problem = ""
        if written is None:
            return None
        before, after = torch.isfinite(sums).view(2, -1)
        broken = before & ~after
        if not broken.any():
            return None
        self._problem = _describe_update([int(group) for group in torch.nonzero(broken).flatten()], written)
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
