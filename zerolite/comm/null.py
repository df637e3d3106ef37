"""A communicator that sends nothing, to measure what a run costs this process apart from communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerolite.comm.communicator import NOTHING, Communicator, Pending, divide, done


class NullCommunicator(Communicator):
    """One rank of ``world_size``, alone: every collective returns at once, and is recorded as if it had happened.

    Nothing is right in the numbers: the other ranks are taken for copies of this one, so that values stay finite and
    losses differ from step to step. With ``fill`` False not even that is copied: what was gathered is whatever its
    memory held, which may be no finite number. ``all_gather`` and ``broadcast`` leave their tensors as they are.
    """

    def __init__(self, rank: int, world_size: int, fill: bool = True) -> None:
        super().__init__(None, rank, world_size)
        self._fill = fill

    def all_reduce_max(self, tensor: torch.Tensor, tag: str) -> None:
        self._note("all_reduce", tensor, tag)

    def broadcast(self, tensor: torch.Tensor, tag: str, source: int = 0) -> None:
        self._note("broadcast", tensor, tag)

    def _all_reduce(self, tensor: torch.Tensor, tag: str, divisor: float) -> Pending:
        return done(divide(tensor, divisor / self.world_size))

    def _reduce_scatter(self, full: torch.Tensor, tag: str, divisor: float, dtype: torch.dtype) -> Pending:
        return done(divide(self.part(full), divisor / self.world_size).to(dtype, copy=True))

    def _gather_shards(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], tag: str, key: int
    ) -> Pending:
        if self._fill:
            for full, shard in zip(fulls, shards, strict=True):
                full.view(self.world_size, shard.numel()).copy_(shard)
        return done(NOTHING)
