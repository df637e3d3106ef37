"""Parameter groups of stage 3: gathered, released and reduced as one (FSDP2: ``FSDPParamGroup``).

::

    released ── issue_all_gather ──▶ in flight ── AllGather.wait ──▶ available ── hide ──▶ hidden
        ▲                                                              │   ▲                 │ │
        │                                                              │   └───── show ──────┘ │
        └────────────────────────── release ───────────────────────────┴───────────────────────┘

A hidden group has its values for the backward to come, and its parameters look released to all other code.
One launch may be for several groups: a prefetch, or small groups that follow each other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from zerolite.comm import Pending, collective
from zerolite.offload.placement import Placement
from zerolite.utils.memory_tags import GATHERED, PERSISTENT, listeners, resize, tag_memory
from zerolite.utils.torch_private import undispatched
from zerolite.zero.groups import RankGroups
from zerolite.zero.stage3.absent_parameter import restore_class, set_absent_class
from zerolite.zero.stage3.partitioned_parameter import (
    AVAILABLE,
    NOT_AVAILABLE,
    PartitionedParameter,
    sharded_param_of,
)
from zerolite.zero.stage3.shard_reader import ShardReader, StagedShards

if TYPE_CHECKING:
    from zerolite.zero.bucket import Bucket
    from zerolite.zero.stage3.partition_parameters import Initialising
    from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator

initialisations: list[Initialising] = []
"""Contexts in which models are being initialised, the innermost last."""


class ParamGroup:
    """Parameters of a module, or of a subtree, that are gathered as one, and reduced together with small neighbours.

    Autograd's graphs keep the group alive, so it references modules weakly.

    Attributes:
        index: number of the group in its model; 0 is the root's.
        name: qualified name of the module.
        parameters: its parameters without the persistent ones, each once.
        is_embedding: True if the module is an embedding and nothing else, whose backward needs no values of the weight.
        buckets: buckets of the gradients of its parameters, and of those that its forward uses of other groups.
        unfinished: forwards since the last update whose backward has not ended; equal on all ranks.
        is_entered: a backward has gathered its values since the last update, or graphs use parameters anywhere.
        without_graph: those of them that had no graph inside a forward with one. Reentrant checkpointing runs such a
            forward, and repeats it in the backward.
        open_executions: executions under way that need the values. Counted in place: a method would cost host time.
        hidden: parameters look released, because no execution that is under way needs them; see the module.
        called_inside: the module of the subtree that is called directly; None if there is none.
    """

    __slots__ = (
        "_inside",
        "_module",
        "buckets",
        "called_inside",
        "hidden",
        "index",
        "is_entered",
        "is_embedding",
        "name",
        "open_executions",
        "parameters",
        "unfinished",
        "without_graph",
        "_is_recomputed",
    )

    def __init__(
        self,
        index: int,
        name: str,
        module: torch.nn.Module,
        parameters: Sequence[PartitionedParameter],
        inside: Sequence[torch.nn.Module] = (),
    ) -> None:
        """
        Args:
            inside: modules of the subtree, which are gathered with ``module``.
        """
        self.index = index
        self.name = name
        self.parameters = list(parameters)
        self._module = weakref.ref(module)
        self._inside = [weakref.ref(inner) for inner in inside]
        self.is_embedding = _is_embedding(module, parameters)
        self.buckets: list[Bucket] = []
        self.unfinished = self.without_graph = self.open_executions = 0
        self.is_entered = False
        self._is_recomputed = True  # until a step has shown a forward without a graph that was not repeated
        self.called_inside: torch.nn.Module | None = None
        self.hidden = False

    @property
    def module(self) -> torch.nn.Module:
        """The module whose forward is an execution of the group."""
        module = self._module()
        assert module is not None, "a model outlives its engine"
        return module

    @property
    def inside(self) -> list[torch.nn.Module]:
        """The modules of the subtree without the group's own."""
        return [module for ref in self._inside if (module := ref()) is not None]

    def set_called_inside(self, module: torch.nn.Module | None) -> None:
        """Set the module of the subtree that is called directly; None when it has returned."""
        self.called_inside = module

    def need_values(self) -> None:
        """Note that the backward needs values from now on: those of another parameter than the embedding's."""
        self.is_embedding = False

    def check_parameters(self) -> None:
        """Raise RuntimeError for tensors in the places of parameters (torch.func.functional_call), because a gradient
        through them would reach the parameters outside of their group's backward."""
        for module in (self.module, *self.inside):
            for name, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, torch.nn.Parameter):
                    raise RuntimeError(
                        f"module '{self.name}' is called with a tensor in the place of its parameter '{name}', which "
                        "stage 3 does not support (functional_call with fast weights); call a full copy of the model: "
                        "copy.deepcopy(engine.module)"
                    )

    def on_forward_without_graph(self) -> None:
        """Expect a backward of a forward that has built no graph, if earlier ones had one."""
        if self._is_recomputed:
            self.without_graph += 1
            self.unfinished += 1

    def on_recomputed(self) -> None:
        """Note the end of the backward of a forward that had no graph at first."""
        self._is_recomputed = True
        if self.without_graph:
            self.without_graph -= 1
            self.unfinished -= 1

    def on_not_recomputed(self) -> None:
        """Note that a step has ended without the backwards that :attr:`without_graph` counts: a model calls the module
        under ``no_grad``. Waiting for them again would keep the gradients of all buckets to the end of a backward."""
        self._is_recomputed, self.without_graph = False, 0

    def hide(self, tied: Mapping[PartitionedParameter, Sequence[ParamGroup]]) -> None:
        """Let parameters that stay gathered for their backward look released, so that a use by another module is
        noticed: that module then needs them in a backward of its own.

        Args:
            tied: the groups of each parameter that has several.
        """
        if self.open_executions:
            return
        self.hidden = True
        for sharded_param in self.parameters:
            if sharded_param.status is not AVAILABLE or sharded_param.pin_count:
                continue
            if tied and sharded_param in tied:
                if any(group.open_executions for group in tied[sharded_param]):
                    continue
                for group in tied[sharded_param]:
                    group.hidden = True
            if (parameter := sharded_param.ref()) is not None:
                set_absent_class(parameter)

    def show(self) -> None:
        """Undo :meth:`hide` for an execution that begins."""
        self.hidden = False
        for sharded_param in self.parameters:
            if sharded_param.status is AVAILABLE and (parameter := sharded_param.ref()) is not None:
                restore_class(parameter)

    def add_bucket(self, bucket: Bucket) -> None:
        """Let ``bucket`` wait for the backwards of this group."""
        if bucket not in self.buckets:
            self.buckets.append(bucket)
            bucket.local.groups.append(self)

    def reset(self) -> None:
        """End all executions."""
        self.open_executions, self.called_inside = 0, None


