"""Communication state that partitioned parameters share: communicator, reader of offloaded shards, pending gathers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from zerolite.comm import Communicator, Pending
from zerolite.offload.placements import Placement
from zerolite.offload.shard_reader import ShardReader, StagedShards
from zerolite.utils.accelerator import undispatched
from zerolite.utils.memory_tags import GATHERED, PERSISTENT, listeners, resize, tag_memory
from zerolite.zero.stage3.partitioned_parameter import (
    AVAILABLE,
    NOT_AVAILABLE,
    PartitionedParameter,
    mark_available,
    mark_in_flight,
)
from zerolite.zero.stage3.released_parameter import restore_class

if TYPE_CHECKING:
    from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator


class AllGather:
    """One all-gather of several parameters, pending until one of them is needed."""

    __slots__ = ("_pending", "_staged", "members")

    def __init__(
        self, members: Sequence[PartitionedParameter], pending: Pending | None, staged: StagedShards | None
    ) -> None:
        """staged: offloaded shards, which are on their way to the device."""
        self.members = members
        self._pending = pending
        self._staged = staged

    def wait_for_values(self) -> None:
        """Wait until the values are there. On CUDA the stream waits, not the host."""
        if self._pending is not None:
            with undispatched():
                self._pending.wait()
                if self._staged is not None:
                    self._staged.release()

    def wait(self) -> None:
        """Wait for it: its parameters may be read from now on."""
        try:
            self.wait_for_values()
        except BaseException:
            for member in self.members:
                member.free_full_values()
            raise
        mark_available(self.members)


class GatherListener(Protocol):
    """Listener that is called before this rank launches gathers, on all ranks in the same order."""

    def before_launch(self, indices: Sequence[int]) -> None:
        """These parameters are about to be gathered, in one launch."""

    def before_external(self, group: int, index: int) -> None:
        """Parameter ``index``, owned by another module, belongs to this parameter group from now on."""


class CommContext:
    """Communicator, device and shard reader of some partitioned parameters (FSDP2: ``FSDPCommContext``).

    The parameters of an engine have one. Those that no engine has yet have that of their ``zero.Init``.

    Attributes:
        comm: communicator of the all-gathers.
        device: device of the whole values.
        reader: brings offloaded shards to the device; None where all shards are there.
        updates: number of updates that the engine has made.
        listener: is told of gathers; ``engine.join()`` needs that.
        allocations: how often a parameter has got other memory for its whole values.
        gathered_by_user: parameters on which a user has called ``all_gather()``.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        reader: ShardReader | None = None,
        placement_for: Callable[[int], Placement] | None = None,
    ) -> None:
        """place: placement of a shard of so many elements; None: on ``device``."""
        self.comm = comm
        self.device = device
        self.reader = reader
        self.updates = 0
        self.allocations = 0
        self.listener: GatherListener | None = None
        self.gathered_by_user: weakref.WeakSet[PartitionedParameter] = weakref.WeakSet()
        self._placement_for = placement_for
        self._coordinator: Callable[[], PartitionedParameterCoordinator | None] = _no_coordinator
        self._copies: CommContext | None = None

    def placement_of(self, numel: int) -> Placement:
        """Return the placement of a shard of ``numel`` elements."""
        return Placement(self.device) if self._placement_for is None else self._placement_for(numel)

    # ---------------------------------------------------------------- the engine that has it

    @property
    def coordinator(self) -> PartitionedParameterCoordinator | None:
        """The coordinator that gathers these parameters, as long as its engine exists."""
        return self._coordinator()

    def set_coordinator(self, coordinator: PartitionedParameterCoordinator) -> None:
        """Be gathered by ``coordinator`` from now on."""
        self._coordinator = weakref.ref(coordinator)

    def context_for_copies(self) -> CommContext:
        """Return the context for copies of these parameters, which no engine has."""
        if self._coordinator is _no_coordinator:
            return self
        if self._copies is None:
            self._copies = CommContext(self.comm, self.device, self.reader)
        return self._copies

    def set_reader(self, reader: ShardReader | None) -> None:
        """Let ``reader`` bring the shards from now on."""
        self.reader = reader

    def set_listener(self, listener: GatherListener | None) -> None:
        """Tell ``listener`` of gathers from now on, instead of the one before; None: no listener."""
        self.listener = listener

    def on_update(self) -> None:
        """The engine has given shards new values."""
        self.updates += 1
        if self.gathered_by_user:  # the engine may have released them meanwhile
            still = [member for member in self.gathered_by_user if member.status is AVAILABLE]
            self.gathered_by_user = weakref.WeakSet(still)

    def on_allocation(self) -> None:
        """A parameter has got other memory for its whole values."""
        self.allocations += 1

    # ---------------------------------------------------------------- gathers

    def issue_all_gather(self, members: Sequence[PartitionedParameter]) -> None:
        """Launch one all-gather of ``members``, which are not available. Called on all ranks, in the same order."""
        self._notify(members)
        try:
            to_gather = [member for member in members if member.storage is not None]
            for member in to_gather:
                resize(member.storage, member.nbytes)  # type: ignore[arg-type]
            if listeners:
                for member in to_gather:
                    tag_memory(member.full, PERSISTENT if member.persistent else GATHERED)
            all_gather = self._launch(members, to_gather, [member.full for member in to_gather])
        except BaseException:
            for member in members:
                member.free_full_values()
            raise
        mark_in_flight(members, all_gather)

    def gather(self, members: Sequence[PartitionedParameter]) -> None:
        """Make ``members`` whole, in one launch, and wait for it. Called on all ranks, in the same order."""
        missing = dict.fromkeys(member for member in members if member.status is NOT_AVAILABLE)
        if missing:
            self.issue_all_gather(list(missing))
        for member in members:
            if member.pending is not None:
                member.pending.wait()

    @torch.inference_mode(False)  # the copies may outlive the user's inference mode
    def gather_copies(self, members: Sequence[PartitionedParameter]) -> list[torch.Tensor]:
        """Return the whole values of ``members``, flat, in memory of their own; nothing else changes. Called on all
        ranks, in the same order."""
        for member in members:
            if member.pending is not None:
                member.pending.wait()
        if released := [member for member in members if member.status is not AVAILABLE]:
            self._notify(released)
        copies = [m.full.clone() if m.has_full_values else m.full.new_empty(m.full.shape) for m in members]
        missing = [index for index, member in enumerate(members) if not member.has_full_values]
        if missing:
            to_gather, fulls = [members[index] for index in missing], [copies[index] for index in missing]
            for full in fulls:
                tag_memory(full, GATHERED)
            self._launch(to_gather, to_gather, fulls).wait_for_values()
        return copies

    def _notify(self, members: Sequence[PartitionedParameter]) -> None:
        """Tell the schedule and the listener of a launch."""
        coordinator = self._coordinator()
        if coordinator is not None:
            coordinator.schedule.note_gather(members[0].index + 1, len(members))
        if self.listener is not None:
            self.listener.before_launch([member.index for member in members])

    def _launch(
        self,
        members: Sequence[PartitionedParameter],
        to_gather: Sequence[PartitionedParameter],
        fulls: Sequence[torch.Tensor],
    ) -> AllGather:
        """Launch the all-gather of ``members`` that brings those in ``to_gather`` into ``fulls``."""
        if not to_gather:
            return AllGather(members, None, None)
        shards, key = [member.shard for member in to_gather], members[0].index + 1
        with undispatched():
            if self.reader is None:
                return AllGather(members, self.comm.gather_shards(fulls, shards, "parameters", key), None)
            staged = self.reader.stage_in(to_gather, fulls if self.comm.world_size == 1 else None)
            try:
                with staged.copy_stream():
                    pending = self.comm.gather_shards(fulls, staged.shards, "parameters", key, shards)
            except BaseException:
                staged.release()  # a copy under way must not write into memory that is freed now
                raise
            return AllGather(members, pending, staged)

    def gather_for_user(self, member: PartitionedParameter) -> None:
        """Make ``member`` whole until the user or the engine releases it. Called on all ranks."""
        self.gather([member])
        if not member.persistent:
            self.gathered_by_user.add(member)

    # ---------------------------------------------------------------- gather contexts

    def hold(self, members: Sequence[PartitionedParameter]) -> None:
        """Gather ``members`` and keep them until :meth:`unhold`; calls nest. Called on all ranks."""
        self.gather(members)
        new = [member for member in members if member.hold()]
        coordinator = self._coordinator()
        if coordinator is not None:
            coordinator.schedule.hold([member.index for member in new])
        for member in members:
            restore_class(member.parameter)

    def unhold(self, members: Sequence[PartitionedParameter]) -> None:
        """End one :meth:`hold`. Called on all ranks."""
        ended = [member for member in members if member.unhold()]
        coordinator = self._coordinator()
        if coordinator is not None:  # an open execution may need some still
            coordinator.release(coordinator.schedule.unhold([member.index for member in ended]))
        else:
            for member in ended:
                member.release()


def _no_coordinator() -> None:
    """Parameters that no engine has."""


def by_context(
    members: Iterable[PartitionedParameter],
) -> list[tuple[CommContext, list[PartitionedParameter]]]:
    """Return ``members`` by their context, each in the order of ``members``."""
    found: dict[CommContext, list[PartitionedParameter]] = {}
    for member in members:
        found.setdefault(member.context, []).append(member)
    return list(found.items())


def gather(members: Iterable[PartitionedParameter]) -> None:
    """Make ``members`` whole, in one launch for each context, and wait for it. Called on all ranks."""
    for context, of_context in by_context(members):
        context.gather(of_context)


def gather_copies(members: Iterable[PartitionedParameter]) -> dict[PartitionedParameter, torch.Tensor]:
    """Return the whole values of ``members`` in memory of their own, in one launch for each context."""
    found: dict[PartitionedParameter, torch.Tensor] = {}
    for context, of_context in by_context(members):
        found.update(zip(of_context, context.gather_copies(of_context), strict=True))
    return found
