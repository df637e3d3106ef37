"""Communicator that sends nothing, to measure a run's cost without communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerolite.comm.communicator import NOTHING, Communicator, Pending, divide, done
from zerolite.comm.transport import DryTransport


class NullCommunicator(Communicator):
    """One rank of ``world_size``, alone: every collective returns at once, and is recorded as if it had happened.

    The numbers are wrong. The other ranks are taken for copies of this one, so that values stay finite and losses
    change from step to step. ``all_gather`` and ``broadcast`` leave their tensors unchanged, and
    ``all_to_all_rows`` brings zeros. Memory and copies of real
    collectives are left out, see :func:`~zerolite.comm.create.dry_communicator`.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(DryTransport(rank, world_size))
        self.is_dry = False  # comparisons between ranks run too: their cost is part of the measurement

    def second(self, backend: str) -> Communicator:
        """Return another one: a null communicator has no transport of its own."""
        return NullCommunicator(self.rank, self.world_size)

    def _all_reduce(self, tensor: torch.Tensor, tag: str, divisor: float) -> Pending:
        return done(divide(tensor, divisor / self.world_size))

    def _reduce_scatter(self, full: torch.Tensor, tag: str, divisor: float, dtype: torch.dtype) -> Pending:
        return done(divide(self.shard(full), divisor / self.world_size).to(dtype, copy=True))

    def _all_to_all_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], largest: int, tag: str
    ) -> Pending:
        return done(rows if rows.dim() == 1 else rows.new_zeros(sum(received), rows.shape[1]))

    def _gather_shards(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], tag: str, key: int
    ) -> Pending:
        for full, shard in zip(fulls, shards, strict=True):
            full.view(self.world_size, shard.numel()).copy_(shard)
        return done(NOTHING)
