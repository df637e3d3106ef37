"""Stage 3 model: partitioned parameters, parameter groups, hooks and coordinator in one object."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zerolite.comm import collective
from zerolite.offload.placement import HostPlacement, Placements
from zerolite.offload.transfers import Transfers
from zerolite.utils.memory_tags import COMPUTE, DEVICE
from zerolite.zero.groups import RankGroups
from zerolite.zero.stage3.fetch_plan import FetchLimits
from zerolite.zero.stage3.gathered_parameters import check_not_gathered
from zerolite.zero.stage3.group_plan import LeafRule, bucket_groups, plan_param_groups
from zerolite.zero.stage3.module_hooks import install_hooks
from zerolite.zero.stage3.param_group import CommContext, ParamGroup, group_by_context
from zerolite.zero.stage3.partition_parameters import partition, partition_model
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter, sharded_param_of
from zerolite.zero.stage3.shard_reader import ShardReader

if TYPE_CHECKING:
    from zerolite.zero.engine_parts import EngineParts


@dataclass(frozen=True)
class Stage3Options:
    """Options of stage 3, with sizes in elements.

    Attributes:
        persistence: size up to which a parameter is persistent.
        model_persistence: limit of all persistent parameters together; None for no limit.
        granularity: size up to which a subtree of modules is one parameter group.
        blocks: True if each repeated block is one parameter group.
        is_leaf: tells from a module and its name if the user wants it as one parameter group.
        limits: limits of the fetch schedule.
    """

    persistence: int
    model_persistence: int | None
    granularity: int
    blocks: bool
    is_leaf: LeafRule
    limits: FetchLimits


class PartitionedModel:
    """Model at stage 3. Its methods are called on all ranks: the constructor, :meth:`plan`, :meth:`place_frozen` and
    :meth:`start`, in this order."""

    def __init__(
        self,
        model: torch.nn.Module,
        groups: RankGroups,
        gathers: RankGroups,
        device: torch.device,
        placements: Placements,
        transfers: Transfers,
    ) -> None:
        """Partition the parameters that ``zero.Init`` has not partitioned, and number all of them.

        Args:
            model: the model.
            groups: groups for the initial values.
            gathers: the same groups with communicators of their own, for gathers.
            device: device of the full values.
            placements: placements of the shards.
            transfers: copies between placements.
        """
        check_not_gathered(model.parameters())
        self.model = model
        self._offloads = placements.parameters.location != DEVICE
        reader = ShardReader(placements, transfers)
        context = CommContext(groups, device)
        if self._offloads:  # partition into host memory first: the model may not fit on the device
            on_host = HostPlacement(pin=False)
            context = CommContext(groups, device, reader, lambda _: on_host)
        partition_model(model, context)
        self.context = CommContext(gathers, device, reader)
        experts = self.context
        if gathers.experts is not None:
            self.context = _WithExperts(gathers, device, reader)
            experts = CommContext(gathers.experts, device, reader, shared=self.context.shared)
        self.parameters = list(model.parameters())
        self.sharded_params: list[PartitionedParameter] = []
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter in self.parameters:
            sharded_param = sharded_param_of(parameter)
            assert sharded_param is not None, "partition_model has partitioned it"
            name, ranks = names[id(parameter)], sharded_param.groups.shard.world_size
            context = self.context if sharded_param.groups.spread == 1 else experts
            expected = context.groups.shard.world_size
            if ranks != expected:
                raise ValueError(
                    f"zerolite.initialize: expected parameter '{name}' to be split over {expected} ranks, got one "
                    f"that is split over {ranks}; give zero.Init the same config (config_dict_or_path=)"
                )
            sharded_param.attach_to_engine(context, len(self.sharded_params), name)
            self.sharded_params.append(sharded_param)

    def plan(self, options: Stage3Options) -> list[ParamGroup]:
        """Choose the persistent parameters and the parameter groups. Return the groups."""
        remaining = options.model_persistence
        for sharded_param in self.sharded_params:
            if sharded_param.context is not self.context:
                continue  # experts are large, and have other ranks than the persistent parameters together
            if sharded_param.numel <= options.persistence and (remaining is None or sharded_param.numel <= remaining):
                sharded_param.make_persistent()
                remaining = None if remaining is None else remaining - sharded_param.numel
        max_live = options.limits.max_live_numel if options.blocks else 0
        self.groups = plan_param_groups(self.model, options.is_leaf, options.granularity, max_live)
        self.limits = options.limits
        return self.groups

    @torch.no_grad()
    def place_frozen(
        self,
        trained: Collection[int],
        compute_dtype: Callable[[torch.nn.Parameter], torch.dtype],
        placements: Placements,
        limit: int,
    ) -> None:
        """Move the shards of frozen parameters to their placement. Those of a parameter group, or of persistent
        neighbours, get adjacent memory.

        Args:
            trained: ids of the trained parameters, which are left out.
            compute_dtype: gives the dtype of a parameter's shard.
            placements: placements of the shards.
            limit: most elements of full values whose shards are adjacent, unless one group has more.
        """
        frozen = [parameter for parameter in self.parameters if id(parameter) not in trained]
        by_id = dict(zip(map(id, self.parameters), self.sharded_params, strict=True))
        for bucket in bucket_groups(frozen, self.groups, limit):
            by_dtype: dict[torch.dtype, list[PartitionedParameter]] = {}
            for index in bucket:
                by_dtype.setdefault(compute_dtype(frozen[index]), []).append(by_id[id(frozen[index])])
            for dtype, sharded_params in by_dtype.items():
                _place_adjacent(sharded_params, dtype, placements)

    def start(self, parts: EngineParts) -> PartitionedParameterCoordinator:
        """Gather the persistent parameters and install the hooks. Called when all shards have their placement."""
        if not self._offloads and all(
            sharded_param.placement.location == DEVICE for sharded_param in self.sharded_params
        ):
            for context in {sharded_param.context for sharded_param in self.sharded_params}:
                context.set_reader(None)
        self.context.gather([sharded_param for sharded_param in self.sharded_params if sharded_param.persistent])
        self.coordinator = PartitionedParameterCoordinator(self, parts)
        self.hooks = install_hooks(self.model, self.groups, self.coordinator)
        return self.coordinator


class _WithExperts(CommContext):
    """Context of parameters that all data-parallel ranks shard. What it launches for experts goes over their ranks."""

    @collective
    def issue_all_gather(self, sharded_params: Sequence[PartitionedParameter]) -> None:
        for context, members in group_by_context(sharded_params):
            CommContext.issue_all_gather(context, members)


@collective
def partition_experts(
    model: torch.nn.Module, ids: Collection[int], groups: RankGroups, device: torch.device, on_host: bool
) -> None:
    """Partition the parameters of this rank's experts, before the model's others are.

    Args:
        ids: ids of these parameters.
        groups: the groups of experts.
        on_host: partition into host memory: the model may not fit on the device.
    """
    host = HostPlacement(pin=False)
    context = CommContext(groups, device, placement_for=(lambda _: host) if on_host else None)
    for name, parameter in model.named_parameters():
        if id(parameter) in ids:
            partition(parameter, name, context)


def _place_adjacent(sharded_params: Sequence[PartitionedParameter], dtype: torch.dtype, placements: Placements) -> None:
    """Move shards into one flat tensor of their placement, so that one copy stages all of them in.

    On the device each shard has its own memory instead, and is moved only if it has another dtype or placement.
    """
    numel = sum(sharded_param.shard.numel() for sharded_param in sharded_params)
    placement = placements.place_parameters(
        numel, persistent=all(sharded_param.persistent for sharded_param in sharded_params)
    )
    if placement.location == DEVICE:
        for sharded_param in sharded_params:
            if sharded_param.shard.dtype != dtype or sharded_param.placement.location != DEVICE:
                sharded_param.move_shard(placement.zeros(sharded_param.shard.numel(), dtype, COMPUTE), placement)
        return
    row = placement.zeros(numel, dtype, COMPUTE)
    start = 0
    for sharded_param in sharded_params:
        sharded_param.move_shard(row.narrow(0, start, sharded_param.shard.numel()), placement)
        start += sharded_param.shard.numel()


@collective
def unpartition_model(model: torch.nn.Module) -> None:
    """Turn all partitioned parameters of ``model`` into ordinary ones."""
    check_not_gathered(model.parameters())
    for parameter in model.parameters():
        sharded_param = sharded_param_of(parameter)
        if sharded_param is not None:
            sharded_param.unpartition()
