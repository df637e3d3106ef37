"""Communication state that partitioned parameters share, and their all-gathers (FSDP2: ``FSDPCommContext``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from zerolite.comm import Communicator, Pending, collective
from zerolite.offload.placement import Placement
from zerolite.utils.accelerator import addresses
from zerolite.utils.memory_tags import BUCKETS, DEVICE, GATHERED, PERSISTENT, listeners, resize, tag_memory
from zerolite.utils.torch_private import undispatched
from zerolite.zero.flat import copy_assigned_data
from zerolite.zero.groups import RankGroups
from zerolite.zero.stage3.absent_parameter import restore_class
from zerolite.zero.stage3.partitioned_parameter import (
    AVAILABLE,
    NOT_AVAILABLE,
    PartitionedParameter,
    mark_available,
    mark_in_flight,
)
from zerolite.zero.stage3.shard_reader import ShardReader, StagedShards

if TYPE_CHECKING:
    from zerolite.zero.stage3.partition_parameters import Initialising
    from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator

initialisations: list[Initialising] = []
"""Contexts in which models are being initialised, the innermost last."""


class AllGather:
    """One all-gather of several parameters, pending until one of them is needed."""

    __slots__ = ("_pending", "_staged", "sharded_params")

    def __init__(
        self, sharded_params: Sequence[PartitionedParameter], pending: Pending | None, staged: StagedShards | None
    ) -> None:
        """
        Args:
            sharded_params: the parameters that become available.
            pending: the collective; None if all values are on this rank already.
            staged: copies of offloaded shards on the device; None if the shards are on the device.
        """
        self.sharded_params = sharded_params
        self._pending = pending
        self._staged = staged

    def wait_for_values(self) -> None:
        """Wait for the collective. On CUDA the current stream waits, not the host."""
        if self._pending is not None:
            with undispatched():
                self._pending.wait()
                if self._staged is not None:
                    self._staged.release()

    def wait(self) -> None:
        """Wait for the values and make the parameters available."""
        try:
            self.wait_for_values()
        except BaseException:
            for sharded_param in self.sharded_params:
                sharded_param.free_full_values()
            raise
        mark_available(self.sharded_params)


class CommContext:
    """Groups of ranks, device and shard reader of some partitioned parameters.

    All parameters of an engine share one context. Before there is an engine, those of a ``zero.Init`` share one.

    Attributes:
        groups: the ranks that shard these parameters, with the communicators of their gathers.
        device: device of the full values.
        reader: stages offloaded shards in; None if all shards are on the device.
        updates: number of updates that the engine has made.
        allocations: number of times that a parameter has got another tensor for its full values.
        gathered_by_user: parameters on which a user has called ``all_gather()``.
        gathers_for_operations: True if an operation on a released parameter, outside of forward and backward, gathers
            it. False if it raises on the rank that calls it, for programs that read parameters on one rank alone.
    """

    def __init__(
        self,
        groups: RankGroups,
        device: torch.device,
        reader: ShardReader | None = None,
        placement_for: Callable[[int], Placement] | None = None,
    ) -> None:
        """
        Args:
            groups: the ranks that shard the parameters, with the communicators of their gathers.
            device: device of the full values.
            reader: reader of offloaded shards; None if all shards are on ``device``.
            placement_for: chooses the placement of a shard from its number of elements; None: on ``device``.
        """
        self.groups = groups
        self.device = device
        self.reader = reader
        self.updates = 0
        self.allocations = 0
        self._suspended = ""  # why nothing can be gathered now, with the remedy
        self.gathers_for_operations = True
        self.gathered_by_user: weakref.WeakSet[PartitionedParameter] = weakref.WeakSet()
        self._placement_for = placement_for
        self._coordinator: Callable[[], PartitionedParameterCoordinator | None] = _no_coordinator
        self._copies: CommContext | None = None

    def placement_of(self, numel: int) -> Placement:
        """Return the placement of a shard of ``numel`` elements."""
        return Placement(self.device) if self._placement_for is None else self._placement_for(numel)

    # ---------------------------------------------------------------- connections to the engine

    @property
    def coordinator(self) -> PartitionedParameterCoordinator | None:
        """The coordinator of the engine that has these parameters; None without an engine."""
        return self._coordinator()

    @property
    def initialising(self) -> Initialising | None:
        """The context in which these parameters, without an engine, are being initialised; None outside of one."""
        return initialisations[-1] if initialisations and self._coordinator() is None else None

    def set_coordinator(self, coordinator: PartitionedParameterCoordinator) -> None:
        """Set the coordinator that gathers these parameters from now on. Called by its constructor."""
        self._coordinator = weakref.ref(coordinator)  # parameters may outlive their engine

    def context_for_copies(self) -> CommContext:
        """Return the context for copies of these parameters, which belong to no engine."""
        if self._coordinator is _no_coordinator:
            return self
        if self._copies is None:
            self._copies = CommContext(self.groups, self.device, self.reader)
        return self._copies

    def set_reader(self, reader: ShardReader | None) -> None:
        """Set the reader of offloaded shards; None if all shards are on the device."""
        self.reader = reader

    def suspend(self, why: str) -> None:
        """Refuse all gathers with the reason ``why`` from now on; "" ends it."""
        self._suspended = why

    def on_update(self) -> None:
        """Count an update, in which the engine has given shards new values."""
        self.updates += 1
        if self.gathered_by_user:  # keep those that the engine has not released since
            still = [sharded_param for sharded_param in self.gathered_by_user if sharded_param.status is AVAILABLE]
            self.gathered_by_user = weakref.WeakSet(still)

    def on_allocation(self) -> None:
        """Count that a parameter has got another tensor for its full values."""
        self.allocations += 1

    # ---------------------------------------------------------------- gathers

    @collective
    def issue_all_gather(self, sharded_params: Sequence[PartitionedParameter]) -> None:
        """Launch one all-gather of parameters that are not available."""
        self._notify(sharded_params)
        try:
            # The others have their full values in their shard.
            to_gather = [sharded_param for sharded_param in sharded_params if sharded_param.storage is not None]
            for sharded_param in to_gather:
                resize(sharded_param.storage, sharded_param.nbytes)  # type: ignore[arg-type]
            if listeners:
                for sharded_param in to_gather:
                    tag_memory(sharded_param.full, PERSISTENT if sharded_param.persistent else GATHERED)
            all_gather = self._launch(sharded_params, to_gather, [sharded_param.full for sharded_param in to_gather])
        except BaseException:
            for sharded_param in sharded_params:
                sharded_param.free_full_values()
            raise
        mark_in_flight(sharded_params, all_gather)

    @collective
    def gather(self, sharded_params: Sequence[PartitionedParameter]) -> None:
        """Make ``sharded_params`` available: launch one all-gather and wait."""
        missing = dict.fromkeys(
            sharded_param for sharded_param in sharded_params if sharded_param.status is NOT_AVAILABLE
        )
        if missing:
            self.issue_all_gather(list(missing))
        for sharded_param in sharded_params:
            if sharded_param.pending is not None:
                sharded_param.pending.wait()

    @collective
    @torch.inference_mode(False)  # the copies may outlive the user's inference mode
    def gather_copies(self, sharded_params: Sequence[PartitionedParameter]) -> list[torch.Tensor]:
        """Return copies of the full values, each flat and with padding. No parameter changes its state."""
        for sharded_param in sharded_params:
            if sharded_param.pending is not None:
                sharded_param.pending.wait()
        if released := [sharded_param for sharded_param in sharded_params if sharded_param.status is not AVAILABLE]:
            self._notify(released)
        copies = [m.full.clone() if m.has_full_values else m.full.new_empty(m.full.shape) for m in sharded_params]
        missing = [index for index, sharded_param in enumerate(sharded_params) if not sharded_param.has_full_values]
        if missing:
            to_gather, fulls = [sharded_params[index] for index in missing], [copies[index] for index in missing]
            for full in fulls:
                tag_memory(full, GATHERED)
            self._launch(to_gather, to_gather, fulls).wait_for_values()
        return copies

    def _notify(self, sharded_params: Sequence[PartitionedParameter]) -> None:
        """Report a launch to the schedule, which hashes all gathers. Raises RuntimeError while they are suspended."""
        coordinator = self._coordinator()
        if coordinator is not None:
            coordinator.schedule.note_gather(sharded_params[0].index + 1, len(sharded_params))
        if self._suspended:
            raise RuntimeError(self._suspended)

    def _launch(
        self,
        sharded_params: Sequence[PartitionedParameter],
        to_gather: Sequence[PartitionedParameter],
        fulls: Sequence[torch.Tensor],
    ) -> AllGather:
        """Launch one all-gather.

        Args:
            sharded_params: the parameters that become available.
            to_gather: those of them whose values are on other ranks.
            fulls: memory for the full values of ``to_gather``, flat.
        """
        if not to_gather:
            return AllGather(sharded_params, None, None)
        shards, key, comm = (
            [sharded_param.shard for sharded_param in to_gather],
            sharded_params[0].index + 1,
            self.groups.shard,
        )
        with undispatched():
            if self.reader is None:
                return AllGather(sharded_params, comm.gather_shards(fulls, shards, "parameters", key, shards), None)
            staged = self.reader.stage_in(to_gather, fulls if comm.world_size == 1 else None)
            try:
                with staged.copy_stream():
                    pending = comm.gather_shards(fulls, staged.shards, "parameters", key, shards)
            except BaseException:
                staged.release()  # a copy under way must not write into memory that is freed now
                raise
            return AllGather(sharded_params, pending, staged)

    @collective
    def gather_for_user(self, sharded_param: PartitionedParameter) -> None:
        """Make ``sharded_param`` available until the user or the engine releases it."""
        self.gather([sharded_param])
        if not sharded_param.persistent:
            self.gathered_by_user.add(sharded_param)

    # ---------------------------------------------------------------- gather contexts

    @collective
    def pin(self, sharded_params: Sequence[PartitionedParameter]) -> None:
        """Gather ``sharded_params`` and keep them available until :meth:`unpin`; calls nest."""
        self.gather(sharded_params)
        new = [sharded_param for sharded_param in sharded_params if sharded_param.pin()]
        coordinator = self._coordinator()
        if coordinator is not None:
            coordinator.schedule.pin([sharded_param.index for sharded_param in new])
        for sharded_param in sharded_params:
            restore_class(sharded_param.parameter)  # between forward and backward an available one may look released

    @collective
    def unpin(self, sharded_params: Sequence[PartitionedParameter]) -> None:
        """End one :meth:`pin`, and release those that nothing else needs."""
        ended = [sharded_param for sharded_param in sharded_params if sharded_param.unpin()]
        for sharded_param in ended:
            sharded_param.mark_seen()  # the context has written or dropped what was changed in it
        coordinator = self._coordinator()
        if coordinator is not None:  # an open execution may still need some
            coordinator.release(coordinator.schedule.unpin([sharded_param.index for sharded_param in ended]))
        else:
            for sharded_param in ended:
                sharded_param.release()


def _no_coordinator() -> None:
    """Stand in for the weak reference to a coordinator where there is none."""


def group_by_context(
    sharded_params: Iterable[PartitionedParameter],
) -> list[tuple[CommContext, list[PartitionedParameter]]]:
    """Return ``sharded_params`` grouped by their context, in their order."""
    found: dict[CommContext, list[PartitionedParameter]] = {}
    for sharded_param in sharded_params:
        found.setdefault(sharded_param.context, []).append(sharded_param)
    return list(found.items())


@collective
def gather(sharded_params: Iterable[PartitionedParameter]) -> None:
    """Make ``sharded_params`` available, in one launch for each context."""
    for context, of_context in group_by_context(sharded_params):
        context.gather(of_context)


# -------------------------------------------------------------------- parameters that stay available


class _Row(NamedTuple):
    """Shards that are adjacent in memory, which one all-gather sends as one tensor.

    Attributes:
        shard: all of them as one flat tensor.
        parts: the number of elements of each.
        fulls: for each the full values [world size, elements]; in a row of one shard the parameter's flat ``full``.
    """

    shard: torch.Tensor
    parts: list[int]
    fulls: list[torch.Tensor]


class AvailableParameters:
    """Available parameters of one context.

    The work on them is planned once, for the memory that shards and full values have now. It is planned again when a
    parameter has got another tensor for its full values.
    """

    def __init__(self, context: CommContext, sharded_params: Sequence[PartitionedParameter]) -> None:
        self._context = context
        self._sharded_params = sharded_params
        self._plan()

    def _plan(self) -> None:
        """Collect the tensors of all sharded_params, and join adjacent shards to rows."""
        self._allocations = self._context.allocations
        self._parameters = [sharded_param.parameter for sharded_param in self._sharded_params]
        self._views = [sharded_param.view for sharded_param in self._sharded_params]
        sharded = [sharded_param for sharded_param in self._sharded_params if sharded_param.storage is not None]
        self._full_views = [sharded_param.local_shard() for sharded_param in sharded]
        self._shards = [
            sharded_param.shard[: len(part)] for sharded_param, part in zip(sharded, self._full_views, strict=True)
        ]
        self._offloaded = [sharded_param for sharded_param in sharded if sharded_param.placement.location != DEVICE]
        # Without the empty ones: torch's split_with_sizes_copy divides by zero on CUDA where a size is 0.
        on_device = [m for m in sharded if m.placement.location == DEVICE and m.shard.numel()]
        self._count, self._key = len(on_device), on_device[0].index + 1 if on_device else 0
        self._rows = [self._row(sharded_params) for sharded_params in _neighbours(on_device)]

    def _row(self, sharded_params: Sequence[PartitionedParameter]) -> _Row:
        parts = [sharded_param.shard.numel() for sharded_param in sharded_params]
        shard = sharded_params[0].shard.as_strided((sum(parts),), (1,))
        if len(sharded_params) == 1:
            return _Row(shard, parts, [sharded_params[0].full])
        world = self._context.groups.shard.world_size
        return _Row(shard, parts, [m.full.view(world, part) for m, part in zip(sharded_params, parts, strict=True)])

    def copy_writes_to_shards(self) -> None:
        """Copy the user's writes into full values, the same on all ranks, into the shards."""
        if self._allocations != self._context.allocations:
            self._plan()
        found, expected = addresses(self._parameters), addresses(self._views)
        if found != expected:  # a user has set p.data = values
            for sharded_param, data, view in zip(self._sharded_params, found, expected, strict=True):
                if data != view:
                    copy_assigned_data(sharded_param.name, sharded_param.parameter, sharded_param.view)
        reader = self._context.reader
        if self._shards and reader is None:
            torch._foreach_copy_(self._shards, self._full_views)
        elif self._shards and reader is not None:
            reader.write_back(self._shards, self._full_views)

    @collective
    def refresh(self) -> None:
        """Gather the values of an update into the parameters' memory. One launch is for shards on the device, and
        one for offloaded shards."""
        if self._allocations != self._context.allocations:
            self._plan()
        if self._offloaded:
            for sharded_param in self._offloaded:
                sharded_param.mark_stale()
            self._context.gather(self._offloaded)
        if self._rows:
            coordinator = self._context.coordinator
            if coordinator is not None:
                coordinator.schedule.note_gather(self._key, self._count)
            with undispatched():
                self._gather_rows(self._context.groups.shard)

    def _gather_rows(self, comm: Communicator) -> None:
        """Gather each row as one tensor and copy it into the full values of its parameters; a row of one directly."""
        gathered_rows = []
        for shard, _, fulls in self._rows:
            full = fulls[0]
            if len(fulls) > 1:
                full = tag_memory(shard.new_empty(comm.world_size * shard.numel()), BUCKETS)
            gathered_rows.append(full)
        shards = [row.shard for row in self._rows]
        comm.gather_shards(gathered_rows, shards, "parameters", self._key, shards).wait()
        for full, (_, parts, fulls) in zip(gathered_rows, self._rows, strict=True):
            if len(fulls) > 1:
                torch.split_with_sizes_copy(full.view(comm.world_size, -1), parts, dim=1, out=fulls)


@collective
def refresh(sharded_params: Sequence[PartitionedParameter]) -> None:
    """Gather new values into available parameters."""
    for context, of_context in group_by_context(sharded_params):
        AvailableParameters(context, of_context).refresh()


def _neighbours(sharded_params: Sequence[PartitionedParameter]) -> list[list[PartitionedParameter]]:
    """Return ``sharded_params`` in runs whose shards are adjacent in memory.

    Runs are in the order of ``sharded_params`` and not of addresses, because only the former is the same on all ranks.
    """
    runs: list[list[PartitionedParameter]] = []
    # By storage and dtype: the last run there, and the element at which it ends.
    latest: dict[tuple[int, torch.dtype], tuple[list[PartitionedParameter], int]] = {}
    for sharded_param in sharded_params:
        shard = sharded_param.shard
        memory, start = (id(shard.untyped_storage()), shard.dtype), int(shard.storage_offset())
        run, end = latest.get(memory, ([], -1))
        if start != end:
            run = []
            runs.append(run)
        run.append(sharded_param)
        latest[memory] = (run, start + shard.numel())
    return runs
