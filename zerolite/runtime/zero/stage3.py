"""Stage 3, composed: a model's parameters partitioned, grouped in units, and gathered around their uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerolite.comm import Communicator
from zerolite.runtime.zero.fetch_schedule import FetchLimits
from zerolite.runtime.zero.layout import PartitionLayout
from zerolite.runtime.zero.module_hooks import UnitPlan, attach, plan_units
from zerolite.runtime.zero.partition_parameters import partition_model
from zerolite.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.runtime.zero.partitioned_parameter import PartitionedParameter, gather, handle_of, whole_numel


@dataclass(frozen=True)
class Stage3Options:
    """Sizes in elements. persistence: parameters of at most so many stay whole, up to model_persistence in all (None:
    no limit). granularity: subtrees of at most so many are one unit; is_leaf(name, module): so is this one."""

    persistence: int
    model_persistence: int | None
    granularity: int
    is_leaf: Callable[[str, torch.nn.Module], bool]
    limits: FetchLimits


class PartitionedModel:
    """A model at stage 3, in the order in which it is built: partitioned, then planned, then started. All of it is
    called on all ranks in the same order."""

    def __init__(self, model: torch.nn.Module, comm: Communicator, gathers: Communicator, device: torch.device) -> None:
        """Partition what is not partitioned yet; ``gathers`` is the communicator of the gathers."""
        self.model = model
        partition_model(model, comm, device)
        self.parameters = list(model.parameters())
        self.handles: list[PartitionedParameter] = []
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter in self.parameters:
            handle = handle_of(parameter)
            assert handle is not None, "partition_model has partitioned it"
            handle.comm, handle.name = gathers, names[id(parameter)]
            handle.persistent, handle.manager, handle.on_written = False, None, None
            handle.release()
            self.handles.append(handle)

    def plan(self, options: Stage3Options) -> list[UnitPlan]:
        """Choose what stays whole and what is gathered together."""
        left = options.model_persistence
        for handle in self.handles:
            if handle.numel <= options.persistence and (left is None or handle.numel <= left):
                handle.persistent = True
                left = None if left is None else left - handle.numel
        self.plans = plan_units(self.model, options.is_leaf, options.granularity)
        self._limits = options.limits
        return self.plans

    def start(self) -> PartitionedParameterCoordinator:
        """Gather what stays whole, install the hooks. Shards are where they belong by now."""
        gather([handle for handle in self.handles if handle.persistent])
        index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        units = [[index_of[id(parameter)] for parameter in plan.parameters] for plan in self.plans]
        names = [plan.name for plan in self.plans]
        self.coordinator = PartitionedParameterCoordinator(self.handles, names, units, self._limits)
        self.hooks: list[Any] = attach(self.model, self.plans, self.coordinator)
        return self.coordinator


def bucket_groups(trained: Sequence[torch.nn.Parameter], plans: Sequence[UnitPlan], limit: int) -> list[list[int]]:
    """Indices into ``trained`` by what is reduced together: the parameters of a unit; those that stay whole in groups
    of at most ``limit`` elements (or one parameter)."""
    unit_of = _first_units(plans)
    groups: list[list[int]] = []
    of_unit: dict[int, list[int]] = {}
    free: list[int] | None = None  # the group that small parameters fill
    size = 0
    for index, parameter in enumerate(trained):
        numel = whole_numel(parameter)
        unit = unit_of.get(id(parameter))
        if unit is not None:
            if unit not in of_unit:
                of_unit[unit] = []
                groups.append(of_unit[unit])
            of_unit[unit].append(index)
            continue
        if free is None or size + numel > limit:
            free, size = [], 0
            groups.append(free)
        free.append(index)
        size += numel
    return groups


def units_of_buckets(
    layout: PartitionLayout, trained: Sequence[torch.nn.Parameter], plans: Sequence[UnitPlan]
) -> list[int | None]:
    """The unit of each bucket made from :func:`bucket_groups`; None for parameters that stay whole, or that several
    units have."""
    unit_of = _first_units(plans)
    counts = Counter(id(parameter) for plan in plans for parameter in plan.parameters)
    units: list[int | None] = []
    for bucket in layout.buckets:
        members = [id(trained[slot.index]) for slot in bucket.slots]
        units.append(None if any(counts[member] > 1 for member in members) else unit_of.get(members[0]))
    return units


def _first_units(plans: Sequence[UnitPlan]) -> dict[int, int]:
    unit_of: dict[int, int] = {}
    for index, plan in enumerate(plans):
        for parameter in plan.parameters:
            unit_of.setdefault(id(parameter), index)
    return unit_of


def make_whole(model: torch.nn.Module) -> None:
    """Turn all partitioned parameters of ``model`` into ordinary ones. Called on all ranks, in the same order."""
    for parameter in model.parameters():
        handle = handle_of(parameter)
        if handle is not None:
            handle.make_whole()
