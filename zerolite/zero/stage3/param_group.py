"""Parameter group: partitioned parameters that one communicator gathers, those of an engine or of one ``zero.Init``."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from zerolite.comm import Communicator, Pending
from zerolite.offload.placements import Placement
from zerolite.offload.shard_reader import Arrival, ShardReader, undispatched
from zerolite.utils.accelerator import addresses
from zerolite.utils.memory_tags import BUCKETS, DEVICE, GATHERED, PERSISTENT, listeners, resize, tag_memory
from zerolite.zero.buffer import take_values
from zerolite.zero.stage3.partitioned_parameter import (
    AVAILABLE,
    NOT_AVAILABLE,
    PartitionedParameter,
    arrive,
    wait_for,
)
from zerolite.zero.stage3.released_parameter import open_all

if TYPE_CHECKING:
    from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator


class AllGather:
    """One all-gather of several parameters, pending until one of them is needed."""

    __slots__ = ("_arrival", "_pending", "members")

    def __init__(
        self, members: Sequence[PartitionedParameter], pending: Pending | None, arrival: Arrival | None
    ) -> None:
        self.members = members
        self._pending = pending
        self._arrival = arrival  # of the shards that have rested elsewhere

    def wait(self) -> None:
        """Wait for it: its parameters may be read from now on. On CUDA the stream waits, not the host."""
        try:
            if self._pending is not None:
                with undispatched():
                    self._pending.wait()
                    if self._arrival is not None:
                        self._arrival.end()
        except BaseException:
            for member in self.members:
                member.drop()
            raise
        arrive(self.members)


class GatherListener(Protocol):
    """Listener that is called before this rank launches gathers, on all ranks in the same order."""

    def before_launch(self, indices: Sequence[int]) -> None:
        """These parameters are about to be gathered, in one launch."""

    def before_external(self, unit: int, index: int) -> None:
        """Note that ``unit`` gathers, from now on, a parameter that it turns out to use."""


class ParamGroup:
    """See the module.

    Attributes:
        comm: of the gathers.
        device: where whole values are.
        reader: brings shards to the device; None where all rest there.
        updates: how many the engine has made.
        listener: told of gathers, and of parameters that a unit turns out to use: engine.join() wants to know.
        allocations: how often a parameter has got other memory for its whole values.
        kept: parameters that a user has made whole, until the engine releases them.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        reader: ShardReader | None = None,
        home: Callable[[int], Placement] | None = None,
    ) -> None:
        """home: where a shard of so many elements is to rest; None: on ``device``."""
        self.comm = comm
        self.device = device
        self.reader = reader
        self.updates = 0
        self.allocations = 0
        self.listener: GatherListener | None = None
        self._home = home
        self._coordinator: Callable[[], PartitionedParameterCoordinator | None] = _no_engine
        self._copies: ParamGroup | None = None
        self._held: Counter[PartitionedParameter] = Counter()  # as long as no engine has the parameters
        self.kept: weakref.WeakSet[PartitionedParameter] = weakref.WeakSet()

    def placement_of(self, numel: int) -> Placement:
        """Return the placement of a shard of ``numel`` elements."""
        return Placement(self.device) if self._home is None else self._home(numel)

    # ---------------------------------------------------------------- the engine that has it

    @property
    def coordinator(self) -> PartitionedParameterCoordinator | None:
        """The coordinator that gathers these parameters, as long as its engine exists."""
        return self._coordinator()

    def serve(self, coordinator: PartitionedParameterCoordinator) -> None:
        """Be gathered by ``coordinator`` from now on."""
        self._coordinator = weakref.ref(coordinator)

    def without_engine(self) -> ParamGroup:
        """The group for copies of these parameters, which no engine has."""
        if self._coordinator is _no_engine:
            return self
        if self._copies is None:
            self._copies = ParamGroup(self.comm, self.device, self.reader)
        return self._copies

    def read_with(self, reader: ShardReader | None) -> None:
        """Let ``reader`` bring the shards from now on."""
        self.reader = reader

    def listen(self, listener: GatherListener | None) -> None:
        """Tell ``listener`` of gathers from now on, instead of the one before; None: no listener."""
        self.listener = listener

    def on_update(self) -> None:
        """The engine has given shards new values."""
        self.updates += 1

    def note_memory(self) -> None:
        """A parameter has got other memory for its whole values."""
        self.allocations += 1

    def note_kept(self, parameter: PartitionedParameter) -> None:
        """A user has made ``parameter`` whole, for as long as the engine does not release it."""
        if not parameter.persistent:
            self.kept.add(parameter)

    def keeps_some(self) -> bool:
        """True if a parameter that a user has made whole is whole still."""
        self.kept = weakref.WeakSet(parameter for parameter in self.kept if parameter.status is AVAILABLE)
        return bool(self.kept)

    # ---------------------------------------------------------------- gathers

    def all_gather(self, members: Sequence[PartitionedParameter]) -> None:
        """Start to gather ``members``, which are not available, in one launch. Called on all ranks, in the same
        order."""
        coordinator, reader = self._coordinator(), self.reader
        if coordinator is not None:
            coordinator.schedule.note_gather(members[0].index + 1, len(members))
        if self.listener is not None:
            self.listener.before_launch([member.index for member in members])
        pending = arrival = None
        try:
            moved = [member for member in members if member.storage is not None]
            if moved:
                for member in moved:
                    resize(member.storage, member.nbytes)  # type: ignore[arg-type]
                if listeners:
                    for member in moved:
                        tag_memory(member.full, PERSISTENT if member.persistent else GATHERED)
                with undispatched():
                    fulls, shards = [member.full for member in moved], [member.shard for member in moved]
                    key = members[0].index + 1
                    if reader is None:
                        pending = self.comm.gather_shards(fulls, shards, "parameters", key)
                    else:
                        arrival = reader.bring(moved, alone=self.comm.world_size == 1)
                        with arrival.behind_copies():
                            pending = self.comm.gather_shards(fulls, arrival.shards, "parameters", key, shards)
        except BaseException:
            if arrival is not None:
                arrival.end()  # nothing may be copied into memory that is freed now
            for member in members:
                member.drop()
            raise
        wait_for(members, AllGather(members, pending, arrival))

    def gather(self, members: Sequence[PartitionedParameter]) -> None:
        """Make ``members`` whole, in one launch, and wait for it. Called on all ranks, in the same order."""
        missing = dict.fromkeys(member for member in members if member.status is NOT_AVAILABLE)
        if missing:
            self.all_gather(list(missing))
        for member in members:
            if member.pending is not None:
                member.pending.wait()

    # ---------------------------------------------------------------- gather contexts

    def hold(self, members: Sequence[PartitionedParameter]) -> None:
        """Gather ``members`` and keep them until :meth:`unhold`; calls nest. Called on all ranks."""
        coordinator = self._coordinator()
        if coordinator is not None:
            coordinator.hold([member.index for member in members])
        else:
            self.gather(members)
            self._held.update(members)
        open_all([member.parameter for member in members])

    def unhold(self, members: Sequence[PartitionedParameter]) -> None:
        """End one :meth:`hold`. Called on all ranks."""
        coordinator = self._coordinator()
        if coordinator is not None:
            coordinator.unhold([member.index for member in members])
            return
        self._held.subtract(members)
        self._held = +self._held  # without those that nothing holds any more
        for member in members:
            if member not in self._held:
                member.release()

    def times_held(self, member: PartitionedParameter) -> int:
        """The number of open holds of a parameter."""
        coordinator = self._coordinator()
        return self._held[member] if coordinator is None else coordinator.schedule.held.get(member.index, 0)


