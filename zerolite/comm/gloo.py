"""Collectives built from gloo's point-to-point messages."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from zerolite.comm.communicator import (
    NOTHING,
    Chained,
    Communicator,
    Pending,
    copy_elsewhere,
    divide,
    done,
    empty,
    empty_rows,
)
from zerolite.comm.transport import Transport
from zerolite.utils.accelerator import is_fake
from zerolite.utils.dtypes import HALF
from zerolite.utils.memory_tags import BUCKETS, tag_memory

_CHUNK = 1 << 16  # elements summed at once in fp32, so that the fp32 copy stays in the processor's cache
_LINE = 64  # bytes to which tensors in one message are aligned
_NUMBER_BITS, _KIND_BITS = 12, 19  # of a message's tag, which has 31 bits in gloo
_PACKED = 1 << 16  # bytes up to which several tensors are sent as one message: a copy is cheaper than a message


class GlooCommunicator(Communicator):
    """Exchanges over gloo's point-to-point messages.

    Every rank adds in rank order, so that all stages give the same bits at any world size. A sum in another order would
    round differently. Messages of different collectives have different tags; a pair of ranks may have several in
    flight.
    """

    launches_at_once = False  # an all-reduce waits for the first half of the one before it

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._peers = [peer for peer in range(self.world_size) if peer != self.rank]
        self._number = 0
        self._half: Chained | None = None  # an all-reduce made of two collectives, of which one is launched

    def _next_tag(self, op: str, tag: str, nbytes: int, key: int = 0) -> int:
        """Return the tag of one collective's messages: its number, and a hash of its kind and size.

        Messages of different collectives never match. So ranks that diverge wait for each other, and the watchdog
        explains it; they do not exchange wrong data.
        """
        if self._half is not None:
            # Ranks may wait for the all-reduce at different times, but its second half must get the same number on all
            # of them. So it is launched before the next collective, at the latest.
            self._half.advance()
        self._number = (self._number + 1) % (1 << _NUMBER_BITS)
        fingerprint = zlib.crc32(f"{op} {tag} {nbytes} {key}".encode()) >> (32 - _KIND_BITS)
        return fingerprint << _NUMBER_BITS | self._number

    def _all_reduce(self, tensor: torch.Tensor, tag: str, divisor: float) -> Pending:
        # The sum of two terms does not depend on their order. So at two ranks gloo's own algorithm gives the same bits
        # as the exchange, except in 16 bits, where the exchange divides before it rounds. Lengths that cannot be
        # divided into equal parts use it too: only small tensors have them.
        divisible = tensor.dim() == 1 and tensor.numel() % self.world_size == 0
        if not divisible or (self.world_size == 2 and tensor.dtype not in HALF):
            return Pending((self.transport.all_reduce(tensor),), (tensor,), lambda: divide(tensor, divisor))

        def gather(part: torch.Tensor) -> Pending:
            self._half = None
            self.shard(tensor).copy_(part)
            return self._all_gather(tensor, tag)

        self._half = Chained(self._reduce_scatter(tensor, tag, divisor, tensor.dtype), gather, (tensor,))
        return self._half

    def _reduce_scatter(self, full: torch.Tensor, tag: str, divisor: float, dtype: torch.dtype) -> Pending:
        sent = full.cpu()  # gloo sends from host memory; this copies nothing for CPU tensors
        received = {peer: empty(full.numel() // self.world_size, full.dtype, sent) for peer in self._peers}
        number = self._next_tag("reduce_scatter", tag, full.numel() * full.element_size())
        works = [self.transport.receive(received[peer], peer, number) for peer in self._peers]
        works += [self.transport.send(self.shard(sent, peer), peer, number) for peer in self._peers]

        def finish() -> torch.Tensor:
            # The first received tensor is written to no more: the sum goes there, which saves an allocation.
            out = received[1 if self.rank == 0 else 0]
            # What may fail behind the sum, or within one of chunks in 16 bits, must find the parts as they were.
            if full.dtype in HALF or dtype != full.dtype or sent is not full:
                exact = full.dtype if full.dtype not in HALF or dtype in HALF else torch.float32
                out = empty(out.numel(), exact, sent)
            received[self.rank] = self.shard(sent)
            parts = [received[peer] for peer in range(self.world_size)]
            return tag_memory(mean_in_order(parts, divisor, out).to(device=full.device, dtype=dtype), BUCKETS)

        return Pending(works, (full, sent, *received.values()), finish)

    def _all_to_all_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], largest: int, tag: str
    ) -> Pending:
        host = rows.cpu()
        out = empty_rows(sum(received), host)
        parts, places = host.split(list(sent)), out.split(list(received))
        places[self.rank].copy_(parts[self.rank])
        number = self._next_tag("all_to_all", tag, largest * rows.shape[1:].numel() * rows.element_size())
        # An empty message is not sent: both ranks know its length.
        works = [self.transport.receive(places[peer], peer, number) for peer in self._peers if received[peer]]
        works += [self.transport.send(parts[peer], peer, number) for peer in self._peers if sent[peer]]
        return Pending(works, (rows, host, out), lambda: out.to(rows.device))

    def _all_gather(self, full: torch.Tensor, tag: str) -> Pending:
        return self._gather_shards([full], [self.shard(full)], tag, 0)

    def _gather_shards(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], tag: str, key: int
    ) -> Pending:
        _, total = pack_offsets(shards)
        if total == 0:
            return done(NOTHING)
        if total <= _PACKED or shards[0].device.type != "cpu":
            number = self._next_tag("all_gather", tag, total, key)
            return self._gather_packed(fulls, shards, number)
        works = []
        for full, shard in zip(fulls, shards, strict=True):
            numel = shard.numel()
            if numel == 0:
                continue
            number = self._next_tag("all_gather", tag, numel * shard.element_size(), key)
            works += [self.transport.receive(full.narrow(0, peer * numel, numel), peer, number) for peer in self._peers]
            works += [self.transport.send(shard, peer, number) for peer in self._peers]

        def finish() -> torch.Tensor:
            for full, shard in zip(fulls, shards, strict=True):
                copy_elsewhere(self.shard(full), shard)
            return fulls[0]

        return Pending(works, (*fulls, *shards), finish)

    def _gather_packed(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], number: int) -> Pending:
        """Send all tensors in one message for each pair of ranks, with the tag ``number``."""
        starts, total = pack_offsets(shards)
        device = shards[0].device
        rows = empty(self.world_size * total, torch.uint8, shards[0], "cpu").view(self.world_size, total)
        row = rows[self.rank] if device.type == "cpu" else empty(total, torch.uint8, shards[0])
        pack(row, shards, starts)
        if device.type != "cpu":
            rows[self.rank].copy_(row)
        works = [self.transport.receive(rows[peer], peer, number) for peer in self._peers]
        works += [self.transport.send(rows[self.rank], peer, number) for peer in self._peers]

        def finish() -> torch.Tensor:
            arrived = tag_memory(rows.to(device), BUCKETS)
            for full, shard, start in zip(fulls, shards, starts, strict=True):
                if numel := shard.numel():
                    columns = arrived.narrow(1, start, numel * shard.element_size()).view(shard.dtype)
                    full.view(self.world_size, numel).copy_(columns)
            return fulls[0]

        return Pending(works, (rows, *fulls, *shards), finish)


def pack_offsets(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor in a row of bytes, a multiple of 64, and the length of the row."""
    starts, total = [], 0
    for tensor in tensors:
        starts.append(total)
        total += (tensor.numel() * tensor.element_size() + _LINE - 1) // _LINE * _LINE
    return starts, total


def pack(row: torch.Tensor, tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
    """Copy ``tensors`` into ``row`` (uint8) at the offsets ``starts``."""
    for tensor, start in zip(tensors, starts, strict=True):
        row.narrow(0, start, tensor.numel() * tensor.element_size()).view(tensor.dtype).copy_(tensor)


def mean_in_order(parts: list[torch.Tensor], divisor: float, out: torch.Tensor) -> torch.Tensor:
    """Add ``parts`` from rank 0 upwards, divide, and write into ``out``, which may be one of them if it has their
    dtype.

    16-bit parts are added and divided in fp32, a chunk at a time, and rounded once, to the dtype of ``out``.
    """
    if parts[0].dtype not in HALF:
        # `out` may be the memory of the first or second part: both are read in this first addition.
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return divide(out, divisor)
    starts = range(0, out.numel(), _CHUNK)
    for start in starts[:1] if is_fake(out) else starts:  # a dry run has no values: one chunk shows the memory
        total = tag_memory(parts[0][start : start + _CHUNK].float(), BUCKETS)
        for part in parts[1:]:
            total.add_(part[start : start + _CHUNK])
        out[start : start + _CHUNK].copy_(divide(total, divisor))
    return out
