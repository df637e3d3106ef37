"""Prefetch and staging of offloaded shards for all-gathers.

Shards on disk are read into host memory first: ahead of the gather if it is announced in time
(:meth:`ShardReader.read_ahead`), otherwise when the gather is launched. From the host, one copy brings all shards that
are neighbours in memory to the device, beside the device's work. The collective comes after it, so waiting for the
collective is waiting for the copy.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from zerolite.offload.placements import SPAN_ALIGNMENT, DiskPlacement, Placement, Placements, Transfer
from zerolite.offload.transfers import Staged, StagingPool, Transfers
from zerolite.utils.accelerator import undispatched
from zerolite.utils.memory_tags import DEVICE, DISK, STAGING, tag_memory


class OffloadedTensor(Protocol):
    """The part of :class:`zerolite.zero.stage3.partitioned_parameter.PartitionedParameter` that the reader uses."""

    shard: torch.Tensor
    placement: Placement


class TensorSpan(NamedTuple):
    """Tensors that lie next to each other in the same memory. ``indices``: of them; ``start``: the first element in
    the memory."""

    indices: list[int]
    start: int
    numel: int


def spans(tensors: Sequence[torch.Tensor], alignment: int) -> list[TensorSpan]:
    """``tensors``, flat and apart from each other, in spans that begin at multiples of ``alignment`` elements of their
    memory. Between two of a span there is so little that to move it costs less than to move both by themselves. Empty
    ones are in none."""
    by_memory: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            by_memory.setdefault(tensor.untyped_storage()._cdata, []).append(index)
    found: list[TensorSpan] = []
    for indices in by_memory.values():
        together: list[int] = []
        start = end = 0
        for offset, index in sorted((int(tensors[index].storage_offset()), index) for index in indices):
            if together and offset - end >= SPAN_ALIGNMENT:
                found.append(TensorSpan(together, start, end - start))
                together = []
            if not together:
                start = offset // alignment * alignment
            together = [*together, index]
            end = offset + tensors[index].numel()
        found.append(TensorSpan(together, start, end - start))
    return found


def cover(span: TensorSpan, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The memory of ``span``, flat."""
    return tensors[span.indices[0]].as_strided((span.numel,), (1,), span.start)