def _no_engine() -> None:
    """Parameters that no engine has."""


def by_group(members: Iterable[PartitionedParameter]) -> list[tuple[ParamGroup, list[PartitionedParameter]]]:
    """Return ``members`` by their group, each in the order of ``members``."""
    found: dict[ParamGroup, list[PartitionedParameter]] = {}
    for member in members:
        found.setdefault(member.group, []).append(member)
    return list(found.items())


def gather(members: Iterable[PartitionedParameter]) -> None:
    """Make ``members`` whole, in one launch for each group, and wait for it. Called on all ranks, in the same order."""
    for group, of_group in by_group(members):
        group.gather(of_group)


# -------------------------------------------------------------------- new values into what is whole


class _Row(NamedTuple):
    """Shards that follow each other in memory: as one tensor, their lengths, and where the whole values are; of one
    shard alone these are the parameter's own memory."""

    shard: torch.Tensor
    parts: list[int]
    wholes: list[torch.Tensor]


class Refresh:
    """Gathers new values into parameters of one group that are available, in one launch: into the same memory. Shards
    that lie side by side travel as one tensor. Valid as long as shards and whole values stay where they are."""

    def __init__(self, group: ParamGroup, members: Sequence[PartitionedParameter]) -> None:
        self._group = group
        self._away = [m for m in members if m.storage is not None and m.placement.place != DEVICE]
        near = [m for m in members if m.storage is not None and m.placement.place == DEVICE]
        self._count, self._key = len(near), near[0].index + 1 if near else 0
        self._rows = [self._row(members) for members in _rows(near)]

    def _row(self, members: Sequence[PartitionedParameter]) -> _Row:
        parts = [member.shard.numel() for member in members]
        shard = members[0].shard.as_strided((sum(parts),), (1,))
        if len(members) == 1:
            return _Row(shard, parts, [members[0].full])
        world = self._group.comm.world_size
        return _Row(shard, parts, [m.full.view(world, part) for m, part in zip(members, parts, strict=True)])

    def run(self) -> None:
        """Do it. Called on all ranks, in the same order."""
        if self._away:
            for member in self._away:
                member.expire()
            self._group.gather(self._away)
        if self._rows:
            coordinator = self._group.coordinator
            if coordinator is not None:
                coordinator.schedule.note_gather(self._key, self._count)
            with undispatched():
                self._gather_rows(self._group.comm)

    def _gather_rows(self, comm: Communicator) -> None:
        """Gather each row as one tensor, and copy it into the whole values of its members; a row of one, straight
        there."""
        world, fulls = comm.world_size, []
        for shard, _, wholes in self._rows:
            together = len(wholes) > 1
            fulls.append(tag_memory(shard.new_empty(world * shard.numel()), BUCKETS) if together else wholes[0])
        comm.gather_shards(fulls, [row.shard for row in self._rows], "parameters", self._key).wait()
        for full, (_, parts, wholes) in zip(fulls, self._rows, strict=True):
            if len(wholes) > 1:
                torch.split_with_sizes_copy(full.view(world, -1), parts, dim=1, out=wholes)