def _is_embedding(module: torch.nn.Module, parameters: Sequence[PartitionedParameter]) -> bool:
    """Return True for an embedding. Subclasses, patched methods and hooks may compute more with its weight."""
    if type(module) is not torch.nn.Embedding or "forward" in vars(module):
        return False
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not hooked and list(parameters) == [sharded_param_of(module._parameters.get("weight"))]


# -------------------------------------------------------------------- gathers


class AllGather:
    """One all-gather of several parameters, pending until one of them is needed.

    Attributes:
        sharded_params: the parameters that become available.
    """

    __slots__ = ("_pending", "_staged", "sharded_params")

    @collective
    def __init__(
        self,
        context: CommContext,
        sharded_params: Sequence[PartitionedParameter],
        to_gather: Sequence[PartitionedParameter],
        fulls: Sequence[torch.Tensor],
    ) -> None:
        """Launch it.

        Args:
            context: ranks and shard reader.
            sharded_params: the parameters that become available.
            to_gather: those of them whose values are on other ranks.
            fulls: memory for the full values of ``to_gather``, flat.
        """
        self.sharded_params = sharded_params
        self._pending: Pending | None = None
        self._staged: StagedShards | None = None
        if not to_gather:
            return
        comm, reader, key = context.groups.shard, context.reader, to_gather[0].index + 1
        shards = [sharded_param.shard for sharded_param in to_gather]
        with undispatched():
            if reader is None:
                self._pending = comm.gather_shards(fulls, shards, "parameters", key, shards)
                return
            self._staged = reader.stage_in(to_gather, fulls if comm.world_size == 1 else None)
            try:
                with self._staged.copy_stream():
                    self._pending = comm.gather_shards(fulls, self._staged.shards, "parameters", key, shards)
            except BaseException:
                self._staged.release()  # a copy under way must not write into memory that is freed now
                raise

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
        for sharded_param in self.sharded_params:
            sharded_param.set_available()


