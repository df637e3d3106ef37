"""Components of an engine, made by build.py before the engine is."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from zerolite.access.parameter_access import ParameterAccess
from zerolite.access.pending_gradients import PendingGradients
from zerolite.activation_checkpointing import Attached
from zerolite.checkpoint.checkpointer import Checkpointer
from zerolite.comm import Topology
from zerolite.config import ZeroliteConfig
from zerolite.data.dataloader import Loaders
from zerolite.data.micro_batch import LossFunction
from zerolite.diagnostics.same_inputs import SameInputs
from zerolite.engine.full_state import FullState
from zerolite.engine.state_offload import StateOffload
from zerolite.monitor import Monitor, StepLog
from zerolite.monitor.comms_logger import CommsLogger
from zerolite.monitor.memory_report import TensorOwners
from zerolite.precision.dtypes import GraphBoundary, Precision
from zerolite.zero.accumulation import GradAccumulation
from zerolite.zero.optimizer import ShardedOptimizer
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.reducer import Reducer
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.step import StepPipeline

if TYPE_CHECKING:
    from zerolite.engine.engine import Engine
    from zerolite.engine.local_runner import LocalRunner
    from zerolite.engine.notices import LearningRateSchedule
    from zerolite.pipe.runner import PipelineRunner


class EngineRef:
    """Weak reference to an engine, made before the engine is. A call returns the engine; None before it is made and
    after its end.

    Nothing but the user's own references keeps an engine alive. It ends when they are gone, or by :meth:`end`.

    Attributes:
        finalizers: what the end of the engine runs, in order.
        destroyed: the user has called :meth:`end`.
        refusals: hooks that refuse gradients after the end, until another engine takes the parameters.
    """

    def __init__(self) -> None:
        self._ref: weakref.ref[Engine] | None = None
        self.finalizers: list[weakref.finalize[..., Any]] = []
        self.destroyed = False
        self.refusals: list[RemovableHandle] = []

    def bind(self, engine: Engine) -> None:
        """Bind the components; called by the engine's constructor."""
        self._ref = weakref.ref(engine)

    def end(self) -> None:
        """End the engine, even if something still refers to it. May be called twice."""
        self.destroyed = True
        for finalizer in self.finalizers:
            alive = finalizer.detach()
            if alive is not None:
                _, function, args, _ = alive
                function(*args)
        self._ref = None

    def __call__(self) -> Engine | None:
        return None if self._ref is None else self._ref()


class ModuleCall:
    """The function that an engine's forward calls: its module, or a counter of FLOPs around it."""

    __slots__ = ("__weakref__", "call_module")

    def __init__(self, module: torch.nn.Module) -> None:
        self.call_module: Callable[..., Any] = module

    def replace(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Call ``function`` from now on, and return the function that was called before."""
        before, self.call_module = self.call_module, function
        return before


@dataclass(frozen=True)
class Components:
    """Everything that an engine consists of.

    Attributes:
        module: the user's module, whose parameters have been moved into buffers and buckets.
        topology: the grid of ranks; ``topology.data`` has the data-parallel ones.
        reference: weak reference to the engine, for hooks that outlive it.
        call: the function that the forward calls.
        same_inputs: compares inputs if ranks share layers, else None.
        runner: runs whole steps.
        coordinator: gathers and releases parameters at stage 3, else None.
        tensor_owners: components that hold tensors.
        step_log: on rank 0, if a monitor is enabled.
        broadcast_buffers: send rank 0's buffers before each training forward.
        loss_fn: the loss function given to ``initialize``.
        schedule: steps the learning rates after every update.
    """

    module: torch.nn.Module
    config: ZeroliteConfig
    device: torch.device
    topology: Topology
    precision: Precision
    pipeline: StepPipeline
    reducer: Reducer
    param_gatherer: ParamGatherer
    optimizer: ShardedOptimizer
    accumulation: GradAccumulation
    boundary: GraphBoundary
    reference: EngineRef
    call: ModuleCall
    same_inputs: SameInputs | None
    runner: LocalRunner | PipelineRunner
    coordinator: PartitionedParameterCoordinator | None
    tensor_owners: TensorOwners
    state_offload: StateOffload
    activation_checkpointing: Attached
    parameter_access: ParameterAccess
    pending_gradients: PendingGradients
    checkpointer: Checkpointer
    full_state: FullState
    monitor: Monitor
    step_log: StepLog | None
    comms_logger: CommsLogger | None
    loaders: Loaders
    broadcast_buffers: bool
    loss_fn: LossFunction | None
    schedule: LearningRateSchedule
