"""Detection of updates that make weights non-finite, by param group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zerolite.diagnostics.consistency import UpdateNumbers
from zerolite.zero.checks import Update
from zerolite.zero.grad_stats import SquaresPlan
from zerolite.zero.optim_shards import Hand, OptimParamShard

Sums = dict[torch.device, torch.Tensor]  # of the squares of masters by param group, float64, where the masters are


class UpdatedWeights:
    """Sums of the squares of this rank's masters by param group, before and after the last update. A sum is finite
    exactly where all of them are. They stay on the device and are added over ranks with the next step's statistics.

    What an update leaves is what the next one finds, so masters are read once in each update, and before the first.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Callable[[], Sequence[Sequence[OptimParamShard]]],
        most_groups: int,
    ) -> None:
        """
        Args:
            shards: of each bucket.
            most_groups: param groups of any rank of the model now, which are as many on all ranks that share its
                statistics: stages of a pipeline may have other groups.
        """
        self._more = most_groups - len(optimizer.param_groups)
        self._optimizer = optimizer
        self._before: Sums = {}
        self._after: Sums = {}
        self._known = False  # whether masters are those that the last update has left
        self._count = 0  # param groups in the last update
        self._told = False
        self._announced: UpdateNumbers | None = None
        self.numbers: UpdateNumbers | None = None  # of the last update
        self._plan = SquaresPlan(
            lambda bucket: [(p.fragment.shard_start, p.fragment.numel, p.group) for p in shards()[bucket]]
        )

    def replan(self) -> None:
        """Look at the layout anew: there are other buckets than before."""
        self._plan.clear()
        self._known = False

    def forget(self, update: bool) -> None:
        """Values have been written or loaded: what the next update finds is not what the last one has left. update:
        what that one has made does not matter any more, whether it has been told or not."""
        self._known = False
        if update or self._told:
            self._before, self._after = {}, {}

    def tell(self) -> None:
        """All ranks have been told what the last update has made; new values end it."""
        self._told = True

    # ---------------------------------------------------------------- the update

    def announce(self, numbers: UpdateNumbers) -> None:
        """Say what the coming update uses, if it comes to one."""
        self._announced = numbers

    def __call__(self, update: Update) -> Update:
        """An update begins: look before each of its calls, unless the last update has, and after it."""
        count = self._more + len(self._optimizer.param_groups)
        known = self._known and count == self._count
        self.numbers, self._told, self._known = self._announced, False, True
        self._before, self._after, self._count = self._after if known else {}, {}, count

        def watched(hands: Sequence[Hand]) -> None:
            if not known:
                self._add(self._before, hands)
            update(hands)
            self._add(self._after, hands)

        return watched

    @torch.no_grad()
    def _add(self, sums: Sums, hands: Sequence[Hand]) -> None:
        device = hands[0].master.device
        if device not in sums:
            sums[device] = torch.zeros(self._count, dtype=torch.float64, device=device)
        self._plan.add(sums[device], tuple(hand.span for hand in hands), [hand.master for hand in hands])

    # ---------------------------------------------------------------- the outcome

    @property
    def size(self) -> int:
        """Values in the statistics; the same on all ranks, whatever each of them has updated."""
        return 2 * self._count

    def write(self, values: torch.Tensor) -> None:
        """Put this rank's sums into ``values`` [size], zeros."""
        for place, sums in enumerate((self._before, self._after)):
            for of_device in sums.values():
                values[place * self._count : (place + 1) * self._count] += of_device.to(values.device)

    def spoilt(self, values: torch.Tensor) -> list[int]:
        """The param groups whose weights were finite before the update and are not any more. values: those of
        :meth:`write`, added over ranks, on the host."""
        before, after = torch.isfinite(values).view(2, len(values) // 2)
        return [int(group) for group in torch.nonzero(before & ~after).flatten()]
