"""Construction of an engine from config and model."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from zerolite.access.optimizer_state import GuardedState
from zerolite.access.parameter_access import OWNERS, ParameterAccess
from zerolite.access.pending_gradients import PendingGradients
from zerolite.access.sharded_grad import ShardedGradient
from zerolite.activation_checkpointing import Attached, attach
from zerolite.checkpoint.checkpointer import Checkpointer
from zerolite.checkpoint.engine_components import EngineComponents
from zerolite.checkpoint.model_state import ModelState
from zerolite.comm import (
    Communicator,
    ControlChannel,
    HostGroup,
    Topology,
    check_is_wanted,
    second_communicator,
)
from zerolite.config import ZeroliteConfig
from zerolite.data.dataloader import Loaders
from zerolite.data.micro_batch import LossFunction
from zerolite.diagnostics.consistency import ConsistencyCheck, shared_weights
from zerolite.diagnostics.rank_comparison import check_initialize, check_made_optimizer
from zerolite.diagnostics.same_inputs import NoteInputs, SameInputs
from zerolite.diagnostics.step_checks import StepChecks
from zerolite.diagnostics.updated_weights import UpdatedWeights
from zerolite.engine.arguments import (
    OptimizerLike,
    check_not_wrapped,
    check_parameters,
    choose_optimizer,
    freeze,
    param_groups_of,
    scheduler_of,
)
from zerolite.engine.build_stage3 import (
    bucket_numel,
    launch_by_groups,
    partitioned_buffer,
    sliced_layout,
    start_stage3,
)
from zerolite.engine.components import Components, EngineRef, ModuleCall
from zerolite.engine.connections import check_collectives, connect_backward, remove_hooks, watch_loading
from zerolite.engine.decisions import (
    SKIPS_ON_DEVICE,
    communication_dtypes,
    loss_scaler,
    precision_of,
    reduction_options,
    step_options,
)
from zerolite.engine.engine import Engine
from zerolite.engine.evaluation_engine import EvaluationEngine, EvaluationPipeline, check_frozen
from zerolite.engine.full_state import FullState
from zerolite.engine.local_runner import LocalRunner
from zerolite.engine.model_parallel import GradientSums, ModelParallelStats, ModelParallelStepPipeline, counts_once
from zerolite.engine.model_values import fill_buckets, synchronize_rest
from zerolite.engine.monitoring import Monitoring
from zerolite.engine.notices import LearningRateSchedule, PipelineLoss, Progress
from zerolite.engine.pipeline_engine import PipelineEngine, PipelineEvaluationEngine, refuse
from zerolite.engine.state_offload import StateOffload
from zerolite.engine.unfrozen_params import Parameters, UnfrozenParams
from zerolite.monitor.memory_report import MemoryParts
from zerolite.offload.from_config import check_optimizer, placements_of, warn_of_few_threads
from zerolite.offload.offloaded_gradients import OffloadedGradients
from zerolite.offload.transfers import Transfers
from zerolite.optim.kernels import kernel_chooser
from zerolite.optim.muon import muon_groups
from zerolite.precision.dtypes import GraphBoundary, Precision
from zerolite.precision.fp32_modules import Fp32Modules
from zerolite.updates.staged_update import StagedSpans
from zerolite.updates.torch_update import TorchUpdate
from zerolite.utils.accelerator import host_value
from zerolite.utils.finalizers import finalize_before_exit
from zerolite.zero.accumulation import GradAccumulation
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.grad_stats import StatsCollector
from zerolite.zero.layout import AUTO_BUCKET, ParameterSpec, PartitionLayout
from zerolite.zero.observers import Observers
from zerolite.zero.outcomes import UnusedParameters
from zerolite.zero.param_gatherer import ParamGatherer
from zerolite.zero.sharded_optimizer import Groups, ShardedOptimizer
from zerolite.zero.stage3.partitioned_model import PartitionedModel, make_whole
from zerolite.zero.stage3.partitioned_parameter import handle_of, whole_numel
from zerolite.zero.stages import STAGES, StagePolicy
from zerolite.zero.step import StepPipeline

if TYPE_CHECKING:
    from zerolite.pipe.prepare import PreparedStage

_PADDED = 1.5  # warn if buckets of whole parameters have more than 1.5 times the elements of the model

logger = logging.getLogger("zerolite")


def check_model(model: object) -> None:
    """Raise ValueError if ``model`` is no module, or is wrapped already."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"zerolite.initialize: expected model to be a torch.nn.Module, got {type(model).__name__}")
    check_not_wrapped(model)


