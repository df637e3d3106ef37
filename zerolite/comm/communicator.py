"""Collectives over flat buckets; each returns a handle to wait for.

The input is a bucket of ``world_size`` equal parts; the algorithm depends on the backend. NCCL's own collectives are
fast. Gloo's reduce-scatter and all-gather are several times slower than its point-to-point messages. So there a gather
is an exchange of parts, and a reduce-scatter an exchange and a sum in rank order. That also sums 16-bit gradients in
fp32 at no extra traffic. See gloo.py and shared_memory.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from zerolite.comm import recorder
from zerolite.comm.flight_recorder import WAIT, FlightRecorder, Raw, ShardSize, collective, wait_for
from zerolite.comm.process_group import keep_track
from zerolite.comm.transport import DryTransport, Transport, Work
from zerolite.utils.accelerator import address
from zerolite.utils.memory_tags import BUCKETS, tag_memory


class Pending:
    """A collective in flight. It keeps all its tensors alive until :meth:`wait` has returned.

    NCCL reads and writes them on its own stream while Python goes on: memory that was freed before would be reused by
    other kernels. Because of this no ``record_stream`` is needed.

    Attributes:
        entry: the flight recorder's entry, for messages.
        call: the record of this collective, which learns of the wait; None if nothing recorded its launch.
    """

    call: recorder.CollectiveCall | None = None

    def __init__(
        self,
        works: Sequence[Work],
        keep: Sequence[torch.Tensor],
        finish: Callable[[], torch.Tensor] | None,
        result: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            works: handles of the launched operations.
            keep: tensors to keep alive.
            finish: makes the result when the works have ended; None if it is ``result``.
            result: the result, if nothing has to be done for it.
        """
        self._works = list(works)
        self._keep = list(keep)
        self._finish = finish
        self._result = result
        self.entry: Raw | None = None

    def arrived(self) -> bool:
        """Return True if nothing is left to wait for."""
        return all(work.is_completed() for work in self._works)

    def memory(self) -> Sequence[torch.Tensor]:
        """Return the tensors that are kept alive."""
        return self._keep

    def wait(self) -> torch.Tensor:
        """Wait and return the result. On CUDA the current stream waits, not the host. May be called again."""
        if self._finish is not None:
            if self.call is not None:
                recorder.note_wait(self.call)
            if self._works:
                wait_for(self._works, self.entry)
            if self._finish is not None:  # otherwise a signal's handler has waited meanwhile
                self._result = self._finish()
                self._works, self._keep, self._finish = [], [], None
        assert self._result is not None
        return self._result

    def wait_for_peers(self, deadline: float) -> None:
        """Wait on the host, also on CUDA, until what this rank sends and receives has arrived. :meth:`wait` is still
        called.

        Args:
            deadline: of ``time.monotonic()``, in seconds.

        Raises:
            RuntimeError: another rank has gone, or did not come in time. Nothing can be sent to it after that.
        """
        for work in tuple(self._works):
            if not WAIT.on_device:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
                continue
            work.wait()
            while not work.is_completed():  # NCCL would count a timeout of ``wait`` from the launch, and abort
                if time.monotonic() > deadline:
                    raise RuntimeError("timed out")
                time.sleep(0.001)


class Chained(Pending):
    """Two collectives, of which the second works on the result of the first.

    The second one is launched by :meth:`advance`, or else by the wait for the result.
    """

    def __init__(
        self, first: Pending, launch: Callable[[torch.Tensor], Pending], keep: Sequence[torch.Tensor] = ()
    ) -> None:
        """
        Args:
            first: the first collective, in flight.
            launch: launches the second one, with the result of the first.
            keep: tensors to keep alive beside those of both.
        """
        super().__init__((), keep, self._conclude)
        self._first, self._launch = first, launch
        self._second: Pending | None = None

    def advance(self) -> None:
        """Wait for the first collective and launch the second, unless that has been done."""
        if self._second is None:
            self._second = self._launch(self._first.wait())

    def _conclude(self) -> torch.Tensor:
        self.advance()
        assert self._second is not None
        return self._second.wait()

    def arrived(self) -> bool:
        return self._finish is None

    def wait_for_peers(self, deadline: float) -> None:
        (self._first if self._second is None else self._second).wait_for_peers(deadline)

    def memory(self) -> Sequence[torch.Tensor]:
        return [*super().memory(), *(self._first if self._second is None else self._second).memory()]


def done(result: torch.Tensor) -> Pending:
    """Return a handle of a collective that is complete already."""
    return Pending((), (), None, result)