class SharedState:
    """State that the contexts of one engine have in common.

    Attributes:
        updates: number of updates that the engine has made.
        allocations: number of times that a parameter has got another tensor for its full values.
        gathered_by_user: parameters on which a user has called ``all_gather()``.
        gathers_for_operations: True if an operation on a released parameter, outside of forward and backward, gathers
            it. False if it raises on the rank that calls it, for programs that read parameters on one rank alone.
        suspended: why nothing can be gathered now, with the remedy; "" if all can.
        coordinator: returns the coordinator of the engine; None without an engine.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.allocations = 0
        self.gathered_by_user: weakref.WeakSet[PartitionedParameter] = weakref.WeakSet()
        self.gathers_for_operations = True
        self.suspended = ""
        self.coordinator: Callable[[], PartitionedParameterCoordinator | None] = _no_coordinator


class CommContext:
    """Groups of ranks, device and shard reader of some partitioned parameters.

    All parameters of an engine have one context, but experts on several ranks have one of their own. Before there is an
    engine, those of a ``zero.Init`` have one.

    Attributes:
        groups: the ranks that shard these parameters, with the communicators of their gathers.
        device: device of the full values.
        reader: stages offloaded shards in; None if all shards are on the device.
        shared: what it has in common with the other contexts of the engine.
    """

    def __init__(
        self,
        groups: RankGroups,
        device: torch.device,
        reader: ShardReader | None = None,
        placement_for: Callable[[int], Placement] | None = None,
        shared: SharedState | None = None,
    ) -> None:
        """
        Args:
            groups: the ranks that shard the parameters, with the communicators of their gathers.
            device: device of the full values.
            reader: reader of offloaded shards; None if all shards are on ``device``.
            placement_for: chooses the placement of a shard from its number of elements; None: on ``device``.
            shared: that of the engine's other context; None: a new one.
        """
        self.groups = groups
        self.device = device
        self.reader = reader
        self.shared = shared or SharedState()
        self._placement_for = placement_for

    def set_gathers_for_operations(self, gathers: bool) -> None:
        """Let operations on released parameters gather them, or raise on the rank that calls them."""
        self.shared.gathers_for_operations = gathers

    def placement_of(self, numel: int) -> Placement:
        """Return the placement of a shard of ``numel`` elements."""
        return Placement(self.device) if self._placement_for is None else self._placement_for(numel)

    # ---------------------------------------------------------------- connections to the engine

    @property
    def coordinator(self) -> PartitionedParameterCoordinator | None:
        """The coordinator of the engine that has these parameters; None without an engine."""
        return self.shared.coordinator()

    @property
    def initialising(self) -> Initialising | None:
        """The context in which these parameters, without an engine, are being initialised; None outside of one."""
        return initialisations[-1] if initialisations and self.shared.coordinator() is None else None

    def set_coordinator(self, coordinator: PartitionedParameterCoordinator) -> None:
        """Set the coordinator that gathers these parameters from now on. Called by its constructor."""
        self.shared.coordinator = weakref.ref(coordinator)  # parameters may outlive their engine

    def set_reader(self, reader: ShardReader | None) -> None:
        """Set the reader of offloaded shards; None if all shards are on the device."""
        self.reader = reader

    def suspend(self, why: str) -> None:
        """Refuse all gathers with the reason ``why`` from now on; "" ends it."""
        self.shared.suspended = why

    def on_update(self) -> None:
        """Count an update, in which the engine has given shards new values."""
        self.shared.updates += 1
        for sharded_param in list(self.shared.gathered_by_user):
            if sharded_param.status is not AVAILABLE:  # the engine has released it since
                self.shared.gathered_by_user.discard(sharded_param)

    def on_allocation(self) -> None:
        """Count that a parameter has got another tensor for its full values."""
        self.shared.allocations += 1

    # ---------------------------------------------------------------- gathers

    @collective
    def issue_all_gather(self, sharded_params: Sequence[PartitionedParameter]) -> None:
        """Launch one all-gather of parameters that are not available."""
        self.note_gather(sharded_params)
        # The others have their full values in their shard.
        to_gather = [sharded_param for sharded_param in sharded_params if sharded_param.storage is not None]
        fulls = [sharded_param.full for sharded_param in to_gather]
        try:
            for sharded_param in to_gather:
                resize(sharded_param.storage, sharded_param.nbytes)  # type: ignore[arg-type]
            if listeners:
                for sharded_param in to_gather:
                    tag_memory(sharded_param.full, PERSISTENT if sharded_param.persistent else GATHERED)
            all_gather = AllGather(self, sharded_params, to_gather, fulls)
        except BaseException:
            for sharded_param in sharded_params:
                sharded_param.free_full_values()
            raise
        for sharded_param in sharded_params:
            sharded_param.set_in_flight(all_gather)

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
    def gather_copies(self, sharded_params: Sequence[PartitionedParameter]) -> list[torch.Tensor]:
        """Return copies of the full values, each flat and with padding. No parameter changes its state."""
        copies, all_gather = self.launch_copies(sharded_params)
        if all_gather is not None:
            all_gather.wait_for_values()
        return copies

    @collective
    @torch.inference_mode(False)  # the copies may outlive the user's inference mode
    def launch_copies(
        self, sharded_params: Sequence[PartitionedParameter]
    ) -> tuple[list[torch.Tensor], AllGather | None]:
        """Launch a gather of copies of the full values, each flat and with padding. No parameter changes its state.

        Returns:
            The copies, and what to wait for before they are read; None if nothing is in flight.
        """
        for sharded_param in sharded_params:
            if sharded_param.pending is not None:
                sharded_param.pending.wait()
        if released := [sharded_param for sharded_param in sharded_params if sharded_param.status is not AVAILABLE]:
            self.note_gather(released)
        copies = [p.full.clone() if p.has_full_values else p.full.new_empty(p.full.shape) for p in sharded_params]
        missing = [index for index, sharded_param in enumerate(sharded_params) if not sharded_param.has_full_values]
        if not missing:
            return copies, None
        to_gather, fulls = [sharded_params[index] for index in missing], [copies[index] for index in missing]
        for full in fulls:
            tag_memory(full, GATHERED)
        return copies, AllGather(self, to_gather, to_gather, fulls)

    def note_gather(self, sharded_params: Sequence[PartitionedParameter]) -> None:
        """Report a launch to the schedule, which hashes all gathers, and wait for what an update still sends to the
        shards. Raises RuntimeError while gathers are suspended."""
        coordinator = self.shared.coordinator()
        if coordinator is not None:
            coordinator.schedule.note_gather(sharded_params[0].index + 1, len(sharded_params))
            if coordinator.param_gatherer.pending:
                coordinator.wait_for_shards(sharded_params)
        if self.shared.suspended:
            raise RuntimeError(self.shared.suspended)

    # ---------------------------------------------------------------- gather contexts

    @collective
    def pin(self, sharded_params: Sequence[PartitionedParameter]) -> None:
        """Gather ``sharded_params`` and keep them available until :meth:`unpin`; calls nest."""
        self.gather(sharded_params)
        new = [sharded_param for sharded_param in sharded_params if sharded_param.pin()]
        coordinator = self.shared.coordinator()
        if coordinator is not None:
            coordinator.schedule.pin([sharded_param.index for sharded_param in new])
        for sharded_param in sharded_params:
            restore_class(sharded_param.parameter)  # it may be hidden

    @collective
    def unpin(self, sharded_params: Sequence[PartitionedParameter]) -> None:
        """End one :meth:`pin`, and release those that nothing else needs."""
        ended = [sharded_param for sharded_param in sharded_params if sharded_param.unpin()]
        for sharded_param in ended:
            sharded_param.mark_seen()  # the context has written or dropped what was changed in it
        coordinator = self.shared.coordinator()
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
    by_context: dict[CommContext, list[PartitionedParameter]] = {}
    for sharded_param in sharded_params:
        by_context.setdefault(sharded_param.context, []).append(sharded_param)
    return list(by_context.items())
