"""Collectives over flat buckets; each returns a handle to wait for.

A bucket of ``world_size`` equal parts goes in; the algorithm depends on the backend. NCCL has the collectives in
hardware. Gloo's own reduce-scatter and all-gather are several times slower than its point-to-point messages, so
there a reduce-scatter is an exchange of parts and a sum in rank order (which also lets 16-bit gradients be summed
in fp32 at no extra traffic), and a gather is an exchange: see gloo.py and shared_memory.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol

import torch
import torch.distributed as dist

from zerolite.comm import recorder
from zerolite.comm.flight_recorder import WAIT, FlightRecorder, Raw, wait_for
from zerolite.comm.process_group import keep_track
from zerolite.comm.transport import DryTransport, Work
from zerolite.utils.accelerator import address
from zerolite.utils.memory_tags import BUCKETS, tag_memory

Arguments = ParamSpec("Arguments")


class Pending:
    """A collective in flight. Holds every tensor of it alive until :meth:`wait` has returned."""

    def __init__(
        self,
        works: Sequence[Work],
        keep: Sequence[torch.Tensor],
        finish: Callable[[], torch.Tensor] | None,
        result: torch.Tensor | None = None,
    ) -> None:
        """finish: makes the result when the works have ended; None: it is ``result``."""
        self._works = list(works)
        self._keep = list(keep)
        self._finish = finish
        self._result = result
        self.entry: Raw | None = None  # what it is, for messages

    def arrived(self) -> bool:
        """True if nothing has to be waited for any more."""
        return all(work.is_completed() for work in self._works)

    def memory(self) -> Sequence[torch.Tensor]:
        """The tensors that it keeps alive."""
        return self._keep

    def wait(self) -> torch.Tensor:
        """The result. On CUDA the current stream waits, not the host. May be called again."""
        if self._finish is not None:
            if self._works:
                wait_for(self._works, self.entry)
            self._result = self._finish()
            self._works, self._keep, self._finish = [], [], None
        assert self._result is not None
        return self._result


def done(result: torch.Tensor) -> Pending:
    """A collective for which nothing has to be waited."""
    return Pending((), (), None, result)


def divide(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    """``tensor``, divided in place."""
    return tensor if divisor == 1.0 else tensor.div_(divisor)


def empty(numel: int, dtype: torch.dtype, like: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """Uninitialised room for collectives on ``device`` (default: that of ``like``), which may be written to later, also
    if it is asked for inside torch.inference_mode(). A fake tensor if ``like`` is one, whatever modes are active."""
    with torch.inference_mode(False):
        return tag_memory(like.new_empty(numel, dtype=dtype, device=device), BUCKETS)


with torch.inference_mode(False):
    NOTHING = torch.empty(0, device="cpu")  # what waiting for several tensors gives


class Watcher(Protocol):
    """Observer of every collective of a communicator: to compare, count or time it."""

    def launch(self, entry: Raw, start: Callable[[], Pending], at_once: bool) -> Pending:
        """Launch the collective by ``start()``, called once; returns what that gave, or a Pending that waits for it.

        Args:
            entry: what it is, as an :class:`~zerolite.comm.flight_recorder.Entry` by position.
            at_once: the caller waits for it as soon as it is launched.
        """
        ...


class Communicator:
    """Collectives of one data-parallel group. This class is the one of a group of one process: nothing to send.

    All methods are called on all ranks of the group, in the same order, with tensors of the same length and dtype.

    Attributes:
        dimension: of the grid of ranks, for the record: see :class:`~zerolite.comm.topology.Topology`.
    """

    dimension = "data"

    def __init__(self, transport: DryTransport | None = None) -> None:
        """transport: what the collectives go over; none for one process on its own."""
        self.transport: DryTransport = DryTransport(0, 1) if transport is None else transport
        self.rank, self.world_size = self.transport.rank, self.transport.world_size
        self.main = transport is None or transport.main  # whether this is the job's first rank, which speaks for all
        # Whether the others are taken for copies of this rank.
        self.peers_agree = transport is not None and transport.peers_agree
        self._guard: Callable[[str], None] | None = None
        self.flight_recorder = FlightRecorder()
        self._watchers: tuple[Watcher, ...] = ()
        self._second: Communicator | None = None
        keep_track(self)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, None where there is none and once closed."""
        return self.transport.group

    def members(self) -> list[int]:
        """Its ranks as numbers among all processes; its own alone where there is no process group."""
        return [self.rank] if self.group is None else dist.get_process_group_ranks(self.group)

    def close(self) -> None:
        """Let go of the group, which is being destroyed, and close what :meth:`second` gave."""
        self.transport.close()
        if self._second is not None:
            self._second.close()

    def watch(self, watcher: Watcher) -> None:
        """Give every collective to ``watcher`` from now on, inside those that watch already."""
        self._watchers = (*self._watchers, watcher)

    def guard_with(self, guard: Callable[[str], None] | None) -> None:
        """Call ``guard`` with its name before every collective from now on; None: call nothing."""
        self._guard = guard

    def serve(self, dimension: str, main: bool) -> Communicator:
        """Be the communicator of a dimension of the grid of ranks. Returns this communicator."""
        self.dimension, self.main = dimension, main
        return self

    def memory(self) -> Sequence[torch.Tensor]:
        """Return the memory that is kept between collectives."""
        return ()

    def second(self, backend: str) -> Communicator:
        """A communicator of the same ranks and kind over another process group, with an order of collectives of its
        own; this one where nothing has to be sent. Called on all ranks of the group."""
        return self

    def staging(self, numel: int, dtype: torch.dtype, ahead: int) -> torch.Tensor | None:
        """Memory [numel] from which the collective after the next ``ahead`` ones sends without a copy; None if
        there is none.

        The caller that takes it must launch that very reduce-scatter with it.
        """
        return None

    def all_reduce(self, tensor: torch.Tensor, tag: str, divisor: float = 1.0, key: int = 0) -> Pending:
        """Sum over ranks divided by ``divisor``, in place. ``wait()`` gives the tensor. ``key`` says what it is, here
        and below: see :class:`~zerolite.comm.flight_recorder.Entry`."""
        return self._launch("all_reduce", tensor, tag, key, self._all_reduce, tensor, tag, divisor)

    def all_reduce_max(self, tensor: torch.Tensor, tag: str) -> None:
        """Maximum over ranks of a small tensor, in place; returns when it is there."""
        if self.world_size > 1:
            self._launch("all_reduce", tensor, tag, 0, self._all_reduce_max, tensor, at_once=True).wait()

    def reduce_scatter(
        self, full: torch.Tensor, tag: str, divisor: float = 1.0, dtype: torch.dtype | None = None, key: int = 0
    ) -> Pending:
        """``wait()`` gives the sum over ranks of this rank's part of ``full``, divided by ``divisor``; shape [numel
        / world_size], in ``dtype`` (default: ``full``'s). Where 16-bit values are summed in fp32, they are rounded
        to ``dtype`` only. ``full`` is clobbered.
        """
        start = self._reduce_scatter
        return self._launch("reduce_scatter", full, tag, key, start, full, tag, divisor, dtype or full.dtype)

    def all_gather(self, full: torch.Tensor, tag: str, key: int = 0) -> Pending:
        """In place: this rank's part of ``full`` is sent, the other parts are received."""
        return self._launch("all_gather", full, tag, key, self._all_gather, full, tag)

    def gather_shards(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        tag: str,
        key: int = 0,
        lasting: Sequence[torch.Tensor] | None = None,
    ) -> Pending:
        """One launch for several tensors: after ``wait()`` every ``fulls[i]`` is the concatenation of all ranks'
        ``shards[i]``. What ``wait()`` gives means nothing.

        ``fulls[i]``: flat [world_size * numel of ``shards[i]``], contiguous, written to until ``wait()`` has
        returned. ``shards[i]``: flat, contiguous, not part of ``fulls[i]``, unchanged until then. A pair has one
        dtype, which may differ from pair to pair. Lengths may be 0. ``key`` says what is gathered: where ranks
        compare what they launch (shared memory), those with different keys raise RuntimeError. ``lasting``: what the
        record of collectives keeps instead of ``shards``, where these are copies for this launch.

        On one process ``fulls[i]`` may be ``shards[i]``, and is left alone then. Called on all ranks, in the same
        order, with as many tensors of the same lengths and dtypes.
        """
        if self._guard is not None:
            self._guard("gather_shards")
        if self.world_size == 1:
            return self._gather_shards(fulls, shards, tag, key)
        if recorder.active:
            recorder.note_gather(fulls, shards, tag, self.dimension, self.world_size, key)
        entry: Raw = ("all_gather", tag, shards if lasting is None else lasting, None, key)
        flight_recorder = self.flight_recorder
        flight_recorder.count += 1
        flight_recorder.latest.append(entry)
        start = self._watched(entry, self._gather_shards) if self._watchers else self._gather_shards
        pending = start(fulls, shards, tag, key)
        pending.entry = entry
        return pending

    def broadcast(self, tensor: torch.Tensor, tag: str, source: int = 0) -> None:
        """Rank ``source`` of the group overwrites ``tensor`` of every rank; returns when it has."""
        if self.world_size > 1:
            self._launch("broadcast", tensor, tag, 0, self._broadcast, tensor, source, at_once=True).wait()

    def part(self, full: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Rank ``rank``'s part of ``full`` (default: this rank's), a view."""
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
        at_once: bool = False,
    ) -> Pending:
        """Note a collective over ``tensor``, and call ``start(*arguments)``, which launches it."""
        if self._guard is not None:
            self._guard(op)
        if self.world_size == 1:
            return start(*arguments)
        if recorder.active:
            recorder.note(op, tensor, tag, self.dimension, self.world_size, key)
        entry: Raw = (op, tag, tensor.numel(), tensor.dtype, key)
        flight_recorder = self.flight_recorder
        flight_recorder.count += 1
        flight_recorder.latest.append(entry)
        if self._watchers:
            start = self._watched(entry, start, at_once)
        pending = start(*arguments)
        pending.entry = entry
        return pending

    def _watched(
        self, entry: Raw, start: Callable[Arguments, Pending], at_once: bool = False
    ) -> Callable[Arguments, Pending]:
        """``start``, given to the watchers when it is called."""

        def launch(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Pending:
            def innermost() -> Pending:
                pending = start(*args, **kwargs)
                pending.entry = entry
                return pending

            begin: Callable[[], Pending] = innermost
            for watcher in reversed(self._watchers):
                begin = functools.partial(watcher.launch, entry, begin, at_once)
            return begin()

        return launch

    def _all_reduce_max(self, tensor: torch.Tensor) -> Pending:
        return Pending((self.transport.all_reduce_max(tensor),), (tensor,), lambda: tensor)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        return Pending((self.transport.broadcast(tensor, source),), (tensor,), lambda: tensor)

    def _all_reduce(self, tensor: torch.Tensor, tag: str, divisor: float) -> Pending:
        return done(divide(tensor, divisor))

    def _reduce_scatter(self, full: torch.Tensor, tag: str, divisor: float, dtype: torch.dtype) -> Pending:
        return done(divide(full, divisor).to(dtype))

    def _all_gather(self, full: torch.Tensor, tag: str) -> Pending:
        return done(full)

    def _gather_shards(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], tag: str, key: int
    ) -> Pending:
        for full, shard in zip(fulls, shards, strict=True):
            if address(full) != address(shard):
                full.copy_(shard)
        return done(NOTHING)


class NativeCommunicator(Communicator):
    """The backend's own collectives (NCCL and everything else that is not gloo)."""

    def __init__(self, transport: DryTransport) -> None:
        super().__init__(transport)
        if transport.group is not None:
            WAIT.returns_at_once()

    def second(self, backend: str) -> Communicator:
        self._second = NativeCommunicator(self.transport.second(backend))
        return self._second

    def _all_reduce(self, tensor: torch.Tensor, tag: str, divisor: float) -> Pending:
        return Pending((self.transport.all_reduce(tensor),), (tensor,), lambda: divide(tensor, divisor))

    def _reduce_scatter(self, full: torch.Tensor, tag: str, divisor: float, dtype: torch.dtype) -> Pending:
        # Allocated on the current stream, used by the communication stream until wait() orders the two.
        out = empty(full.numel() // self.world_size, full.dtype, full)
        work = self.transport.reduce_scatter(out, full)
        return Pending((work,), (full, out), lambda: tag_memory(divide(out, divisor).to(dtype), BUCKETS))

    def _all_gather(self, full: torch.Tensor, tag: str) -> Pending:
        return Pending((self.transport.all_gather(full, self.part(full)),), (full,), lambda: full)

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
