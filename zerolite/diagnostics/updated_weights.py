"""Detection of updates that make weights non-finite, by param group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerolite.diagnostics.consistency import UpdateNumbers
from zerolite.zero.checks import Update
from zerolite.zero.grad_stats import SquaresPlan
from zerolite.zero.update import SpanTensors

Sums = dict[torch.device, torch.Tensor]  # of the squares of masters by param group, float64, where the masters are


class UpdatedWeights:
    """Squared norms of this rank's masters by param group, before and after the last update.

    A sum of squares is finite exactly if all its masters are. Sums stay on the device and are added over ranks with the
    next step's statistics. The sums after one update are those before the next, so each update reads the masters once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, most_groups: int) -> None:
        """
        Args:
            optimizer: its param groups are those of the sums.
            most_groups: the largest number of param groups of any rank. Pipeline stages may have different numbers, and
                all ranks must put the same number of values into the statistics.
        """
        self._more = most_groups - len(optimizer.param_groups)
        self._optimizer = optimizer
        self._before: Sums = {}
        self._after: Sums = {}
        self._unchanged = False  # masters are still those that the last update has left
        self._count = 0  # param groups in the last update
        self._error_raised = False  # the outcome of the last update has been raised
        self._announced: UpdateNumbers | None = None
        self.numbers: UpdateNumbers | None = None  # of the last update
        self._plan = SquaresPlan(
            lambda bucket: [(p.fragment.shard_start, p.fragment.numel, p.group) for p in bucket.shards]
        )

    def replan(self) -> None:
        """Follow a layout with new buckets."""
        self._plan.clear()
        self._unchanged = False

    def forget(self, update: bool) -> None:
        """Forget the sums, because values have been written or loaded.

        Args:
            update: the outcome of the last update does not matter any more, even if it has not been raised yet.
        """
        self._unchanged = False
        if update or self._error_raised:
            self._before, self._after = {}, {}

    def note_raised(self) -> None:
        """Note that the outcome of the last update has been raised; new values clear it."""
        self._error_raised = True

    # ---------------------------------------------------------------- the update

    def announce(self, numbers: UpdateNumbers) -> None:
        """Set the numbers of the coming update, which may still be skipped."""
        self._announced = numbers

    def __call__(self, update: Update) -> Update:
        """Return ``update`` with the sums added before and after each of its calls; before, only if they are not
        known."""
        count = self._more + len(self._optimizer.param_groups)
        known = self._unchanged and count == self._count
        self.numbers, self._error_raised, self._unchanged = self._announced, False, True
        self._before, self._after, self._count = self._after if known else {}, {}, count

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

    @property
    def size(self) -> int:
        """Number of values in the statistics; the same on all ranks, whatever each of them has updated."""
        return 2 * self._count

    def write(self, values: torch.Tensor) -> None:
        """Write this rank's sums into ``values``, zeros of shape [size]."""
        for place, sums in enumerate((self._before, self._after)):
            for of_device in sums.values():
                values[place * self._count : (place + 1) * self._count] += of_device.to(values.device)

    def nonfinite_groups(self, values: torch.Tensor) -> list[int]:
        """Return the param groups whose weights the update has made non-finite.

        Args:
            values: those of :meth:`write`, added over ranks, on the host.
        """
        before, after = torch.isfinite(values).view(2, len(values) // 2)
        return [int(group) for group in torch.nonzero(before & ~after).flatten()]
