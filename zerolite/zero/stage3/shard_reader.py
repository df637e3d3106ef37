"""Prefetch and staging of offloaded shards for all-gathers.

Shards on disk are read into host memory first. If the gather is announced in time (:meth:`ShardReader.read_ahead`) they
are read ahead of it, otherwise when it is launched. From the host, one copy brings all shards that are neighbours in
memory to the device, beside the device's work. The collective comes after it, so waiting for the collective is waiting
for the copy.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from zerolite.comm.flight_recorder import EVENTS
from zerolite.offload.placement import SPAN_ALIGNMENT, DiskPlacement, Placements, Transfer
from zerolite.offload.transfers import StagedTransfer, StagingPool, Transfers
from zerolite.utils.memory_tags import DEVICE, DISK, STAGING, tag_memory
from zerolite.utils.torch_private import undispatched

if TYPE_CHECKING:
    from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter


class TensorSpan(NamedTuple):
    """Range of one memory in which several tensors lie next to each other.

    Attributes:
        indices: indices of the tensors.
        start: first element of the range in the memory.
        numel: elements of the range.
    """

    indices: list[int]
    start: int
    numel: int

    def memory(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the range as one tensor, shape [numel]."""
        return tensors[self.indices[0]].as_strided((self.numel,), (1,), self.start)

    def views(self, tensors: Sequence[torch.Tensor], copied: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return, by index, the part of ``copied`` (a copy of the range, shape [numel]) that each tensor has."""
        return {
            index: copied.narrow(0, tensors[index].storage_offset() - self.start, tensors[index].numel())
            for index in self.indices
        }


def tensor_spans(tensors: Sequence[torch.Tensor], alignment: int) -> list[TensorSpan]:
    """Group tensors that are neighbours in memory, so that each group is moved by one copy or read.

    Two neighbours share a span if the gap between them is short: to move the gap costs less than a second transfer.

    Args:
        tensors: flat tensors that do not overlap. Empty ones are in no span.
        alignment: spans begin at multiples of so many elements of their memory.
    """
    by_memory: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            by_memory.setdefault(id(tensor.untyped_storage()), []).append(index)
    spans: list[TensorSpan] = []
    for indices in by_memory.values():
        members: list[int] = []
        start = end = 0
        for offset, index in sorted((int(tensors[index].storage_offset()), index) for index in indices):
            if members and offset - end >= SPAN_ALIGNMENT:
                spans.append(TensorSpan(members, start, end - start))
                members = []
            if not members:
                start = offset // alignment * alignment
            members = [*members, index]
            end = offset + tensors[index].numel()
        spans.append(TensorSpan(members, start, end - start))
    return spans


class _SpanRead(StagedTransfer):
    """Read of one span from disk into a staging buffer on the host."""

    def __init__(self, pool: StagingPool, buffer: torch.Tensor, transfer: Transfer, users: int) -> None:
        """users: number of shards in the buffer that a gather still needs."""
        super().__init__(pool, buffer, transfer)
        self._users = users

    def release(self) -> None:
        """Note that one shard is not needed any more. The last one frees the buffer."""
        self._users -= 1
        if not self._users:
            with contextlib.suppress(OSError):  # the result is not needed any more
                self.finish()


class _ShardRead(NamedTuple):
    """One shard of a read: ``shard`` has the values once ``read`` has ended."""

    read: _SpanRead
    shard: torch.Tensor
    sharded_param: PartitionedParameter  # kept alive, because reads are found by its id


class StagedShards:
    """The shards of one gather while they are staged in.

    Attributes:
        shards: the tensors that the collective sends, in the order of the gather.
        copies: copies to the device.
        reads: reads from disk into the buffers that the copies read.
    """

    __slots__ = ("_reader", "copies", "reads", "shards")

    def __init__(self, reader: ShardReader, shards: list[torch.Tensor]) -> None:
        self._reader, self.shards = reader, shards
        self.copies: list[Transfer] = []
        self.reads: list[_SpanRead] = []

    def copy_stream(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for the launch of the collective, which makes it run after the copies.

        On CUDA the context selects the stream of the copies. They have waited for all work that was launched before
        them. So the collective needs no other wait, and the current stream does not wait at all.
        """
        return self._reader.transfers.to_device_stream() if self.copies else contextlib.nullcontext()

    def release(self) -> None:
        """Release the buffers, because the collective has ended. On CUDA the current stream waits for the copies, the
        host does not."""
        for copy in self.copies:
            copy.wait()
        self._reader.retire(self.reads, self.copies)
        self.shards, self.copies, self.reads = [], [], []


class ShardReader:
    """Reader of offloaded shards, described in the module's docstring. Each rank reads for itself: nothing here is a
    collective.

    If the CPU computes, shards on the host need no copy: a gather sends them from where they are stored.
    """

    def __init__(self, placements: Placements, transfers: Transfers) -> None:
        self._device, self._separate_memory = placements.device, placements.separate_memory
        self.transfers = transfers
        self._ahead: dict[int, deque[_ShardRead]] = {}  # by id of the sharded_param, in the order of its gathers
        # Buffers from which a copy to the device may still read.
        self._retired: deque[tuple[list[Transfer], list[_SpanRead]]] = deque()
        reader_ref = weakref.ref(self)  # the placements may outlive this reader
        placements.on_drop_reads.append(lambda: _drop_reads(reader_ref))

    # ---------------------------------------------------------------- from disk

    def read_ahead(self, sharded_params: Iterable[PartitionedParameter]) -> None:
        """Begin to read the shards that are on disk, each for a later gather.

        A shard that no gather takes stays in memory until :meth:`drop_reads`.

        Args:
            sharded_params: owners of the shards, in the order of the gathers.
        """
        on_disk = [p for p in sharded_params if p.placement.location == DISK and p.shard.numel()]
        if on_disk:
            with undispatched():
                self._release_retired()
                self._read(on_disk)

    def _read(self, sharded_params: Sequence[PartitionedParameter]) -> None:
        shards = [sharded_param.shard for sharded_param in sharded_params]
        for span in tensor_spans(shards, SPAN_ALIGNMENT):
            offloaded, placement = span.memory(shards), sharded_params[span.indices[0]].placement
            buffer = self.transfers.pool.acquire(offloaded.numel(), offloaded.dtype, like=offloaded)
            transfer = self.transfers.stage_in(offloaded, placement, buffer)
            read = _SpanRead(self.transfers.pool, buffer, transfer, len(span.indices))
            for index, shard in span.views(shards, buffer).items():
                sharded_param = sharded_params[index]
                self._ahead.setdefault(id(sharded_param), deque()).append(_ShardRead(read, shard, sharded_param))

    def drop_reads(self) -> None:
        """Drop the reads ahead, because they are outdated or not needed."""
        if self._ahead:
            shard_reads = [shard_read for queue in self._ahead.values() for shard_read in queue]
            self._ahead.clear()
            with undispatched():
                for shard_read in shard_reads:
                    shard_read.read.release()

    def on_written(self, sharded_param: PartitionedParameter) -> None:
        """Drop the reads ahead, because a stored shard has been written as a tensor. Raises OSError if the disk
        fails."""
        self.drop_reads()
        if isinstance(sharded_param.placement, DiskPlacement):
            sharded_param.placement.file.drop_page_cache()

    def is_read_ahead(self, sharded_param: PartitionedParameter) -> bool:
        """Return True if the shard has been read for its next gather, or is being read."""
        return id(sharded_param) in self._ahead

    def _release_retired(self) -> None:
        """Release the buffers of all gathers but the last: by now the copies from them have ended."""
        while len(self._retired) > 1:
            copies, reads = self._retired.popleft()
            for copy in copies:
                copy.finish()
            for read in reads:
                read.release()

    # ---------------------------------------------------------------- to a gather

    def stage_in(
        self, sharded_params: Sequence[PartitionedParameter], fulls: Sequence[torch.Tensor] | None = None
    ) -> StagedShards:
        """Start to stage in the shards of a gather: onto the device, or into host memory if the CPU computes.

        Args:
            sharded_params: owners of the shards.
            fulls: memory of the full values, given if there is one rank. Its shards are copied there at once.

        Raises:
            OSError: the disk failed.
        """
        staged = StagedShards(self, [sharded_param.shard for sharded_param in sharded_params])
        shards, copies = staged.shards, staged.copies
        try:
            self.read_ahead(
                [sharded_param for sharded_param in sharded_params if not self.is_read_ahead(sharded_param)]
            )
            for index, sharded_param in enumerate(sharded_params):
                if self.is_read_ahead(sharded_param):
                    shard_read = self._ahead[id(sharded_param)].popleft()
                    if not self._ahead[id(sharded_param)]:
                        del self._ahead[id(sharded_param)]
                    staged.reads.append(shard_read.read)
                    shards[index] = shard_read.shard
            for read in staged.reads:
                read.wait()
            if fulls is not None:
                for index, full in enumerate(fulls):
                    if shards[index].numel():
                        copies.append(self.transfers.copy(shards[index], full))
                    shards[index] = full
            elif self._separate_memory:
                self._to_device(shards, sharded_params, copies)
        except BaseException as error:  # no copy may write into memory that is freed now
            EVENTS.append(f"raised {type(error).__name__} when it read parameters that are offloaded")
            for copy in copies:
                copy.finish()
            staged.release()
            raise
        return staged

    def _to_device(
        self, shards: list[torch.Tensor], sharded_params: Sequence[PartitionedParameter], copies: list[Transfer]
    ) -> None:
        """Replace offloaded ``shards`` by copies on the device, and add the transfers to ``copies``."""
        offloaded = [
            index for index, sharded_param in enumerate(sharded_params) if sharded_param.placement.location != DEVICE
        ]
        sources = [shards[index] for index in offloaded]
        for index in offloaded:
            if not shards[index].numel():
                shards[index] = shards[index].new_empty(0, device=self._device)
        for span in tensor_spans(sources, alignment=1):
            source = span.memory(sources)
            target = tag_memory(source.new_empty(span.numel, device=self._device), STAGING)
            copies.append(self.transfers.copy(source, target))
            for index, shard in span.views(sources, target).items():
                shards[offloaded[index]] = shard

    def write_back(self, shards: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Copy ``values``, on the device, into ``shards``, on the device or the host. The host waits for copies to the
        host."""
        if all(shard.device == value.device for shard, value in zip(shards, values, strict=True)):
            torch._foreach_copy_(list(shards), list(values))
            return
        for copy in [self.transfers.copy(value, shard) for shard, value in zip(shards, values, strict=True)]:
            copy.wait()

    def retire(self, reads: list[_SpanRead], copies: list[Transfer]) -> None:
        """Release the buffers of a gather that has ended, on CUDA later: its copies may still read them, and the host
        must not wait."""
        if self._separate_memory and reads:
            self._retired.append((copies, reads))
        else:
            for read in reads:
                read.release()


def _drop_reads(reader_ref: weakref.ref[ShardReader]) -> None:
    reader = reader_ref()
    if reader is not None:
        reader.drop_reads()
