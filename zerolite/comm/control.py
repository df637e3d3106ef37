"""A few numbers from every rank to every rank, on the host and beside all other collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zerolite.comm import recorder
from zerolite.comm.communicator import Communicator
from zerolite.comm.flight import wait_for
from zerolite.comm.objects import broadcast_object
from zerolite.comm.process_group import second_group

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
        """Send ``row`` to whoever waits in :meth:`exchange`, and wait for nobody: the last call."""
        own, full = self._rows(row)
        self._last = [own, full, dist.all_gather(list(full), own, group=self._group, async_op=True)]

    def broadcast(self, value: Any, source: int) -> Any:
        """Rank ``source``'s ``value``."""
        return broadcast_object(value, source, self._group)

    def _rows(self, row: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.tensor(row + [0] * (self._width - len(row)), dtype=torch.int64, device="cpu")
        return own, torch.empty(self._world_size, self._width, dtype=torch.int64, device="cpu")