class WholeParameters:
    """Parameters of one group that are never released. What each step does with them is planned once, for the memory
    that shards and whole values have now, and again when one of them has got other memory."""

    def __init__(self, group: ParamGroup, members: Sequence[PartitionedParameter]) -> None:
        self._group = group
        self._members = members
        self._plan()

    def _plan(self) -> None:
        self._allocations = self._group.allocations
        self._parameters = [member.parameter for member in self._members]
        self._views = [member.view for member in self._members]
        apart = [member for member in self._members if member.storage is not None]
        self._parts = [member.own_part() for member in apart]
        self._shards = [member.shard[: len(part)] for member, part in zip(apart, self._parts, strict=True)]
        self._refresh = Refresh(self._group, self._members)

    def take_writes(self) -> None:
        """Copy the user's writes into whole values, which are alike on all ranks, into the shards."""
        if self._allocations != self._group.allocations:
            self._plan()
        found, homes = addresses(self._parameters), addresses(self._views)
        if found != homes:
            for member, place, home in zip(self._members, found, homes, strict=True):
                if place != home:
                    take_values(member.name, member.parameter, member.view)
        reader = self._group.reader
        if self._shards and reader is None:
            torch._foreach_copy_(self._shards, self._parts)
        elif self._shards and reader is not None:
            reader.write(self._shards, self._parts)

    def refresh(self) -> None:
        """Gather the values of an update. Called on all ranks, in the same order."""
        if self._allocations != self._group.allocations:
            self._plan()
        self._refresh.run()


def refresh(members: Sequence[PartitionedParameter]) -> None:
    """Gather new values into parameters that are available. Called on all ranks, in the same order."""
    for group, of_group in by_group(members):
        Refresh(group, of_group).run()


def _rows(members: Sequence[PartitionedParameter]) -> list[list[PartitionedParameter]]:
    """Return ``members`` in runs whose shards follow each other in one memory. Runs are in the order of ``members``,
    which is the same on all ranks; addresses are not."""
    rows: list[list[PartitionedParameter]] = []
    latest: dict[Any, tuple[list[PartitionedParameter], int]] = {}  # by memory: its last run, and where that ends
    for member in members:
        shard = member.shard
        memory, start = (shard.untyped_storage()._cdata, shard.dtype), int(shard.storage_offset())
        row, end = latest.get(memory, ([], -1))
        if start != end:
            row = []
            rows.append(row)
        row.append(member)
        latest[memory] = (row, start + shard.numel())
    return rows
