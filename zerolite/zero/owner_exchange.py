"""Whole parameters on their owners: the ranks send their parts of each to one rank, and get back what it makes of them.

::

                 rank 0          rank 1
                 a[:k]  b[:m]    a[k:]  b[m:]     each rank has a part of every parameter
    to_owners    a               b                each parameter is whole on one rank, its owner
    to_parts     a[:k]  b[:m]    a[k:]  b[m:]     each rank has its part of what the owners have made of them

Both are one all-to-all of unequal parts. A rank sends and receives its own elements once each, whatever the number of
ranks: little beside the reduce-scatter of the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zerolite.comm import Communicator, collective
from zerolite.zero.layout import PartitionLayout, Slot

_TAG = "owners"


@collective
class OwnerExchange:
    """Exchanges of some parameters of a layout between the ranks that have parts of them.

    Attributes:
        owned: the slots of the parameters that this rank owns.
    """

    def __init__(
        self,
        layout: PartitionLayout,
        slots: Sequence[Slot],
        owners: Sequence[int],
        comm: Communicator,
        device: torch.device,
    ) -> None:
        """
        Args:
            layout: has the ranges of the parts.
            slots: slots of the parameters, in one order on all ranks.
            owners: rank that owns each.
            comm: communicator of the ranks among which the layout divides the parameters.
            device: device on which the parameters travel.
        """
        ranks = range(comm.world_size)
        self._comm, self._device = comm, device
        # This rank's parts as they are sent, those of rank 0's parameters first.
        by_owner: list[list[Slot]] = [[] for _ in ranks]
        for slot, owner in zip(slots, owners, strict=True):
            by_owner[owner].append(slot)
        self.owned = by_owner[comm.rank]
        in_order = [slot for of_owner in by_owner for slot in of_owner]
        self._parts = [(slot.index, layout.param_range(slot, comm.rank).numel) for slot in in_order]
        sent = [[0] * comm.world_size for _ in ranks]  # elements by rank and owner
        owner_of = {slot.index: owner for slot, owner in zip(slots, owners, strict=True)}
        for bucket in {slot.bucket: layout.buckets[slot.bucket] for slot in slots}.values():
            exchanged = [slot for slot in bucket.slots if slot.index in owner_of]
            targets = [owner_of[slot.index] for slot in exchanged]
            for row, numels in zip(sent, layout.part_numels(bucket, exchanged), strict=True):
                for target, numel in zip(targets, numels, strict=True):
                    row[target] += numel
        self._sent, self._largest = sent[comm.rank], max(map(max, sent))  # the largest of all ranks
        # The parts of all ranks as they arrive, those of rank 0 first.
        self._ranges = [[layout.param_range(slot, rank) for slot in self.owned] for rank in ranks]
        self._received = [sum(part.numel for part in of_rank) for of_rank in self._ranges]
        # Of each owned parameter the numbers of its parts as they arrive, in the order of its elements.
        self._order = [
            [len(self.owned) * rank + place for rank in sorted(ranks, key=lambda r: self._ranges[r][place])]
            for place in range(len(self.owned))
        ]

    def to_owners(self, parts: Mapping[int, torch.Tensor], dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """Return the parameters that this rank owns, flat, by index.

        Args:
            parts: this rank's parts by index, flat. A part that is not there counts as zeros.
            dtype: dtype in which they are sent, the same on all ranks.
        """
        absent = torch.zeros(max((n for i, n in self._parts if i not in parts), default=0), dtype=dtype)
        absent = absent.to(self._device)
        sent = [parts[i].to(self._device, dtype) if i in parts else absent[:n] for i, n in self._parts]
        arrived = self._exchange(sent, self._sent, self._received, dtype)
        pieces = arrived.split([part.numel for of_rank in self._ranges for part in of_rank])
        return {
            slot.index: torch.cat([pieces[number] for number in order])
            for slot, order in zip(self.owned, self._order, strict=True)
        }

    def to_parts(self, results: Mapping[int, torch.Tensor], dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """Return this rank's parts of all parameters, flat, by index.

        Args:
            results: what this rank has made of the parameters that it owns: flat, by index, one for each.
            dtype: dtype in which they are sent, the same on all ranks.
        """
        sent = [
            results[slot.index].to(self._device, dtype)[part.start : part.end]
            for of_rank in self._ranges
            for slot, part in zip(self.owned, of_rank, strict=True)
        ]
        arrived = self._exchange(sent, self._received, self._sent, dtype)
        pieces = arrived.split([numel for _, numel in self._parts])
        return {index: piece for (index, _), piece in zip(self._parts, pieces, strict=True)}

    def _exchange(
        self, parts: list[torch.Tensor], sent: Sequence[int], received: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=self._device)
        return self._comm.all_to_all_rows(flat.view(-1, 1), sent, received, self._largest, _TAG).wait().view(-1)


def balanced_owners(costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Return an owner for each cost: the largest first, each to the rank that has the least so far.

    Args:
        costs: what each brings its owner.
        loads: what each rank has already.
    """
    loads = list(loads)
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners
