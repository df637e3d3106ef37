"""Construction of an engine from config and model."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from zerolite.access.parameter_access import ParameterAccess
from zerolite.access.pending_gradients import PendingGradients
from zerolite.activation_checkpointing import Attached, attach
from zerolite.checkpoint.checkpointer import Checkpointer
from zerolite.checkpoint.engine_components import EngineComponents
from zerolite.checkpoint.model_state import ModelState
from zerolite.comm import (
    Communicator,
    HostGroup,
    HostMaximum,
    Topology,
    check_is_enabled,
    raise_together,
)
from zerolite.config import ZeroliteConfig
from zerolite.data.dataloader import Loaders
from zerolite.data.micro_batch import LossFunction
from zerolite.diagnostics.rank_comparison import check_initialize, check_made_optimizer
from zerolite.diagnostics.same_inputs import SameInputs
from zerolite.engine.arguments import (
    OptimizerLike,
    check_not_wrapped,
    check_states,
    choose_optimizer,
    freeze,
    param_groups_of,
    scheduler_of,
)
from zerolite.engine.build_observers import observe_steps
from zerolite.engine.build_stage3 import start_stage3
from zerolite.engine.build_step import Setup, StepComponents
from zerolite.engine.compiling import warn_if_compiled_whole
from zerolite.engine.components import Components, EngineRef, ModuleCall
from zerolite.engine.connections import check_collectives, connect_backward, watch_loading
from zerolite.engine.decisions import (
    precision_of,
)
from zerolite.engine.ending import end_with
from zerolite.engine.engine import Engine
from zerolite.engine.evaluation_engine import CheckBeforeForward, EvaluationEngine, check_frozen
from zerolite.engine.full_state import FullState
from zerolite.engine.local_runner import LocalRunner
from zerolite.engine.monitoring import Monitoring
from zerolite.engine.notices import LearningRateSchedule, PipelineLoss, Progress
from zerolite.engine.pipeline_engine import PipelineEngine, PipelineEvaluationEngine, refuse
from zerolite.engine.program_collectives import ProgramCollectives
from zerolite.engine.state_offload import StateOffload
from zerolite.engine.unfrozen_params import UnfrozenParams
from zerolite.monitor.memory_report import TensorOwners
from zerolite.optim.muon import muon_groups
from zerolite.precision.dtypes import GraphBoundary, scales_of_quantized
from zerolite.precision.fp32_modules import Fp32Modules
from zerolite.zero.flat import check_has_memory
from zerolite.zero.stage3.partitioned_model import unpartition_model
from zerolite.zero.stages import STAGES

if TYPE_CHECKING:
    from zerolite.pipe.prepare import PreparedStage
    from zerolite.pipe.runner import PipelineRunner

logger = logging.getLogger("zerolite")


def check_model(model: object) -> None:
    """Raise ValueError if ``model`` is no module, or is wrapped already."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"zerolite.initialize: expected model to be a torch.nn.Module, got {type(model).__name__}")
    check_not_wrapped(model)


@dataclass(frozen=True)
class Arguments:
    """Arguments of :func:`initialize` beside model, config and dataset, as they are given."""

    optimizer: OptimizerLike | None = None
    model_parameters: Iterable[Any] | None = None
    lr_scheduler: Any = None
    broadcast_buffers: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None


def build_engine(
    model: torch.nn.Module,
    resolved: ZeroliteConfig,
    arguments: Arguments,
    topology: Topology,
    device: torch.device,
    kind: str | None = None,
    staged: PreparedStage | None = None,
    loss_fn: LossFunction | None = None,
) -> Engine:
    """Make the engine of ``model`` on ``device``. Called on all ranks, with equal arguments.

    Args:
        model: this rank's part of the full model.
        resolved: the config, resolved for the number of data ranks in ``topology``.
        kind: type of device whose rules of memory apply; default: that of ``device``. A dry run for CUDA has its
            tensors on the CPU, and passes "cuda".
        staged: the pipeline stage, if ``model`` is one.
        loss_fn: function from (outputs, targets) to a scalar, for ``engine.train_batch``.
    """
    comm = topology.data
    optimizer, model_parameters = arguments.optimizer, arguments.model_parameters
    policy = STAGES[resolved.zero_optimization.stage]
    precision = precision_of(resolved)
    fp32 = Fp32Modules(model, resolved.fp32_modules, precision.compute, precision.autocast, device.type)
    precision = dataclasses.replace(precision, keeps_fp32=fp32.holds, keeps_dtype=scales_of_quantized(model))
    trains = optimizer is not None or resolved.optimizer is not None
    if trains:
        groups = param_groups_of(model, optimizer, model_parameters, staged is not None)
        if optimizer is None and resolved.optimizer is not None and resolved.optimizer.type.lower() == "muon":
            groups = muon_groups(model, groups)
    else:
        groups = freeze(model, resolved, model_parameters, arguments.lr_scheduler)
    others = {"broadcast_buffers": arguments.broadcast_buffers, "lr_scheduler": arguments.lr_scheduler}
    for name, parameter in model.named_parameters():
        check_has_memory(name, parameter)
    check_initialize(resolved, model, optimizer, groups, comm, device, **others)
    if not policy.shard_parameters:
        unpartition_model(model)
    chosen = choose_optimizer(optimizer, resolved, policy, groups, topology.tensor.world_size > 1)
    if chosen.existing is not None and chosen.existing is not optimizer:  # a function has made it just now
        check_made_optimizer(chosen.existing, model, comm, device)
    if chosen.existing is not None:
        any_shape, error = chosen.whole or not policy.shard_optimizer, None
        try:
            check_states(chosen.existing, model, any_shape)
        except ValueError as wrong:
            error = wrong
        raise_together(topology.world, device, "errors", error, "zerolite.initialize", ValueError)
    if chosen.untested and comm.main:
        logger.warning(
            "zero_allow_untested_optimizer: this optimizer updates flat parts of parameters. If an update depends on "
            "more than the element's own gradient and state (norms, rows and columns), its results are wrong"
        )
    if comm.main and comm.world_size > 1:
        warn_if_compiled_whole(model, policy.shard_parameters)
    adopts = not isinstance(optimizer, torch.optim.Optimizer) and model_parameters is None
    kind, whole = kind or device.type, chosen.whole
    setup = Setup(model, resolved, policy, precision, fp32, topology, device, kind, staged, trains, whole)
    parts = StepComponents(setup, chosen.make, groups)
    scheduler = scheduler_of(arguments.lr_scheduler, resolved, parts.sharded)
    loaders = _make_loaders(parts, arguments.collate_fn)
    return _make_engine(parts, adopts, arguments.broadcast_buffers, loss_fn, scheduler, loaders)


_NOT_IN_P_GRAD = (
    "with tensor_parallel or a pipeline a rank has a part of the model only. To clip, set gradient_clipping in the "
    "config, or call engine.clip_gradients(max_norm), which returns the norm; to read or change it, use "
    "zerolite.get_full_grad(p) and zerolite.set_full_grad(p, value) on all ranks"
)


def _make_engine(
    parts: StepComponents,
    adopts: bool,
    broadcast_buffers: bool,
    loss_fn: LossFunction | None,
    scheduler: object,
    loaders: Loaders,
) -> Engine:
    """Install the hooks and make the complete engine. Called on all ranks.

    Args:
        adopts: parameters that are unfrozen later join the only param group.
    """
    setup, pipeline, observers = parts.setup, parts.pipeline, parts.observers
    topology = setup.topology
    reference = EngineRef()
    boundary = connect_backward(
        pipeline, parts.reducer, parts.param_gatherer, parts.scaler, setup.precision, setup.model, observers
    )
    call = ModuleCall(setup.model)
    _watch_program(parts, call)
    schedule = LearningRateSchedule(scheduler, pipeline.state)
    attached, monitoring, hooks = _watch_model(parts, reference, call, schedule)
    coordinator = None
    if parts.partitioned is not None:
        coordinator = start_stage3(parts.partitioned, pipeline, parts.reducer, observers)
        hooks += parts.partitioned.hooks
    observe_steps(parts, coordinator)
    owners = _tensor_owners(parts, attached)
    offload = StateOffload(owners, pipeline, coordinator)
    owners = dataclasses.replace(owners, offloaded=offload.memory)
    monitoring.watch_memory(owners)
    access = ParameterAccess(pipeline, parts.reducer, parts.buffer, parts.sharded, topology)
    checkpointer = _make_checkpointer(parts, reference, adopts, loaders, schedule)
    refusal = "" if topology.trivial else _NOT_IN_P_GRAD
    shard = parts.rank_groups.shard
    components = Components(
        module=setup.model,
        config=setup.config,
        device=setup.device,
        topology=topology,
        precision=setup.precision,
        pipeline=pipeline,
        reducer=parts.reducer,
        param_gatherer=parts.param_gatherer,
        optimizer=parts.sharded,
        accumulation=parts.accumulation,
        boundary=boundary,
        reference=reference,
        call=call,
        same_inputs=_same_inputs(parts),
        runner=_make_runner(parts, reference, boundary),
        coordinator=coordinator,
        tensor_owners=owners,
        state_offload=offload,
        activation_checkpointing=attached,
        parameter_access=access,
        pending_gradients=PendingGradients(pipeline, parts.reducer, shard, setup.device, access.gather, refusal),
        checkpointer=checkpointer,
        full_state=FullState(parts.param_gatherer, setup.precision, checkpointer.components, access),
        monitor=monitoring.monitor,
        step_log=monitoring.log if monitoring.monitor.enabled else None,
        comms_logger=monitoring.comms_logger,
        loaders=loaders,
        broadcast_buffers=broadcast_buffers,
        loss_fn=loss_fn,
        schedule=schedule,
    )
    engine = _engine_class(setup)(components)
    reference.finalizers += monitoring.end_with(engine)
    end_with(reference, parts, offload, hooks)
    if check_is_enabled(setup.config.check_collectives):
        check_collectives(reference, topology, coordinator)
    monitoring.watch_communication(topology, coordinator)
    return engine


def _watch_program(parts: StepComponents, call: ModuleCall) -> None:
    """Let the reducer know if the program communicates within backwards, where it waits for reductions inside them."""
    setup, reducer = parts.setup, parts.reducer
    communicates = setup.config.zero_optimization.collectives_in_backward
    if parts.partitioned is not None:
        return  # all ranks launch in one order there, with the program's collectives at the same places
    if communicates is not None:
        reducer.program_communicates = communicates
    elif setup.trains and parts.comm.group is not None and parts.comm.world_size > 1:
        parts.observers.add(ProgramCollectives(reducer, call, logs=parts.comm.main))


def _engine_class(setup: Setup) -> type[Engine]:
    if setup.staged is not None:
        return PipelineEngine if setup.trains else PipelineEvaluationEngine
    return Engine if setup.trains else EvaluationEngine


def _watch_model(
    parts: StepComponents, reference: EngineRef, call: ModuleCall, schedule: LearningRateSchedule
) -> tuple[Attached, Monitoring, list[RemovableHandle]]:
    """Install the hooks on the model that come before those of stage 3, and the observers; return the hooks."""
    setup, observers = parts.setup, parts.observers
    hooks = watch_loading(setup.model, parts.pipeline)
    if not setup.trains:
        hooks.append(CheckBeforeForward().install(setup.model.register_forward_pre_hook))
    # Activation checkpointing comes before all other forward hooks, which then run as they would if the model itself
    # called the checkpoint function.
    tensor = setup.topology.tensor if setup.topology.tensor.world_size > 1 else None
    attached = attach(setup.model, setup.config.activation_checkpointing, setup.device, tensor)
    hooks += attached.handles
    if setup.topology.world.rank == 0:
        observers.add(Progress(reference))
    monitoring = Monitoring(
        setup.config, setup.topology, setup.device, parts.pipeline.state, observers, parts.sharded, parts.scaler
    )
    hooks += monitoring.watch_module(setup.model, call)
    observers.add(schedule)  # after the monitors, which log the learning rates of the step
    setup.fp32.attach()
    return attached, monitoring, hooks


def _tensor_owners(parts: StepComponents, attached: Attached) -> TensorOwners:
    return TensorOwners(
        parts.setup.model,
        parts.buffer,
        parts.reducer,
        parts.sharded,
        parts.comm,
        parts.setup.device,
        parts.transfers,
        other_comms=functools.partial(_other_communicators, parts),
        activations=attached.memory,
    )


def _other_communicators(parts: StepComponents) -> list[Communicator]:
    """Return the communicators whose memory no other part of the engine counts."""
    topology = parts.setup.topology
    shared = [] if parts.shared_grads is None else parts.shared_grads.comms
    return [topology.world, topology.pipe, *topology.communicators().values(), *shared]


def _make_loaders(parts: StepComponents, collate_fn: Callable[[list[Any]], Any] | None) -> Loaders:
    config, device = parts.setup.config, parts.setup.device
    size, drops = config.train_micro_batch_size_per_gpu, config.dataloader_drop_last
    return Loaders(parts.comm, parts.accumulation, device.type, size, drops, collate_fn)


def _make_checkpointer(
    parts: StepComponents, reference: EngineRef, adopts: bool, loaders: Loaders, schedule: LearningRateSchedule
) -> Checkpointer:
    """Make the checkpointer, and connect everything that must know when a parameter becomes trainable."""
    setup, pipeline, observers = parts.setup, parts.pipeline, parts.observers
    event = observers.before_backward if parts.partitioned is None else observers.before_forward
    unfrozen = UnfrozenParams(parts, reference, adopts, event if setup.trains else [])
    register = unfrozen.register_unfrozen_params
    if not setup.trains:
        register = functools.partial(check_frozen, setup.model)
        event.append(register)
    step = None if setup.staged is None else functools.partial(refuse, "engine.optimizer.step")
    topology = setup.topology
    grid = {} if topology.trivial else {"tensor": topology.tensor.rank, "pipe": topology.pipe.rank}

    def raise_on_all(error: ValueError | None) -> None:
        raise_together(topology.world, setup.device, "verify", error, "engine.optimizer.load_state_dict", ValueError)

    parts.sharded.connect(pipeline, unfrozen.add_group, schedule.settle, step, raise_together=raise_on_all, grid=grid)
    tensors = ModelState(setup.model, parts.buffer, parts.sharded, parts.rank_groups, setup.topology)
    host = HostGroup(setup.topology.world, "checkpoint")
    return Checkpointer(EngineComponents(tensors, pipeline, setup.config, setup.device, host, register), loaders)


def _same_inputs(parts: StepComponents) -> SameInputs | None:
    tensor = parts.setup.topology.tensor
    if tensor.world_size == 1:
        return None
    compares_shapes = tensor.group is not None and parts.setup.device.type == "cpu"
    return SameInputs(parts.note_inputs, tensor, HostMaximum(tensor) if compares_shapes else None)


def _make_runner(parts: StepComponents, reference: EngineRef, boundary: GraphBoundary) -> LocalRunner | PipelineRunner:
    setup = parts.setup
    if setup.staged is None:
        return LocalRunner(reference, parts.accumulation, parts.comm, setup.device)
    from zerolite.pipe.step import RunnerComponents  # only where there is a pipeline

    components = RunnerComponents(
        pipeline=parts.pipeline,
        accumulation=parts.accumulation,
        reducer=parts.reducer,
        precision=setup.precision,
        boundary=boundary,
        topology=setup.topology,
        device=setup.device,
        micro_batches=setup.config.gradient_accumulation_steps or 1,
        loss_fn=setup.staged.loss_fn,
        note_inputs=parts.note_inputs,
        on_loss=PipelineLoss(reference),
    )
    return setup.staged.runner(components)
