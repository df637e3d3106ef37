"""Host-side exchange of a few numbers between all ranks, independent of all other collectives.

Every step waits for these exchanges, so each is one collective over rows of integers; an object (objects.py) takes two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from zerolite.comm import recorder
from zerolite.comm.communicator import Communicator
from zerolite.comm.flight_recorder import collective, wait_for
from zerolite.comm.process_group import second_group
from zerolite.utils.accelerator import HostRead

T = TypeVar("T", int, float)
TAG = "control"


class HostMaximum:
    """The largest numbers of all ranks, on the host, in few messages.

    In round k a rank sends its numbers to rank + 2^k and receives those of rank - 2^k. So 1,000 ranks need ten rounds
    of one message each. It is made on all ranks of ``comm``, in the same order. Nothing is sent in a dry run.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._group = None if comm.group is None else second_group(comm.group, "gloo", "control")
        ranks = range(comm.world_size) if comm.group is None else dist.get_process_group_ranks(comm.group)
        self._rounds = [(ranks[to], ranks[source]) for to, source in rounds(comm.rank, comm.world_size)]

    @collective
    def of(self, numbers: Sequence[int]) -> list[int]:
        """Return for each of ``numbers``, 64-bit integers, the largest of all ranks.

        All ranks pass equally many numbers.
        """
        known = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        recorder.note("all_reduce", known, TAG, self._comm.dimension, self._comm.world_size)
        if self._group is None:
            return list(numbers)
        # After round k every rank knows the maximum of the 2^(k+1) ranks up to itself.
        for to, source in self._rounds:
            heard = torch.empty_like(known)
            works = dist.irecv(heard, source, self._group), dist.isend(known, to, self._group)
            wait_for(works, ("all_reduce", TAG, known.numel(), known.dtype, 0))
            known = torch.maximum(known, heard)
        return known.tolist()


@collective
def largest(
    numbers: Sequence[T], comm: Communicator, device: torch.device, tag: str, dtype: torch.dtype = torch.int64
) -> list[T]:
    """Return for each of ``numbers`` the largest of all ranks: one small all-reduce on ``device``, for which the host
    waits.

    All ranks pass equally many numbers.
    """
    if comm.world_size == 1:
        return list(numbers)
    values = torch.tensor(numbers, dtype=dtype, device=device)
    comm.all_reduce_max(values, tag)
    found: list[T] = HostRead(values).get().tolist()
    return found


def rounds(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return for each round the rank to which ``rank`` sends and the rank from which it receives."""
    steps = [1 << k for k in range((world_size - 1).bit_length())]
    return [((rank + step) % world_size, (rank - step) % world_size) for step in steps]
