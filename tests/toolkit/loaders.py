"""Loaders of one rank of a job, without the other ranks."""

from __future__ import annotations

from zerolite.comm import Communicator
from zerolite.comm.transport import DryTransport
from zerolite.data.dataloader import Loaders


def loaders_of(rank: int, world_size: int, batch_size: int, drop_last: bool = False) -> Loaders:
    return Loaders(Communicator(DryTransport(rank, world_size)), "cpu", batch_size, drop_last)
