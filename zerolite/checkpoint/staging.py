"""Host copies of shards, written to disk while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from zerolite.checkpoint.planner import Shard
from zerolite.utils.pinned_memory import host_memory

_ALIGNMENT = 64  # bytes


class Staging:
    """One piece of host memory, pinned if shards come from a CUDA device, which is kept for the next save: touching new
    memory takes longer than copying."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    @torch.no_grad()
    def copy(self, shards: Sequence[Shard]) -> list[Shard]:
        """The same shards in host memory, complete when this returns; valid until the next call."""
        places, position = [], 0
        for shard in shards:
            places.append(position)
            position += -(-shard.nbytes // _ALIGNMENT) * _ALIGNMENT
        values = [shard.values if isinstance(shard.values, torch.Tensor) else shard.values() for shard in shards]
        on_cuda = next((value.device for value in values if value.device.type == "cuda"), None)
        if self._memory.numel() < position:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # let go before there is more
            self._memory = host_memory(position, pin=on_cuda is not None)
        staged = []
        for shard, value, place in zip(shards, values, places, strict=True):
            if shard.box is not None:
                memory = self._memory.narrow(0, place, shard.nbytes).view(shard.dtype).view(shard.box[1])
                memory.copy_(value, non_blocking=on_cuda is not None)
                value = memory
            staged.append(replace(shard, values=value))
        if on_cuda is not None:
            torch.cuda.current_stream(on_cuda).synchronize()
        return staged
