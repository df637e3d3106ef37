"""Host-side exchange of a few numbers between all ranks, on a channel apart from all other collectives.

Steps wait for these, so they are rows of integers in one collective each; an object (objects.py) takes two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerolite.comm import recorder
from zerolite.comm.communicator import Communicator
from zerolite.comm.flight_recorder import wait_for
from zerolite.comm.objects import broadcast_object
from zerolite.comm.process_group import second_group
from zerolite.utils.accelerator import HostRead

T = TypeVar("T", int, float)
TAG = "control"


class ControlChannel:
    """Over a gloo group of its own, so that it neither waits for the device nor gets in the way of what is in flight.

    All methods are called on all ranks of ``comm``, in the same order; the first one is making it.
    """

    def __init__(self, comm: Communicator, width: int) -> None:
        """width: numbers in a row."""
        assert comm.group is not None
        self._group = second_group(comm.group, "gloo", "control")
        self._rank, self._world_size, self._width = comm.rank, comm.world_size, width
        self._dimension = comm.dimension
        self._last: list[Any] = []  # what was sent without waiting, kept alive

    def exchange(self, row: list[int]) -> list[list[int]]:
        """Every rank's ``row`` of at most ``width`` integers of 64 bits, filled up with zeros."""
        own, full = self._rows(row)
        recorder.note("all_gather", full, TAG, self._dimension, self._world_size)
        work = dist.all_gather(list(full), own, group=self._group, async_op=True)
        wait_for((work,), ("all_gather", TAG, full.numel(), full.dtype, 0))
        return full.tolist()

    def leave(self, row: list[int]) -> None:
        """Send ``row`` to the ranks that wait in :meth:`exchange`, and do not wait: the last call."""
        own, full = self._rows(row)
        self._last = [own, full, dist.all_gather(list(full), own, group=self._group, async_op=True)]

    def broadcast(self, value: object, source: int) -> Any:
        """Rank ``source``'s ``value``."""
        return broadcast_object(value, source, self._group)

    def _rows(self, row: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.tensor(row + [0] * (self._width - len(row)), dtype=torch.int64, device="cpu")
        return own, torch.empty(self._world_size, self._width, dtype=torch.int64, device="cpu")


class HostMaximum:
    """The largest of all ranks' numbers, on the host, in few messages: in round k a rank tells rank + 2^k what it has
    learned and hears from rank - 2^k. So 1,000 ranks take ten rounds of one message each.

    Made on all ranks of ``comm``, in the same order. Nothing is sent in a dry run.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._group = None if comm.group is None else second_group(comm.group, "gloo", "control")
        ranks = range(comm.world_size) if comm.group is None else dist.get_process_group_ranks(comm.group)
        self._rounds = [(ranks[to], ranks[source]) for to, source in rounds(comm.rank, comm.world_size)]

    def of(self, numbers: Sequence[int]) -> list[int]:
        """Return for each of ``numbers``, integers of 64 bits, the largest that any rank gives in its place. Called on
        all ranks, with equally many."""
        known = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        recorder.note("all_reduce", known, TAG, self._comm.dimension, self._comm.world_size)
        if self._group is None:
            return list(numbers)
        for to, source in self._rounds:
            heard = torch.empty_like(known)
            works = dist.irecv(heard, source, self._group), dist.isend(known, to, self._group)
            wait_for(works, ("all_reduce", TAG, known.numel(), known.dtype, 0))
            known = torch.maximum(known, heard)
        return known.tolist()


def largest(
    numbers: Sequence[T], comm: Communicator, device: torch.device, tag: str, dtype: torch.dtype = torch.int64
) -> list[T]:
    """Return for each of ``numbers`` the largest that any rank gives in its place: one small all-reduce on ``device``,
    for which the host waits. Called on all ranks of ``comm``, with equally many."""
    if comm.world_size == 1:
        return list(numbers)
    values = torch.tensor(numbers, dtype=dtype, device=device)
    comm.all_reduce_max(values, tag)
    found: list[T] = HostRead(values).get().tolist()
    return found


def rounds(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return for each round the ranks to which ``rank`` sends and from which it receives."""
    steps = [1 << k for k in range((world_size - 1).bit_length())]
    return [((rank + step) % world_size, (rank - step) % world_size) for step in steps]