def divide(tensor: torch.Tensor, divisor: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Divide the flat ``tensor`` in place, and return it, as ``dtype``. May be called again if it raises."""
    # First: without memory for the result nothing changes.
    result = None if dtype in (None, tensor.dtype) else empty(tensor.numel(), dtype or tensor.dtype, tensor)
    divided = tensor if divisor == 1.0 else tensor.div_(divisor)
    return divided if result is None else result.copy_(divided)


def empty(numel: int, dtype: torch.dtype, like: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """Return uninitialised memory for a collective, on ``device`` (default: the device of ``like``).

    It may be written to later, even if it is made inside torch.inference_mode(). It is a fake tensor if ``like`` is
    one.
    """
    with torch.inference_mode(False):
        return tag_memory(like.new_empty(numel, dtype=dtype, device=device), BUCKETS)


def empty_rows(count: int, like: torch.Tensor) -> torch.Tensor:
    """Return :func:`empty` of ``count`` rows as those of ``like``, or of ``count`` elements if that is flat."""
    return empty(count * like.shape[1:].numel(), like.dtype, like).view(count, *like.shape[1:])


def copy_elsewhere(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target``, unless that is the same memory."""
    if address(target) != address(source):
        target.copy_(source)


with torch.inference_mode(False):
    NOTHING = torch.empty(0, device="cpu")  # result of a collective over several tensors


@collective
class Communicator:
    """Collectives of one data-parallel group. This class itself is for a group of one process, where nothing is sent.

    All ranks pass tensors of the same length and dtype.

    Attributes:
        dimension: dimension of the grid of ranks, for the record: see :class:`~zerolite.comm.topology.Topology`.
        launches_at_once: a launch waits for no other rank.
    """

    dimension = "data"
    launches_at_once = True

    def __init__(self, transport: Transport | None = None) -> None:
        """
        Args:
            transport: moves the bytes; None for one process on its own.
        """
        self.transport = DryTransport(0, 1) if transport is None else transport
        self.rank, self.world_size = self.transport.rank, self.transport.world_size
        self.is_rank0 = transport is None or transport.is_rank0  # this is the job's first rank, which prints for all
        # A dry run: the other ranks are taken for copies of this one.
        self.is_dry = transport is not None and transport.is_dry
        self.flight_recorder = FlightRecorder()
        self._second: Communicator | None = None
        keep_track(self)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None without one, and after :meth:`close`."""
        return self.transport.group

    def members(self) -> list[int]:
        """Return the global ranks of the group; this rank alone without a process group."""
        return [self.rank] if self.group is None else dist.get_process_group_ranks(self.group)

    def close(self) -> None:
        """Drop the reference to the group, which is being destroyed, and close the communicator of :meth:`second`."""
        self.transport.close()
        if self._second is not None:
            self._second.close()

    def serve(self, dimension: str, is_rank0: bool) -> Communicator:
        """Set the dimension of the grid of ranks that this communicator serves. Returns the communicator."""
        self.dimension, self.is_rank0 = dimension, is_rank0
        return self

    def memory(self) -> Sequence[torch.Tensor]:
        """Return the memory that is kept between collectives."""
        return ()

    def second(self, backend: str) -> Communicator:
        """Return a communicator of the same ranks and kind over a second process group.

        The two have independent orders of collectives. It is this communicator itself if nothing has to be sent.
        """
        if self.world_size == 1:
            return self
        self._second = type(self)(self.transport.second(backend))
        return self._second

    def all_reduce(self, tensor: torch.Tensor, tag: str, divisor: float = 1.0, key: int = 0) -> Pending:
        """Sum over ranks divided by ``divisor``, in place. ``wait()`` returns the tensor.

        Args:
            key: says which tensor it is: see :class:`~zerolite.comm.flight_recorder.Entry`. The same in all methods
                below.
        """
        return self._launch("all_reduce", tensor, tag, key, self._all_reduce, tensor, tag, divisor)

    def all_reduce_max(self, tensor: torch.Tensor, tag: str) -> None:
        """Maximum over ranks of a small tensor, in place; it returns when the result is there."""
        if self.world_size > 1:
            self._launch("all_reduce", tensor, tag, 0, self._all_reduce_max, tensor).wait()

    def reduce_scatter(
        self, full: torch.Tensor, tag: str, divisor: float = 1.0, dtype: torch.dtype | None = None, key: int = 0
    ) -> Pending:
        """Sum ``full`` over ranks, divided by ``divisor``: ``wait()`` returns this rank's part, [numel / world_size].

        The result has the dtype ``dtype`` (default: the dtype of ``full``). If 16-bit values are summed in fp32, they
        are rounded once, to ``dtype``. ``full`` is overwritten.
        """
        start = self._reduce_scatter
        return self._launch("reduce_scatter", full, tag, key, start, full, tag, divisor, dtype or full.dtype)

    def all_to_all(self, full: torch.Tensor, tag: str, key: int = 0) -> Pending:
        """Send part ``i`` of ``full`` to rank ``i``: part ``i`` of the result, as long as ``full``, is what rank ``i``
        has sent here."""
        return self._launch("all_to_all", full, tag, key, self._all_to_all, full, tag)

    def permute(self, tensor: torch.Tensor, target: int, source: int, tag: str) -> Pending:
        """Send ``tensor`` to rank ``target``: ``wait()`` returns what rank ``source`` has sent here, as long a tensor.

        Each rank has one target and one source, which may be itself.

        Args:
            tensor: flat and contiguous, unchanged until ``wait()`` has returned.
        """
        moves = 0 if target == source else (target - self.rank) % self.world_size
        return self._launch("permute", tensor, tag, 0, self._permute, tensor, target, source, tag, moves=moves)

    def all_to_all_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], largest: int, tag: str
    ) -> Pending:
        """Send the first ``sent[0]`` rows to rank 0, the next ``sent[1]`` to rank 1, and so on: ``wait()`` returns the
        rows that the ranks have sent here, rank 0's first.

        Args:
            rows: [sum of ``sent``, columns], contiguous. All ranks pass as many columns and one dtype.
            received: number of rows that each rank sends here.
            largest: most rows that any rank sends to one; the same number on all ranks.
        """
        # The ranks send different numbers of rows, so the record has the columns, which are the same on all of them.
        start, columns = self._all_to_all_rows, rows.shape[1]
        return self._launch("all_to_all", rows, tag, 0, start, rows, sent, received, largest, tag, alike=columns)

    def all_gather(self, full: torch.Tensor, tag: str, key: int = 0) -> Pending:
        """Gather in place: this rank's part of ``full`` is sent, the other parts are received."""
        return self._launch("all_gather", full, tag, key, self._all_gather, full, tag)

    def gather_shards(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        tag: str,
        key: int = 0,
        lasting: Sequence[torch.Tensor] | None = None,
    ) -> Pending:
        """Gather several tensors in one launch: after ``wait()`` every ``fulls[i]`` is the concatenation of all ranks'
        ``shards[i]``.

        All ranks pass as many tensors of the same lengths and dtypes. The result of ``wait()`` means nothing. On one
        process ``fulls[i]`` may be ``shards[i]``, and is left alone then.

        Args:
            fulls: flat [world_size * numel of ``shards[i]``], contiguous; written to until ``wait()`` has returned.
            shards: flat, contiguous, not part of ``fulls[i]``, unchanged until then. A pair has one dtype; pairs may
                differ. Lengths may be 0.
            key: says which parameter is gathered. Over shared memory, ranks with different keys raise RuntimeError.
            lasting: ``shards``, or tensors like them, if they live on anyway. The flight recorder then keeps these, and
                otherwise it notes the sizes of ``shards``, which takes longer.
        """
        if self.world_size == 1:
            return self._gather_shards(fulls, shards, tag, key)
        call = None
        if recorder.active:
            call = recorder.note_gather(fulls, shards, tag, self.dimension, self.world_size, key)
        # As in _launch, but written out: stage 3 calls this for every layer, twice in a step, and a call costs time.
        entry: Raw = ("all_gather", tag, [ShardSize(s) for s in shards] if lasting is None else lasting, None, key)
        flight_recorder = self.flight_recorder
        flight_recorder.count += 1
        flight_recorder.latest.append(entry)
        pending = self._gather_shards(fulls, shards, tag, key)
        pending.entry = entry
        if call is not None:
            pending.call = call
        return pending

    def broadcast(self, tensor: torch.Tensor, tag: str, source: int = 0) -> None:
        """Overwrite ``tensor`` on every rank with the values of rank ``source`` of the group; it returns when this is
        done."""
        if self.world_size > 1:
            self._launch("broadcast", tensor, tag, 0, self._broadcast, tensor, source).wait()

    def shard(self, full: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return rank ``rank``'s shard of ``full`` (default: this rank's), as a view."""
        numel = full.numel() // self.world_size
        return full.narrow(0, (self.rank if rank is None else rank) * numel, numel)

    def _launch(
        self,
        op: str,
        tensor: torch.Tensor,
        tag: str,
        key: int,
        start: Callable[..., Pending],
        *arguments: object,
        moves: int = 0,
        alike: int | None = None,
    ) -> Pending:
        """Record a collective over ``tensor`` and launch it by ``start(*arguments)``.

        Args:
            alike: number of elements in the flight recorder; None: that of ``tensor``.
        """
        if self.world_size == 1:
            return start(*arguments)
        call = None
        if recorder.active:
            call = recorder.note(op, tensor, tag, self.dimension, self.world_size, key, moves)
        entry: Raw = (op, tag, tensor.numel() if alike is None else alike, tensor.dtype, key)
        flight_recorder = self.flight_recorder
        flight_recorder.count += 1
        flight_recorder.latest.append(entry)
        pending = start(*arguments)
        pending.entry = entry
        if call is not None:
            pending.call = call
        return pending

    def _all_reduce_max(self, tensor: torch.Tensor) -> Pending:
        return Pending((self.transport.all_reduce_max(tensor),), (tensor,), lambda: tensor)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        return Pending((self.transport.broadcast(tensor, source),), (tensor,), lambda: tensor)

    def _all_reduce(self, tensor: torch.Tensor, tag: str, divisor: float) -> Pending:
        return done(divide(tensor, divisor))

    def _reduce_scatter(self, full: torch.Tensor, tag: str, divisor: float, dtype: torch.dtype) -> Pending:
        return done(divide(full, divisor, dtype))

    def _all_to_all(self, full: torch.Tensor, tag: str) -> Pending:
        part = full.numel() // self.world_size
        parts = [part] * self.world_size
        return self._all_to_all_rows(full, parts, parts, part, tag)

    def _permute(self, tensor: torch.Tensor, target: int, source: int, tag: str) -> Pending:
        # Not two messages: NCCL would make a communicator for each pair of ranks.
        numel, ranks = tensor.numel(), range(self.world_size)
        received, sent = ([numel * (rank == peer) for rank in ranks] for peer in (source, target))
        return self._all_to_all_rows(tensor, sent, received, numel, tag)

    def _all_to_all_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], largest: int, tag: str
    ) -> Pending:
        """Exchange rows [rows, columns], or elements [elements]."""
        return done(rows)

    def _all_gather(self, full: torch.Tensor, tag: str) -> Pending:
        return done(full)

    def _gather_shards(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], tag: str, key: int
    ) -> Pending:
        for full, shard in zip(fulls, shards, strict=True):
            copy_elsewhere(full, shard)  # on one process a shard may be the full tensor itself
        return done(NOTHING)


class NativeCommunicator(Communicator):
    """The backend's own collectives (NCCL, and every other backend except gloo)."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        if transport.group is not None:
            WAIT.on_device = True

    def _all_reduce(self, tensor: torch.Tensor, tag: str, divisor: float) -> Pending:
        return Pending((self.transport.all_reduce(tensor),), (tensor,), lambda: divide(tensor, divisor))

    def _reduce_scatter(self, full: torch.Tensor, tag: str, divisor: float, dtype: torch.dtype) -> Pending:
        # `out` belongs to the current stream and is written by the communication stream. Pending keeps it alive until
        # wait() has ordered the two streams, so that the allocator cannot give its memory to another kernel.
        out = empty(full.numel() // self.world_size, full.dtype, full)
        work = self.transport.reduce_scatter(out, full)
        return Pending((work,), (full, out), lambda: divide(out, divisor, dtype))

    def _all_to_all(self, full: torch.Tensor, tag: str) -> Pending:
        out = empty(full.numel(), full.dtype, full)
        return Pending((self.transport.all_to_all(out, full, (), ()),), (full, out), lambda: out)

    def _all_to_all_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], largest: int, tag: str
    ) -> Pending:
        out = empty_rows(sum(received), rows)
        return Pending((self.transport.all_to_all(out, rows, received, sent),), (rows, out), lambda: out)

    def _all_gather(self, full: torch.Tensor, tag: str) -> Pending:
        return Pending((self.transport.all_gather(full, self.shard(full)),), (full,), lambda: full)

    def _gather_shards(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], tag: str, key: int
    ) -> Pending:
        if not fulls:
            return done(NOTHING)
        outputs, inputs = list(fulls), list(shards)
        if any(shard.dtype != inputs[0].dtype for shard in inputs):  # not every backend takes several dtypes at once
            outputs = [full.view(torch.uint8) for full in outputs]
            inputs = [shard.view(torch.uint8) for shard in inputs]
        work = self.transport.all_gather_several(outputs, inputs)
        return Pending((work,), (*fulls, *shards), lambda: NOTHING)
