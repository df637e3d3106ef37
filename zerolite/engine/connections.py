"""Connections of an engine's parts: the model's hooks, and the checks of collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from zerolite.comm import CollectiveCheck, Topology
from zerolite.diagnostics.stack_report import Names
from zerolite.engine.components import EngineRef
from zerolite.precision.dtypes import GraphBoundary, Precision
from zerolite.precision.loss_scaler import LossScaler
from zerolite.utils.module_hook import WeakHook
from zerolite.zero.observers import Observers
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.reducer import Reducer
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.step import StepPipeline


def connect_backward(
    pipeline: StepPipeline,
    reducer: Reducer,
    param_gatherer: ParamGatherer,
    scaler: LossScaler | None,
    precision: Precision,
    model: torch.nn.Module,
    observers: Observers,
) -> GraphBoundary:
    """Install the hooks through which a backward reaches the pipeline, and return the edge of the model's graph."""
    boundary = GraphBoundary(pipeline.begin_backward, pipeline.state.loss_scale if scaler else None, precision)
    if scaler:
        observers.on_backward_begin.append(boundary.expect_scale)
    reducer.attach(
        pipeline.begin_backward,
        boundary.check_scaled if scaler else None,
        param_gatherer.on_gradient if param_gatherer.overlaps else None,
    )
    param_gatherer.install_hooks(model)
    return boundary


def check_collectives(
    engine_ref: EngineRef, topology: Topology, coordinator: PartitionedParameterCoordinator | None
) -> None:
    """Compare the collectives of all communicators between their ranks before they are launched."""

    def names_of(gathered: bool, key: int) -> list[str]:
        engine = engine_ref()
        if engine is None:
            return []
        names = Names(engine)
        return names.of_parameter(key) if gathered else names.of_bucket(key)

    watched = topology.communicators()
    if coordinator is not None and coordinator.comm is not topology.data:
        watched["gathers of parameters"] = coordinator.comm
    for label, other in watched.items():
        if other.group is not None and other.world_size > 1:
            other.watch(CollectiveCheck(other, label, names_of))


def watch_loading(model: torch.nn.Module, pipeline: StepPipeline) -> list[RemovableHandle]:
    """Install hooks that tell the pipeline when ``load_state_dict`` of the model, or of a part of it, has changed
    parameters."""
    return [_AfterLoading(pipeline).install(m.register_load_state_dict_post_hook) for m in model.modules()]


class _AfterLoading(WeakHook[StepPipeline]):
    def __call__(self, module: torch.nn.Module, keys: object) -> None:
        pipeline = self.owner()
        if pipeline is not None:
            pipeline.written.on_loaded(module.parameters())


def remove_hooks(*lists: list[Any]) -> None:
    for handle in [handle for handles in lists for handle in handles]:
        handle.remove()