@dataclass(frozen=True)
class Arguments:
    """Arguments of :func:`initialize` beside model, config and data, as they are given."""

    optimizer: OptimizerLike | None = None
    model_parameters: Iterable[Any] | None = None
    lr_scheduler: Any = None
    broadcast_buffers: bool = False


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
    policy = STAGES[resolved.zero_optimization.chosen_stage]
    precision = precision_of(resolved)
    fp32 = Fp32Modules(model, resolved.fp32_modules, precision.compute, precision.autocast, device.type)
    precision = dataclasses.replace(precision, keeps_fp32=fp32.holds)
    trains = optimizer is not None or resolved.optimizer is not None
    if trains:
        groups = param_groups_of(model, optimizer, model_parameters, staged is not None)
        if optimizer is None and resolved.optimizer is not None and resolved.optimizer.type.lower() == "muon":
            groups = muon_groups(model, groups)
    else:
        groups = freeze(model, resolved, model_parameters, arguments.lr_scheduler)
    others = {"broadcast_buffers": arguments.broadcast_buffers, "lr_scheduler": arguments.lr_scheduler}
    check_initialize(resolved, model, optimizer, groups, comm, device, **others)
    if not policy.shard_parameters:
        make_whole(model)
    chosen = choose_optimizer(optimizer, resolved, policy, groups, topology.tensor.world_size > 1)
    if chosen.made is not None and chosen.made is not optimizer:  # a function has made it just now
        check_made_optimizer(chosen.made, model, comm, device)
    if chosen.untested and comm.main:
        logger.warning(
            "zero_allow_untested_optimizer: this optimizer updates flat parts of parameters. If an update depends on "
            "more than the element's own gradient and state (norms, rows and columns), its results are wrong"
        )
    adopts = not isinstance(optimizer, torch.optim.Optimizer) and model_parameters is None
    kind = kind or device.type
    whole = chosen.whole
    assembly = Assembly(model, resolved, policy, precision, fp32, topology, device, kind, staged, trains, whole)
    assembly.make_parts(chosen.make, groups)
    scheduler = scheduler_of(arguments.lr_scheduler, resolved, assembly.sharded)
    return assembly.make_engine(adopts, arguments.broadcast_buffers, loss_fn, scheduler)


_NOT_IN_P_GRAD = (
    "with tensor_parallel or a pipeline a rank has a part of the model only. To clip, set gradient_clipping in the "
    "config, or call engine.clip_gradients(max_norm), which returns the norm; to read or change it, use "
    "zerolite.get_full_grad(p) and zerolite.set_full_grad(p, value) on all ranks"
)

# -------------------------------------------------------------------- the parts


