"""The parts of one engine: one record, made once, on which everything about that engine works."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerolite.comm import Topology
from zerolite.config import ZeroliteConfig
from zerolite.offload.transfers import Transfers
from zerolite.precision.dtypes import GraphBoundary, Precision
from zerolite.precision.loss_scaler import LossScaler
from zerolite.zero.accumulation import GradAccumulation
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.groups import RankGroups
from zerolite.zero.observers import Observers
from zerolite.zero.optimizer import ShardedOptimizer
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.reducer import Reducer
from zerolite.zero.stage3.partitioned_model import PartitionedModel
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.step import StepPipeline


class ModuleCall:
    """The function that an engine's forward calls: its module, or an observer around it."""

    __slots__ = ("__weakref__", "call_module")

    def __init__(self, module: torch.nn.Module) -> None:
        self.call_module: Callable[..., Any] = module

    def replace(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Call ``function`` from now on, and return the function that was called before."""
        before, self.call_module = self.call_module, function
        return before


@dataclass(eq=False)
class EngineParts:
    """All parts of one engine. Nothing in it knows the engine, so only the user keeps an engine alive.

    Attributes:
        model: the user's module, whose parameters have been moved into buckets.
        config: resolved for the number of data-parallel ranks.
        topology: the grid of ranks.
        groups: the groups of ranks behind the trained parameters.
        trains: False for an engine without an optimizer, whose parameters are frozen.
        owned: parameters that belong to the engine: the trained ones, or without an optimizer all of them.
        scaler: the fp16 loss scale; None in other precisions.
        pipeline: the order of a step.
        partitioned: the partitioned model at stage 3, else None.
        boundary: the edge of the model's graph.
        call: what a forward of the engine calls.
        note_inputs: notes the inputs of a forward, which ranks that are given the same ones compare in the next
            statistics; None if there are no such ranks.
        memory_sources: functions that return (memory item, tensor) for memory beside the parts above.
    """

    model: torch.nn.Module
    config: ZeroliteConfig
    topology: Topology
    groups: RankGroups
    device: torch.device
    precision: Precision
    trains: bool
    owned: list[torch.nn.Parameter]
    transfers: Transfers
    buffer: ParameterBuffer
    reducer: Reducer
    optimizer: ShardedOptimizer
    param_gatherer: ParamGatherer
    accumulation: GradAccumulation
    scaler: LossScaler | None
    pipeline: StepPipeline
    observers: Observers
    partitioned: PartitionedModel | None
    boundary: GraphBoundary
    call: ModuleCall
    note_inputs: Callable[[Iterable[torch.Tensor]], None] | None
    memory_sources: list[Callable[[], Iterable[tuple[str, torch.Tensor]]]] = field(default_factory=list)

    @property
    def coordinator(self) -> PartitionedParameterCoordinator | None:
        """The coordinator that gathers and releases parameters at stage 3."""
        return None if self.partitioned is None else self.partitioned.coordinator
