"""``partition_activations``: shard inputs that are equal on all ranks of a group over these ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerolite.comm import Communicator, collective
from zerolite.utils.accelerator import host_values

_ALIGNMENT = 16  # bytes: sizes of shards are multiples of it
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ActivationShards:
    """Sharding of tensors over the ranks on which activations are replicated, ``comm``."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._unread: list[_Flags] = []

    def shard(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of ``flat``, uint8 [nbytes], as a view. The last shards may be shorter or empty."""
        nbytes = self.shard_nbytes(flat.numel())
        start = min(self._comm.rank * nbytes, flat.numel())
        return flat[start : start + nbytes]

    def shard_nbytes(self, nbytes: int) -> int:
        """Return the bytes of each rank's shard of a tensor of ``nbytes``."""
        return -(-nbytes // (self._comm.world_size * _ALIGNMENT)) * _ALIGNMENT

    @collective
    def gather(
        self, shards: Sequence[torch.Tensor], checksums: Sequence[torch.Tensor], what: str
    ) -> list[torch.Tensor]:
        """Return the full tensors, uint8 [world_size * shard].

        Args:
            shards: this rank's shard of each tensor.
            checksums: the :func:`checksum` of each full tensor on this rank.
            what: the checkpoint, for messages.

        Raises:
            RuntimeError: the tensors were not equal on all ranks. On CUDA a later call raises it, because the host does
                not wait for the device.
        """
        self.check()
        world = self._comm.world_size
        own = torch.stack(list(checksums)).view(torch.uint8)
        full = [shard.new_empty(world * shard.numel()) for shard in shards]
        all_sums = own.new_empty(world * own.numel())
        sizes = hash(tuple(shard.numel() for shard in shards)) & 0x7FFFFFFF
        self._comm.gather_shards([*full, all_sums], [*shards, own], "activations", sizes).wait()
        rows = all_sums.view(torch.int64).view(world, -1)
        self._unread.append(_Flags((rows != rows[0]).any(1), what))
        self.check()
        return full

    def check(self) -> None:
        """Raise RuntimeError for unequal inputs whose flags have arrived on the host."""
        while self._unread and self._unread[0].arrived():
            flags = self._unread.pop(0)
            different = flags.ranks()
            if different:
                self._unread.clear()
                raise RuntimeError(
                    f"activation_checkpointing.partition_activations: expected the inputs of {flags.what} to be equal "
                    "on all ranks of the group that zerolite.checkpointing.configure was given, got others on its rank "
                    f"{', '.join(map(str, different))} than on its rank 0, so gradients would be wrong. Pass the group "
                    "in which activations are replicated (the tensor-parallel one), or set partition_activations to "
                    "false"
                )


class _Flags:
    """Copy to the host of a flag for each rank, True if it differs from the first: bool [world_size]."""

    def __init__(self, different: torch.Tensor, what: str) -> None:
        self.what = what
        self._event: torch.cuda.Event | None = None
        self._host = different
        if different.is_cuda:
            self._host = torch.empty(different.shape, dtype=different.dtype, device="cpu", pin_memory=True)
            self._host.copy_(different, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(different.device))

    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def ranks(self) -> list[int]:
        return [rank for rank, different in enumerate(host_values(self._host)) if different]


def checksum(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of ``flat``, of any dtype, taken as integers: int64 []."""
    return flat.view(_AS_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