class Assembly:
    """Builds an engine part by part. Each method uses the parts that earlier methods have made. Called on all ranks, in
    the same order."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: ZeroliteConfig,
        policy: StagePolicy,
        precision: Precision,
        fp32: Fp32Modules,
        topology: Topology,
        device: torch.device,
        kind: str,
        staged: PreparedStage | None,
        trains: bool,
        whole: bool,
    ) -> None:
        self.trains, self.whole = trains, whole
        self.model, self.config, self.policy, self.kind = model, config, policy, kind
        self.precision, self.fp32 = precision, fp32
        self.topology, self.staged = topology, staged
        self.comm, self.device = comm, device = topology.data, device
        self.ties = {} if staged is None else {id(tie.parameter): tie for tie in staged.ties}
        self.partitioned: PartitionedModel | None = None
        self.sums: GradientSums | None = None  # where other ranks have parts of the model
        self.note_inputs: NoteInputs | None = None
        self.communication = communication_dtypes(model, config, precision, topology.data.world_size)
        self.reference = EngineRef()
        self.observers = Observers()
        self.placements = placements_of(config, device, kind, comm)
        self.transfers = Transfers(self.placements)
        if comm.main:
            warn_of_few_threads(self.placements, os.environ)

    def make_parts(self, make_inner: object, groups: Groups) -> None:
        """Make the parts of a step: buffer, reducer, optimizer and pipeline.

        Args:
            make_inner: the user's optimizer, or a function from param groups to one.
            groups: its param groups.
        """
        trained = self._trained(groups)
        self._make_buffer(trained)
        synchronize_rest(self.model, trained, self.precision, self.comm, self.device)
        self._make_pipeline(trained, make_inner, groups)

    def make_engine(
        self, adopts: bool, broadcast_buffers: bool, loss_fn: LossFunction | None, scheduler: object
    ) -> Engine:
        """Install the hooks and make the complete engine. ``adopts``: parameters that are unfrozen later join the only
        param group."""
        pipeline, topology, observers = self.pipeline, self.topology, self.observers
        boundary = connect_backward(
            pipeline, self.reducer, self.param_gatherer, self.scaler, self.precision, self.model, observers
        )
        call = ModuleCall(self.model)
        schedule = LearningRateSchedule(scheduler, pipeline.outcomes)
        attached, monitoring, hooks = self._watch_model(call, schedule)
        coordinator = None
        if self.partitioned is not None:
            coordinator = start_stage3(self.partitioned, pipeline, self.reducer, observers)
            hooks += self.partitioned.hooks
        memory = self._memory_parts(attached)
        offload = StateOffload(memory, pipeline, coordinator)
        memory = dataclasses.replace(memory, away=offload.memory)
        monitoring.watch_memory(memory)
        access = ParameterAccess(pipeline, self.reducer, self.buffer, self.sharded, topology)
        loaders = self._loaders()
        checkpointer = self._make_checkpointer(adopts, loaders, schedule)
        refusal = "" if topology.trivial else _NOT_IN_P_GRAD
        components = Components(
            module=self.model,
            config=self.config,
            device=self.device,
            topology=topology,
            precision=self.precision,
            pipeline=pipeline,
            reducer=self.reducer,
            param_gatherer=self.param_gatherer,
            optimizer=self.sharded,
            accumulation=self.accumulation,
            boundary=boundary,
            reference=self.reference,
            call=call,
            same_inputs=self._same_inputs(),
            runner=self._runner(boundary),
            coordinator=coordinator,
            memory=memory,
            state_offload=offload,
            activation_checkpointing=attached,
            parameter_access=access,
            pending_gradients=PendingGradients(pipeline, self.reducer, self.comm, self.device, access.whole, refusal),
            checkpointer=checkpointer,
            full_state=FullState(self.param_gatherer, self.precision, checkpointer.components, access),
            monitor=monitoring.monitor,
            step_log=monitoring.log if monitoring.monitor.enabled else None,
            comms_logger=monitoring.comms_logger,
            loaders=loaders,
            broadcast_buffers=broadcast_buffers,
            loss_fn=loss_fn,
            schedule=schedule,
        )
        engine: Engine
        if self.staged is not None:
            engine = (PipelineEngine if self.trains else PipelineEvaluationEngine)(components)
        else:
            engine = (Engine if self.trains else EvaluationEngine)(components)
        monitoring.end_with(engine)
        self._end_with(engine, offload, hooks)
        if check_is_wanted(self.config.check_collectives):
            check_collectives(self.reference, topology, coordinator)
        monitoring.watch_communication(topology, coordinator)
        return engine

    def _watch_model(
        self, call: ModuleCall, schedule: LearningRateSchedule
    ) -> tuple[Attached, Monitoring, list[RemovableHandle]]:
        """Install the hooks on the model that come before those of stage 3, and the observers; return the hooks."""
        config, observers = self.config, self.observers
        hooks = watch_loading(self.model, self.pipeline)
        attached = self._checkpoint_activations()
        hooks += attached.handles
        if self.topology.world.rank == 0:
            observers.add(Progress(self.reference))
        monitoring = Monitoring(
            config, self.topology, self.device, self.pipeline.outcomes, observers, self.sharded, self.scaler
        )
        hooks += monitoring.watch_module(self.model, call)
        observers.add(schedule)  # after the monitors, which log the learning rates of the step
        self.fp32.attach()
        return attached, monitoring, hooks

    def _memory_parts(self, attached: Attached) -> MemoryParts:
        return MemoryParts(
            self.model,
            self.buffer,
            self.reducer,
            self.sharded,
            self.comm,
            self.device,
            self.transfers,
            other_comms=self._communicators_beside,
            activations=attached.memory,
        )

    def _same_inputs(self) -> SameInputs | None:
        tensor = self.topology.tensor
        if tensor.world_size == 1:
            return None
        compares_shapes = tensor.group is not None and self.device.type == "cpu"
        return SameInputs(self.note_inputs, tensor, ControlChannel(tensor, 1) if compares_shapes else None)

    def _loaders(self) -> Loaders:
        size, drops = self.config.train_micro_batch_size_per_gpu, self.config.dataloader_drop_last
        return Loaders(self.comm.rank, self.comm.world_size, self.device.type, size, drops)

    def _end_with(self, engine: Engine, offload: StateOffload, hooks: list[RemovableHandle]) -> None:
        """Register the clean-up for the time when ``engine`` is deleted."""
        for parameter in self.owned:
            OWNERS[parameter] = self.reference
        finalize_before_exit(engine, offload.restore)
        finalize_before_exit(engine, self.param_gatherer.wait_all)
        handles = self.reducer.arrivals.handles, self.param_gatherer.handles, hooks, self.fp32.handles
        weakref.finalize(engine, remove_hooks, *handles)

    def _trained(self, groups: Groups) -> list[torch.nn.Parameter]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        chosen = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        trained = [p for p in self.model.parameters() if id(p) in chosen]
        if self.trains and not trained:
            raise ValueError(
                "zerolite.initialize: no parameter to train: none of the given parameters requires a gradient"
            )
        self.owned = trained if self.trains else list(self.model.parameters())
        check_parameters(self.owned, names, meta_allowed=self.policy.shard_parameters)
        self.specs = self._specs_of(trained, names, groups)
        return trained

    def _specs_of(self, trained: Parameters, names: dict[int, str], groups: Groups) -> list[ParameterSpec]:
        # Muon leaves some parameters to an elementwise optimizer. These can be divided between ranks.
        whole = {id(p) for group in groups for p in group["params"] if self.whole and group.get("use_muon", True)}
        specs = []
        for p in trained:
            kind = f"{self.precision.compute_dtype(p)} sent as {self.communication(p)}"
            if id(p) in whole:
                kind += ", whole"
            if id(p) in self.ties:  # gets its own bucket, so that all stages that have it divide it in the same way
                kind += f", shared as {self.ties[id(p)].key}"
            specs.append(ParameterSpec(names[id(p)], whole_numel(p), kind, id(p) in whole))
        return specs

    def _make_buffer(self, trained: list[torch.nn.Parameter]) -> None:
        model, config, precision, comm, device = self.model, self.config, self.precision, self.comm, self.device
        self.buffer: ParameterBuffer
        if self.policy.shard_parameters:
            gathers, transfers = second_communicator(comm, device), self.transfers
            self.partitioned = PartitionedModel(model, comm, gathers, device, self.placements, transfers)
            self.buffer = partitioned_buffer(
                self.partitioned, trained, self.specs, config, precision, comm, self.placements
            )
        else:
            numel = bucket_numel(self.specs, config, comm.world_size)
            layout = PartitionLayout.build(self.specs, comm.world_size, numel)
            if self.whole and comm.main:
                _warn_of_padding(layout)
            self.buffer = ParameterBuffer(layout, trained, comm.rank, self.policy.shard_optimizer, self.placements)
            fill_buckets(self.buffer, precision, comm, device)

    def _make_pipeline(self, trained: list[torch.nn.Parameter], make_inner: Any, groups: Groups) -> None:
        config, policy, comm, buffer = self.config, self.policy, self.comm, self.buffer
        accumulation = (config.gradient_accumulation_steps or 1) * (1 if self.staged is None else self.staged.passes)
        self.accumulation = GradAccumulation(accumulation)
        keep = self.kind == "cpu"
        alone = self.topology.world.world_size == 1
        dtype_of = self.communication
        reduction = reduction_options(config, policy, self.precision, comm, accumulation, dtype_of, keep, alone)
        strides = [h.strides if (h := handle_of(p)) is not None else p.stride() for p in trained]
        collector = self._collector()
        here = self.placements.is_accessible(self.placements.optimizer, on_host=False)
        offloaded = None if here else OffloadedGradients(self.placements, self.transfers, collector.note)
        self.reducer = GradReducer(
            buffer.layout, trained, comm, reduction, strides, offloaded, self.observers, ShardedGradient.of
        )
        choose = kernel_chooser(self.topology.world, self.device, self.placements.update_devices())
        self.sharded = ShardedOptimizer(
            make_inner, groups, buffer, self.precision.update_dtype, choose, TorchUpdate, GuardedState
        )
        check_optimizer(self.placements, self.kind, self.sharded.inner)
        self.param_gatherer = ParamGatherer(
            buffer,
            comm,
            gather=policy.shard_optimizer and not policy.shard_parameters,
            overlap_forward=config.zero_optimization.overlap_comm is True and not policy.shard_parameters,
            observers=self.observers,
        )
        self.scaler = loss_scaler(config) if self.trains else None
        # With many ranks, or with stage 3's small groups, shards are small. One update then takes several of them, so
        # that there are few large calls.
        numel = min(bucket_numel(self.specs, config, comm.world_size), AUTO_BUCKET)
        options = step_options(config, numel, self.kind in SKIPS_ON_DEVICE)
        checks, observe_update = self._checks(options.check_finite)
        make: Callable[..., StepPipeline] = StepPipeline if self.trains else EvaluationPipeline
        if self.trains and not self.topology.trivial:
            self.sums = GradientSums(self.topology, buffer, self.ties, self.reducer, self.device)
            make = functools.partial(ModelParallelStepPipeline, sums=self.sums)
        self.pipeline = make(
            buffer,
            self.reducer,
            self.sharded,
            self.param_gatherer,
            comm,
            self.accumulation,
            self.scaler,
            options,
            self.device,
            StagedSpans(buffer, self.reducer, self.sharded.method, self.param_gatherer, self.transfers),
            UnusedParameters(
                config.zero_optimization.ignore_unused_parameters, functools.partial(_gone, self.model, buffer)
            ),
            collector,
            self.observers,
            checks,
            observe_update,
        )

    def _collector(self) -> StatsCollector:
        topology = self.topology
        if topology.trivial or not self.trains:
            return StatsCollector(self.comm, self.device)
        counts = counts_once(topology, self.buffer, self.ties)
        collector = ModelParallelStats(self.comm, self.device, topology.model, counts)
        self.note_inputs = collector.note_inputs
        return collector

    def _communicators_beside(self) -> list[Communicator]:
        """Return the communicators that only the rest of the grid uses."""
        topology = self.topology
        if topology.trivial:
            return []
        shared = [] if self.sums is None else self.sums.comms
        return [topology.world, topology.tensor, topology.pipe, topology.model, *shared]

    def _checks(self, check_finite: bool) -> tuple[StepChecks | None, UpdatedWeights | None]:
        """Make the checks that a step's statistics carry, and the one of them that looks at updated weights."""
        interval, world, sharded = self.config.consistency_check_interval, self.topology.world, self.sharded
        consistency = updated = None
        if interval and world.world_size > 1:
            weights = functools.partial(shared_weights, self.model, self.buffer)
            late = self.kind in SKIPS_ON_DEVICE
            consistency = ConsistencyCheck(self.topology, self.device, weights, interval, late)
        if check_finite:
            most = len(sharded.inner.param_groups)
            if not self.topology.trivial:
                counts = torch.tensor([most], device=self.device)
                self.topology.model.all_reduce_max(counts, tag="initial_sync")
                most = max(most, int(host_value(counts)))  # a dry run reads nothing
            updated = UpdatedWeights(sharded.inner, lambda: sharded.shards_by_bucket, most)
        if consistency is None and updated is None:
            return None, None
        return StepChecks(sharded.inner, world, self.device, consistency, updated), updated

    def _runner(self, boundary: GraphBoundary) -> Any:
        if self.staged is None:
            return LocalRunner(self.reference, self.accumulation, self.comm, self.device)
        from zerolite.pipe.step import RunnerComponents  # only where there is a pipeline

        parts = RunnerComponents(
            pipeline=self.pipeline,
            accumulation=self.accumulation,
            reducer=self.reducer,
            precision=self.precision,
            boundary=boundary,
            topology=self.topology,
            device=self.device,
            micro_batches=self.config.gradient_accumulation_steps or 1,
            loss_fn=self.staged.loss_fn,
            note_inputs=self.note_inputs,
            on_loss=PipelineLoss(self.reference),
        )
        return self.staged.runner(parts)

    def _checkpoint_activations(self) -> Attached:
        """Install activation checkpointing. It comes before all other forward hooks, which then run as they would if
        the model itself called the checkpoint function."""
        settings, tensor = self.config.activation_checkpointing, self.topology.tensor
        return attach(self.model, settings, self.device, tensor if tensor.world_size > 1 else None)

    def _make_checkpointer(self, adopts: bool, loaders: Loaders, schedule: LearningRateSchedule) -> Checkpointer:
        """Make the checkpointer, and connect everything that must know when a parameter becomes trainable."""
        pipeline, observers = self.pipeline, self.observers
        event = observers.before_backward if self.partitioned is None else observers.before_forward
        unfrozen = UnfrozenParams(self, adopts, event if self.trains else [])
        register = unfrozen.register_unfrozen_params
        if not self.trains:
            register = functools.partial(check_frozen, self.model)
            event.append(register)
        step = None if self.staged is None else functools.partial(refuse, "engine.optimizer.step")
        self.sharded.connect(pipeline, unfrozen.add_group, schedule.settle, step)
        tensors = ModelState(self.model, self.buffer, self.sharded, self.comm, self.topology)
        host = HostGroup(self.topology.world, "checkpoint")
        return Checkpointer(EngineComponents(tensors, pipeline, self.config, self.device, host, register), loaders)

    def layout_of(self, parameters: Parameters, names: dict[int, str]) -> PartitionLayout:
        """Make the layout of parameters that are trained from now on."""
        self.fp32.attach()
        added = self._specs_of(parameters, names, self.sharded.inner.param_groups)
        if self.partitioned is not None:
            return sliced_layout(self.partitioned, parameters, added, self.config, self.comm)
        numel = bucket_numel(self.specs, self.config, self.comm.world_size)
        return PartitionLayout.build(added, self.comm.world_size, numel)

    def tell(self, parameters: Parameters) -> None:
        """Tell the other parts that these parameters have been added to the layout."""
        for parameter in parameters:
            OWNERS[parameter] = self.reference
        if self.partitioned is not None:
            launch_by_groups(self.partitioned, self.reducer)


def _warn_of_padding(layout: PartitionLayout) -> None:
    """Warn if a parameter is too large to be balanced over the ranks."""
    largest, numel = max(layout.slots, key=lambda slot: slot.numel), sum(slot.numel for slot in layout.slots)
    if layout.numel > max(_PADDED * numel, AUTO_BUCKET):
        logger.warning(
            "whole parameters: buckets have %.1f times the elements of the model, because parameter '%s' alone has "
            "%.0f %% of them and belongs to one of %d ranks; fewer ranks or an elementwise optimizer need less memory",
            layout.numel / numel,
            largest.name,
            100 * largest.numel / numel,
            layout.world_size,
        )


def _gone(model: torch.nn.Module, buffer: ParameterBuffer, indices: list[int]) -> list[int]:
    """Return the trained parameters among ``indices`` that ``model`` no longer has."""
    there = {id(parameter) for parameter in model.parameters()}
    return [index for index in indices if id(buffer.parameters[index]) not in there]
