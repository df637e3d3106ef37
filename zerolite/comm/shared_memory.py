"""Collectives between processes of one host through shared memory."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zerolite.comm.communicator import NOTHING, Pending, copy_elsewhere, divide, done, empty
from zerolite.comm.flight_recorder import BRANCH_ADVICE, WAIT, Mismatch, collective, wait_for
from zerolite.comm.gloo import GlooCommunicator, mean_in_order, pack, pack_offsets
from zerolite.comm.transport import Transport
from zerolite.utils.dtypes import HALF
from zerolite.utils.memory_tags import BUCKETS, tag_memory

_PAGE = 4096  # bytes
_SMALL = 4096  # sums of fewer elements use a lane of their own, so that they need not wait for large tensors

LOCK = threading.RLock()
"""Held by the thread that launches or ends a collective in shared memory, or ends a gather of updated parameters.

Any thread may end such a gather, by a read of a parameter, while another thread launches. And a handler of a signal may
read parameters in a thread that launches. So there is one lock for all: with two, threads could take them in both
orders, and wait for each other.
"""


class _Announcement(NamedTuple):
    """Operation that a rank is about to run, as far as it must be the same on all ranks.

    Attributes:
        op: such as "all_gather".
        tag: its purpose.
        nbytes: bytes in each region.
        detail: hash of everything else that must be equal.
    """

    op: str
    tag: str
    nbytes: int
    detail: int = 0

    def ticket(self, serial: int, count: int) -> list[int]:
        """Return three numbers and their negatives.

        The maximum over ranks equals every rank's own numbers only if all are equal. It also tells the shortest and
        longest length.
        """
        fingerprint = zlib.crc32(f"{self.op} {self.tag} {self.detail}".encode())
        place = (serial << 32) + count
        return [place, fingerprint, self.nbytes, -place, -fingerprint, -self.nbytes]


class _Lane:
    """Collectives that take turns in the same memory: two regions of each rank, mapped by all ranks of one host, which
    grow to the largest tensor.

    Why two: a rank that joins the fence of collective j has finished collective j - 1. So a rank that has passed fence
    j - 1 knows that all ranks have finished collective j - 2, whose region it may overwrite.

    Attributes:
        maps: memory of each rank, uint8 [2 * bytes of a region].
        count: turns so far.
        last: the latest collective, until it is finished.
        exhausted: a request for memory was refused. From then on some collectives take no turn.
    """

    def __init__(self, share_memory: Callable[[int, torch.Tensor], list[torch.Tensor]]) -> None:
        """share_memory: see :class:`~zerolite.comm.transport.Transport`."""
        self._share_memory: Callable[[int, torch.Tensor], list[torch.Tensor]] | None = share_memory
        self._bytes = 0  # of a region
        self.maps: list[torch.Tensor] = []
        self.count = 0
        self.last: Pending | None = None
        self.exhausted = False

    def close(self) -> None:
        """Drop the group and the memory."""
        self._share_memory, self.maps, self._bytes, self.last, self.exhausted = None, [], 0, None, True

    def holds(self, nbytes: int) -> bool:
        """Return True if the regions are that large already; the same answer on all ranks."""
        return nbytes <= self._bytes

    @collective
    def take_turn(self, nbytes: int, like: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the next region of every rank, as uint8 [nbytes] by rank; None on all ranks if there is no memory.

        Args:
            like: a tensor that will be copied there.
        """
        self.count += 1
        if not self.holds(nbytes) and not self._grow(nbytes, like):
            return None
        return [mapped.narrow(0, self.count % 2 * self._bytes, nbytes) for mapped in self.maps]

    def take_back(self, turn: Pending) -> None:
        """Take back a turn in which the ranks differ. They may have taken it in different lanes, and their counts stay
        equal for the collectives after the error."""
        if self.last is turn:
            self.count, self.last = self.count - 1, None

    def _grow(self, needed: int, like: torch.Tensor) -> bool:
        if self.exhausted or self._share_memory is None:
            return False
        region = -(-needed // _PAGE) * _PAGE
        maps = self._share_memory(2 * region, like)
        if not maps:
            self.exhausted = True
            return False
        self.maps, self._bytes = [tag_memory(mapped, BUCKETS) for mapped in maps], region
        return True


class _Turn(Pending):
    """A collective in flight in a lane."""

    def wait(self) -> torch.Tensor:
        with LOCK:
            return super().wait()


class SharedMemoryCommunicator(GlooCommunicator):
    """Gloo between processes of one host, with the payload in shared memory.

    A collective is a copy in, a fence (a small gloo all-reduce), and a sum or copy out of the peers' memory. It costs a
    quarter of the processor time of messages over the loopback interface. If memory runs out, all ranks fall back to
    messages.

    One collective of large tensors is in flight at a time, so a launch waits until the one before has arrived. A launch
    that needs larger memory than before waits for all ranks to launch it. So a rank whose next launch others wait for
    must not launch a second one here first: see ``Pending.arrived``.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._large, self._small = _Lane(transport.share_memory), _Lane(transport.share_memory)
        self._launched = 0  # tickets so far

    def close(self) -> None:
        super().close()
        self._large.close()
        self._small.close()

    def memory(self) -> Sequence[torch.Tensor]:
        return [*self._large.maps, *self._small.maps]

    def _exchange(
        self,
        lane: _Lane,
        launch: _Announcement,
        tensors: Sequence[torch.Tensor],
        copy_in: Callable[[torch.Tensor], object],
        finish: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> Pending | None:
        """Run one collective: ``copy_in(own region)``, a fence, ``finish(all ranks' regions)``.

        Regions are uint8 [launch.nbytes], and ``finish`` still uses ``tensors``. Returns None if shared memory has run
        out. Raises RuntimeError, here or when it is waited for, if another rank launches a different collective here.
        """
        if not launch.nbytes:  # nothing to share, and there may be no memory yet
            self._compare_now(launch, self._ticket(launch))
            return Pending((), tensors, lambda: finish([empty(0, torch.uint8, tensors[0])] * self.world_size))
        with LOCK:
            if lane.last is not None:
                lane.last.wait()
            if lane.exhausted and not lane.holds(launch.nbytes):
                return None
            ticket = self._ticket(launch)
            if not lane.holds(launch.nbytes):
                # All ranks make memory together, by collectives: first check that all of them launch this one.
                self._compare_now(launch, ticket)
            regions = lane.take_turn(launch.nbytes, tensors[0])
            if regions is None:
                return None
            try:
                copy_in(regions[self.rank])
            except BaseException:  # nothing is launched: the next launch takes this turn, and this number
                lane.count, self._launched = lane.count - 1, self._launched - 1
                raise
            fence, highest = self.transport.highest(ticket)

            def conclude() -> torch.Tensor:
                reached = highest()
                if reached != ticket:
                    lane.take_back(turn)
                self._compare(reached, ticket, launch)
                result = finish(regions)
                lane.last = None  # not before: what is not read yet may be overwritten two turns later
                return result

            lane.last = turn = _Turn((fence,), tensors, conclude)
            return turn

    def _ticket(self, launch: _Announcement) -> list[int]:
        self._launched += 1
        return launch.ticket(self.transport.serial, self._launched)

    def _compare_now(self, launch: _Announcement, ticket: list[int]) -> None:
        """Wait until all ranks are about to launch a collective. Raises RuntimeError if they differ."""
        fence, highest = self.transport.highest(ticket)
        wait_for([fence], (launch.op, launch.tag, launch.nbytes, torch.uint8, 0))
        self._compare(highest(), ticket, launch)

    def _compare(self, highest: list[int], ticket: list[int], launch: _Announcement) -> None:
        """Raise on every rank unless all tickets are equal, so that their maximum over ranks is this rank's own."""
        if highest == ticket:
            return
        shortest, longest = -highest[5], highest[2]
        error = Mismatch(
            f"rank {self.rank}: the ranks launched different collectives in the same place. Expected the same one "
            f"everywhere; here it is {launch.op} of {launch.nbytes} bytes for {launch.tag!r} (number "
            f"{ticket[0] & 0xFFFFFFFF} of communicator {self.transport.serial}), and over the ranks it has {shortest} "
            f"to {longest} bytes. Do branches that depend on the rank use different modules ({BRANCH_ADVICE}), or the "
            "backwards of two engines overlap?"
        )
        raise WAIT.explain(error) or error

    # gloo aborts the process if a message is longer than expected. So each of its messages here has the length of a
    # ticket, or follows a ticket that was equal on all ranks. (If shared memory runs out, gloo carries tensors too.)

    def _all_reduce(self, tensor: torch.Tensor, tag: str, divisor: float) -> Pending:
        # Each rank sums everything: up to four ranks that is no more work than two halves, and needs one fence.
        small = tensor.numel() < _SMALL
        if self.world_size > 4 and not small and tensor.dim() == 1 and tensor.numel() % self.world_size == 0:
            return super()._all_reduce(tensor, tag, divisor)
        flat = tensor.view(-1)

        def finish(regions: list[torch.Tensor]) -> torch.Tensor:
            if small and self.is_dry:  # in a dry run small values (statistics) are read: keep this rank's
                return divide(tensor, divisor)
            mean_in_order([region.view(flat.dtype) for region in regions], divisor, flat)
            return tensor

        pending = self._exchange_whole(_Announcement("all_reduce", tag, _bytes(tensor)), flat, finish)
        return pending or super()._all_reduce(tensor, tag, divisor)

    def _all_reduce_max(self, tensor: torch.Tensor) -> Pending:
        flat = tensor.view(-1)

        def finish(regions: list[torch.Tensor]) -> torch.Tensor:
            for region in () if self.is_dry else regions:
                torch.maximum(flat, region.view(flat.dtype), out=flat)
            return tensor

        pending = self._exchange_whole(_Announcement("all_reduce_max", "", _bytes(tensor)), flat, finish)
        return pending or super()._all_reduce_max(tensor)

    def _exchange_whole(
        self, launch: _Announcement, flat: torch.Tensor, finish: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> Pending | None:
        """Exchange all of ``flat`` [n] from every rank to every rank."""
        lane = self._small if flat.numel() < _SMALL else self._large
        return self._exchange(lane, launch, (flat,), lambda region: region.view(flat.dtype).copy_(flat), finish)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        launch = _Announcement("broadcast", "", _bytes(tensor), source)
        self._compare_now(launch, self._ticket(launch))
        return super()._broadcast(tensor, source)

    def _reduce_scatter(self, full: torch.Tensor, tag: str, divisor: float, dtype: torch.dtype) -> Pending:
        def copy_in(region: torch.Tensor) -> None:
            target = region.view(full.dtype)
            for peer in self._peers:
                self.shard(target, peer).copy_(self.shard(full, peer))

        def finish(regions: list[torch.Tensor]) -> torch.Tensor:
            parts = [self.shard(region.view(full.dtype)) for region in regions]
            parts[self.rank] = self.shard(full)
            exact = full.dtype if full.dtype not in HALF or dtype in HALF else torch.float32
            return tag_memory(mean_in_order(parts, divisor, empty(parts[0].numel(), exact, full)).to(dtype), BUCKETS)

        pending = self._exchange(
            self._large, _Announcement("reduce_scatter", tag, _bytes(full)), (full,), copy_in, finish
        )
        return pending or super()._reduce_scatter(full, tag, divisor, dtype)

    def _all_to_all(self, full: torch.Tensor, tag: str) -> Pending:
        def finish(regions: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([self.shard(region.view(full.dtype)) for region in regions])

        pending = self._exchange_whole(_Announcement("all_to_all", tag, _bytes(full)), full, finish)
        return pending or super()._all_to_all(full, tag)

    def _all_to_all_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], largest: int, tag: str
    ) -> Pending:
        if not largest:
            return done(rows)  # every rank knows that nothing travels
        parts, columns = rows.split(list(sent)), rows.shape[1:]
        width = columns.numel() * rows.element_size()
        # A power of two, so that the memory grows a few times and not with every larger number of rows.
        room = 1 << max(largest * width - 1, _PAGE - 1).bit_length()

        def part_of(region: torch.Tensor, peer: int, count: int) -> torch.Tensor:
            return region.narrow(0, peer * room, count * width).view(rows.dtype).view(count, *columns)

        def copy_in(region: torch.Tensor) -> None:
            for peer in self._peers:
                part_of(region, peer, sent[peer]).copy_(parts[peer])

        def finish(regions: list[torch.Tensor]) -> torch.Tensor:
            arrived = [part_of(region, self.rank, count) for region, count in zip(regions, received, strict=True)]
            arrived[self.rank] = parts[self.rank]
            return torch.cat(arrived)

        launch = _Announcement("all_to_all_rows", tag, self.world_size * room, width)
        pending = self._exchange(self._large, launch, (rows,), copy_in, finish)
        return pending or super()._all_to_all_rows(rows, sent, received, largest, tag)

    def _permute(self, tensor: torch.Tensor, target: int, source: int, tag: str) -> Pending:
        def finish(regions: list[torch.Tensor]) -> torch.Tensor:
            return tensor if source == self.rank else regions[source].view(tensor.dtype).clone()

        pending = self._exchange_whole(_Announcement("permute", tag, _bytes(tensor)), tensor, finish)
        return pending or super()._permute(tensor, target, source, tag)

    def _gather_shards(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], tag: str, key: int
    ) -> Pending:
        starts, total = pack_offsets(shards)
        if total == 0:
            return done(NOTHING)

        def finish(regions: list[torch.Tensor]) -> torch.Tensor:
            for full, shard, start in zip(fulls, shards, starts, strict=True):
                numel, nbytes, dtype = shard.numel(), _bytes(shard), shard.dtype
                for peer, region in enumerate(regions):
                    sent = shard if peer == self.rank else region.narrow(0, start, nbytes).view(dtype)
                    copy_elsewhere(full.narrow(0, peer * numel, numel), sent)
            return fulls[0]

        # The hash of integers is the same in every process; only strings are salted.
        launch = _Announcement("all_gather", tag, total, hash((key, *starts)))
        pending = self._exchange(
            self._large, launch, (*fulls, *shards), lambda region: pack(region, shards, starts), finish
        )
        return pending or super()._gather_shards(fulls, shards, tag, key)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