def places(span: TensorSpan, tensors: Sequence[torch.Tensor], copied: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return by index where the tensors of ``span`` are in ``copied``, a copy of its memory."""
    return {
        index: copied.narrow(0, tensors[index].storage_offset() - span.start, tensors[index].numel())
        for index in span.indices
    }


class _Read(Staged):
    """A span of a disk that is, or is being, read into memory of the host."""

    def __init__(self, pool: StagingPool, buffer: torch.Tensor, transfer: Transfer, users: int) -> None:
        """users: shards that are not done with."""
        super().__init__(pool, buffer, transfer)
        self._users = users

    def release(self) -> None:
        """One user is done."""
        self._users -= 1
        if not self._users:
            with contextlib.suppress(OSError):  # the result is not needed any more
                self.finish()


class _Place(NamedTuple):
    """Location of a member's shard, once ``read`` has ended."""

    read: _Read
    shard: torch.Tensor
    member: OffloadedTensor  # kept alive


class Arrival:
    """The shards of one gather, being staged in. ``shards``: where the collective takes them from, in the order of the
    members."""

    __slots__ = ("_reader", "copies", "reads", "shards")

    def __init__(self, reader: ShardReader, shards: list[torch.Tensor]) -> None:
        self._reader, self.shards = reader, shards
        self.copies: list[Transfer] = []
        self.reads: list[_Read] = []

    def behind_copies(self) -> contextlib.AbstractContextManager[Any]:
        """Surround the launch of the collective. On CUDA it begins when the copies have ended, which have begun when
        all had that was launched before them; the current stream does not wait."""
        return self._reader.transfers.arriving() if self.copies else contextlib.nullcontext()

    def end(self) -> None:
        """The collective has ended. On CUDA the current stream waits for the copies, not the host."""
        for copy in self.copies:
            copy.wait()
        self._reader.retire(self.reads, self.copies)
        self.shards, self.copies, self.reads = [], [], []


class ShardReader:
    """See the module. Each rank reads for itself: nothing here is a collective. Where the CPU computes, a shard on the
    host is there already; a gather takes it from where it is.
    """

    def __init__(self, placements: Placements, transfers: Transfers) -> None:
        self._device, self._apart, self.transfers = placements.device, placements.apart, transfers
        self._ahead: dict[int, deque[_Place]] = {}  # by id of the member, in the order of its gathers
        # Buffers from which a copy to the device may still be under way.
        self._retired: deque[tuple[list[Transfer], list[_Read]]] = deque()
        known = weakref.ref(self)
        placements.on_written.append(lambda: _forget(known))

    # ---------------------------------------------------------------- from disk

    def read_ahead(self, members: Iterable[OffloadedTensor]) -> None:
        """Begin to read the shards that are on disk, each for a later gather, in the order of the gathers. A shard that
        is read and never gathered stays in memory until :meth:`forget`."""
        wanted = [m for m in members if m.placement.place == DISK and m.shard.numel()]
        if wanted:
            with undispatched():
                self._collect_buffers()
                self._read(wanted)

    def _read(self, wanted: Sequence[OffloadedTensor]) -> None:
        shards = [member.shard for member in wanted]
        for span in spans(shards, SPAN_ALIGNMENT):
            offloaded, placement = cover(span, shards), wanted[span.indices[0]].placement
            buffer = self.transfers.pool.take(offloaded.numel(), offloaded.dtype, like=offloaded)
            transfer = self.transfers.stage_in(offloaded, placement, buffer)
            read = _Read(self.transfers.pool, buffer, transfer, len(span.indices))
            for index, place in places(span, shards, buffer).items():
                member = wanted[index]
                self._ahead.setdefault(id(member), deque()).append(_Place(read, place, member))

    def forget(self) -> None:
        """Drop reads ahead, which are outdated or not needed."""
        if self._ahead:
            found = [place for several in self._ahead.values() for place in several]
            self._ahead.clear()
            with undispatched():
                for place in found:
                    place.read.release()

    def on_written(self, member: OffloadedTensor) -> None:
        """Drop what was read ahead: a shard has been written where it is stored. Raises OSError if the disk fails."""
        self.forget()
        if isinstance(member.placement, DiskPlacement):
            member.placement.file.forget_cached()

    def is_ahead(self, member: OffloadedTensor) -> bool:
        """True if the shard has been read for its next gather, or is being read."""
        return id(member) in self._ahead

    def _collect_buffers(self) -> None:
        """Release the buffers of all gathers but the last: by now the copies from them have ended."""
        while len(self._retired) > 1:
            copies, reads = self._retired.popleft()
            for copy in copies:
                copy.finish()
            for read in reads:
                read.release()

    # ---------------------------------------------------------------- to a gather

    def stage_in(self, members: Sequence[OffloadedTensor], fulls: Sequence[torch.Tensor] | None = None) -> Arrival:
        """Start to stage in the shards of ``members`` for a gather: onto the device, or into memory where that is the
        CPU. Raises OSError if the disk fails.

        fulls: whole values; given where there is one rank alone, whose shards go there at once.
        """
        arrival = Arrival(self, [member.shard for member in members])
        shards, copies = arrival.shards, arrival.copies
        try:
            self.read_ahead([member for member in members if not self.is_ahead(member)])
            for index, member in enumerate(members):
                if self.is_ahead(member):
                    place = self._ahead[id(member)].popleft()
                    if not self._ahead[id(member)]:
                        del self._ahead[id(member)]
                    arrival.reads.append(place.read)
                    shards[index] = place.shard
            for read in arrival.reads:
                read.wait()
            if fulls is not None:
                for index, full in enumerate(fulls):
                    if shards[index].numel():
                        copies.append(self.transfers.copy(shards[index], full))
                    shards[index] = full
            elif self._apart:
                self._to_device(shards, members, copies)
        except BaseException:  # nothing may be copied into memory that is freed now
            for copy in copies:
                copy.finish()
            arrival.end()
            raise
        return arrival

    def _to_device(
        self, shards: list[torch.Tensor], members: Sequence[OffloadedTensor], copies: list[Transfer]
    ) -> None:
        """Put copies in the place of those that are not there; what to wait for is added to ``copies``."""
        away = [index for index, member in enumerate(members) if member.placement.place != DEVICE]
        sources = [shards[index] for index in away]
        for index in away:
            if not shards[index].numel():
                shards[index] = shards[index].new_empty(0, device=self._device)
        for span in spans(sources, alignment=1):
            source = cover(span, sources)
            target = tag_memory(source.new_empty(span.numel, device=self._device), STAGING)
            copies.append(self.transfers.copy(source, target))
            for index, place in places(span, sources, target).items():
                shards[away[index]] = place

    def write_back(self, shards: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Copy ``parts``, on the device, into ``shards``, on the host or there too; the host waits for its own."""
        if all(shard.device == part.device for shard, part in zip(shards, parts, strict=True)):
            torch._foreach_copy_(list(shards), list(parts))
            return
        for copy in [self.transfers.copy(part, shard) for shard, part in zip(shards, parts, strict=True)]:
            copy.wait()

    def retire(self, reads: list[_Read], copies: list[Transfer]) -> None:
        """A gather has ended; on CUDA its copies may be under way still."""
        if self._apart and reads:
            self._retired.append((copies, reads))
        else:
            for read in reads:
                read.release()


def _forget(known: weakref.ref[ShardReader]) -> None:
    reader = known()
    if reader is not None:
        reader.forget()
