"""Construction of an engine from config and model."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zerolite.activation_checkpointing import attach
from zerolite.activation_checkpointing.clock import describe
from zerolite.checkpoint.checkpointer import Checkpointer, EngineParts
from zerolite.checkpoint.model_state import ModelState
from zerolite.comm import (
    CollectiveCheck,
    Communicator,
    ControlChannel,
    HostGroup,
    Topology,
    check_is_wanted,
    second_communicator,
)
from zerolite.comm.initial_sync import broadcast_into, differing, synchronize_tensors
from zerolite.config import ZeroliteConfig
from zerolite.diagnostics.agreement import check_initialize, check_made_optimizer
from zerolite.diagnostics.consistency import ConsistencyCheck, shared_weights
from zerolite.diagnostics.position import Names
from zerolite.diagnostics.step_checks import StepChecks
from zerolite.diagnostics.updated_weights import UpdatedWeights
from zerolite.engine.arguments import (
    OWNERS,
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
    follow_units,
    partitioned_buffer,
    sliced_layout,
    start_stage3,
    tell_trained,
)
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
from zerolite.engine.growth import Growth, Parameters, Ways
from zerolite.engine.monitoring import start_monitoring
from zerolite.engine.parameter_access import ParameterAccess
from zerolite.engine.pending_gradients import PendingGradients
from zerolite.engine.spread import spread_over
from zerolite.engine.state_offload import StateOffload
from zerolite.monitor.memory_report import MemoryParts
from zerolite.monitor.wall_clock import around
from zerolite.offload.from_config import check_optimizer, tiers_of, warn_of_few_threads
from zerolite.offload.resting_gradients import RestingGradients
from zerolite.offload.transfers import Transfers
from zerolite.optim.kernels import kernel_chooser
from zerolite.optim.muon import muon_groups
from zerolite.precision.dtypes import GraphBoundary, Precision
from zerolite.precision.fp32_modules import Fp32Modules
from zerolite.precision.loss_scaler import LossScaler
from zerolite.utils.accelerator import host_value, is_dry_run
from zerolite.utils.module_hook import WeakHook
from zerolite.zero.accumulation import AccumulationWindow
from zerolite.zero.buffer import ParameterBuffer, PartitionedParameterBuffer
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.layout import AUTO_BUCKET, Bucket, ParameterSpec, PartitionLayout
from zerolite.zero.publisher import Publisher
from zerolite.zero.sharded_optimizer import Groups, ShardedOptimizer
from zerolite.zero.stage3.partitioned_model import PartitionedModel, make_whole
from zerolite.zero.stage3.partitioned_parameter import handle_of, whole_numel
from zerolite.zero.stages import STAGES, StagePolicy
from zerolite.zero.step import StepPipeline

if TYPE_CHECKING:
    from zerolite.pipe.prepare import Staged

_PADDED = 1.5  # times the elements of the model, from which on buckets of whole parameters deserve a warning

logger = logging.getLogger("zerolite")


def check_model(model: Any) -> None:
    """Raises ValueError for what is no model that an engine can be made of."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"zerolite.initialize: expected model to be a torch.nn.Module, got {type(model).__name__}")
    check_not_wrapped(model)


@dataclass(frozen=True)
class Arguments:
    """What :func:`initialize` is given beside model, config and data, as it is given."""

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
    staged: Staged | None = None,
) -> Engine:
    """The engine of ``model``, of which this rank has its part, on ``device``. resolved: the config for as many ranks
    as the topology has data ranks. kind: the type of device for which memory is managed, where it is not that of
    ``device``: a dry run for CUDA has its tensors on the CPU. staged: the pipeline that ``model`` is a stage of. Called
    on all ranks, with equal arguments."""
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
    if chosen.untested and comm.main and not is_dry_run():
        logger.warning(
            "zero_allow_untested_optimizer: this optimizer updates flat parts of parameters. If an update depends on "
            "more than the element's own gradient and state (norms, rows and columns), its results are wrong"
        )
    adopts = not isinstance(optimizer, torch.optim.Optimizer) and model_parameters is None
    kind = kind or device.type
    whole = chosen.whole
    assembly = _Assembly(model, resolved, policy, precision, fp32, topology, device, kind, staged, trains, whole)
    engine = assembly.build(chosen.make, groups, arguments.broadcast_buffers, adopts)
    engine.lr_scheduler = scheduler_of(arguments.lr_scheduler, resolved, engine.optimizer)
    return engine


_NOT_IN_P_GRAD = (
    "with tensor_parallel or a pipeline a rank has a part of the model only. To clip, set gradient_clipping in the "
    "config, or call engine.clip_gradients(max_norm), which returns the norm; to read or change it, use "
    "zerolite.get_full_grad(p) and zerolite.set_full_grad(p, value) on all ranks"
)

# -------------------------------------------------------------------- the parts


class _Assembly:
    """Builds an engine part by part: each method needs what those before it have made. All of it is called on all ranks
    in the same order."""

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
        staged: Staged | None,
        trains: bool,
        whole: bool,
    ) -> None:
        self.trains, self.whole = trains, whole
        self.model, self.config, self.policy, self.kind = model, config, policy, kind
        self.precision, self.fp32 = precision, fp32
        self.topology, self.staged = topology, staged
        self.beside: list[Communicator] = []  # communicators that only the rest of the grid uses
        self.comm, self.device = comm, device = topology.data, device
        self.ties = {} if staged is None else {id(tie.parameter): tie for tie in staged.ties}
        self.partitioned: PartitionedModel | None = None
        self.communication = communication_dtypes(model, config, precision, topology.data.world_size)
        self.tiers = tiers_of(config, device, kind, comm)
        self.transfers = Transfers(self.tiers)
        if comm.main and not is_dry_run():
            warn_of_few_threads(self.tiers, os.environ)

    def build(self, make_inner: Any, groups: Groups, broadcast_buffers: bool, adopts: bool) -> Engine:
        """make_inner, groups: of the optimizer. adopts: whether parameters that are unfrozen later join its group."""
        trained = self._trained(groups)
        self._make_buffer(trained)
        _synchronize_rest(self.model, trained, self.precision, self.comm, self.device)
        self._make_pipeline(trained, make_inner, groups)
        self._spread()
        self._check_steps()
        engine = self._make_engine(broadcast_buffers)
        self._install(engine)
        self._let_grow(engine, adopts)
        if check_is_wanted(self.config.check_collectives):
            _check_collectives(engine, self.topology)
        self.monitoring.watch_communication(engine, self.comm, self.publisher)
        return engine

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
        specs = _parameter_specs(trained, names, self.precision, self.communication)
        # What Muon leaves to an elementwise optimizer can be divided.
        whole = {id(p) for group in groups for p in group["params"] if self.whole and group.get("use_muon", True)}
        for place, parameter in enumerate(trained):
            if id(parameter) in whole:
                specs[place] = dataclasses.replace(specs[place], kind=f"{specs[place].kind}, whole", whole=True)
        for place, parameter in enumerate(trained):
            if id(parameter) in self.ties:  # in a bucket of its own: the other stages cut theirs in the same parts
                kind = f"{specs[place].kind}, shared as {self.ties[id(parameter)].key}"
                specs[place] = dataclasses.replace(specs[place], kind=kind)
        return specs

    def _make_buffer(self, trained: list[torch.nn.Parameter]) -> None:
        model, config, precision, comm, device = self.model, self.config, self.precision, self.comm, self.device
        self.buffer: ParameterBuffer
        if self.policy.shard_parameters:
            gathers, transfers = second_communicator(comm, device), self.transfers
            self.partitioned = PartitionedModel(model, comm, gathers, device, self.tiers, transfers)
            self.buffer = partitioned_buffer(self.partitioned, trained, self.specs, config, precision, comm, self.tiers)
        else:
            numel = bucket_numel(self.specs, config, comm.world_size)
            layout = PartitionLayout.build(self.specs, comm.world_size, numel)
            if self.whole and comm.main and not is_dry_run():
                _warn_of_padding(layout)
            self.buffer = ParameterBuffer(layout, trained, comm.rank, self.policy.shard_optimizer, self.tiers)
            _fill(self.buffer, precision, comm, device)

    def _make_pipeline(self, trained: list[torch.nn.Parameter], make_inner: Any, groups: Groups) -> None:
        config, policy, comm, buffer = self.config, self.policy, self.comm, self.buffer
        accumulation = (config.gradient_accumulation_steps or 1) * (1 if self.staged is None else self.staged.passes)
        self.window = AccumulationWindow(accumulation)
        self.by_index = [self.communication(p) for p in trained]
        keep = self.kind == "cpu"
        alone = self.topology.world.world_size == 1
        reduction = reduction_options(config, policy, self.precision, comm, accumulation, self.by_index, keep, alone)
        strides = [h.strides if (h := handle_of(p)) is not None else p.stride() for p in trained]
        closes = self.window.next_backward_closes
        resting = RestingGradients(self.tiers, self.transfers)
        self.reducer = GradReducer(buffer.layout, trained, comm, reduction, closes, strides, resting)
        choose = kernel_chooser(self.topology.world, self.device, self.tiers.update_devices())
        self.sharded = ShardedOptimizer(make_inner, groups, buffer, self.precision.update_dtype, choose)
        check_optimizer(self.tiers, self.kind, self.sharded.inner)
        self.publisher = Publisher(
            buffer,
            comm,
            gather=policy.shard_optimizer and not policy.shard_parameters,
            overlap_forward=config.zero_optimization.overlap_comm is True and not policy.shard_parameters,
        )
        self.scaler = loss_scaler(config) if self.trains else None
        # Of the shards of many ranks, or of stage 3's small units, one update takes several: few large calls.
        numel = min(bucket_numel(self.specs, config, comm.world_size), AUTO_BUCKET)
        make = StepPipeline if self.trains else EvaluationPipeline
        self.pipeline = make(
            buffer,
            self.reducer,
            self.sharded,
            self.publisher,
            comm,
            self.window,
            self.scaler,
            step_options(config, numel, self.device.type in SKIPS_ON_DEVICE),
            self.device,
            self.transfers,
        )

    def _spread(self) -> None:
        """Tell the step what ranks beside the data ranks have."""
        topology = self.topology
        if topology.trivial:
            return
        self.beside[:] = [topology.world, topology.tensor, topology.pipe, topology.model]
        if self.trains:
            across, sums = spread_over(topology, self.buffer, self.ties, self.reducer, self.device)
            self.pipeline.spread(across, sums)
            self.beside += sums.comms

    def _check_steps(self) -> None:
        """Let steps check what the config asks for beside their gradients."""
        interval, world, sharded = self.config.consistency_check_interval, self.topology.world, self.sharded
        consistency = updated = None
        if interval and world.world_size > 1:
            weights = functools.partial(shared_weights, self.model, self.buffer)
            late = self.device.type in SKIPS_ON_DEVICE
            consistency = ConsistencyCheck(self.topology, self.device, weights, interval, late)
        if self.pipeline.checks_finite:
            most = len(sharded.inner.param_groups)
            if not self.topology.trivial:
                counts = torch.tensor([most], device=self.device)
                self.topology.model.all_reduce_max(counts, tag="initial_sync")
                most = max(most, int(host_value(counts)))  # a dry run reads nothing
            updated = UpdatedWeights(lambda: sharded.inner.param_groups, lambda: sharded.pieces_by_bucket, most)
        if consistency is not None or updated is not None:
            self.pipeline.check_with(StepChecks(sharded.inner, world, self.device, consistency, updated), updated)

    def _make_engine(self, broadcast_buffers: bool) -> Engine:
        boundary = _connect(self.pipeline, self.reducer, self.publisher, self.scaler, self.precision, self.model)
        make = Engine if self.trains else EvaluationEngine
        engine = make(
            module=self.model,
            config=self.config,
            device=self.device,
            topology=self.topology,
            precision=self.precision,
            pipeline=self.pipeline,
            reducer=self.reducer,
            publisher=self.publisher,
            optimizer=self.sharded,
            window=self.window,
            boundary=boundary,
            lr_scheduler=None,
            dataloader=None,
            broadcast_buffers=broadcast_buffers,
        )
        engine.memory_parts = MemoryParts(
            self.model, self.buffer, self.reducer, self.sharded, self.comm, self.device, self.transfers, self.beside
        )
        tensor = self.topology.tensor
        if tensor.world_size > 1 and tensor.group is not None and self.device.type == "cpu":
            engine.tensor_channel = ControlChannel(tensor, 1)
        if self.staged is not None:
            engine.runner = self._runner(self.staged, boundary)
        engine.parameter_access = ParameterAccess(self.pipeline, self.reducer, self.buffer, self.sharded, self.topology)
        gather, refusal = engine.parameter_access.whole, "" if self.topology.trivial else _NOT_IN_P_GRAD
        engine.pending_gradients = PendingGradients(
            self.pipeline, self.reducer, self.comm, self.device, gather, refusal
        )
        return engine

    def _runner(self, staged: Staged, boundary: GraphBoundary) -> Any:
        from zerolite.pipe.runner import RunnerParts  # only where there is a pipeline

        parts = RunnerParts(
            pipeline=self.pipeline,
            window=self.window,
            reducer=self.reducer,
            precision=self.precision,
            boundary=boundary,
            topology=self.topology,
            device=self.device,
            micro_batches=self.config.gradient_accumulation_steps or 1,
            loss_fn=staged.loss_fn,
        )
        return staged.runner(parts)

    def _install(self, engine: Engine) -> None:
        """The engine's hooks; it keeps the parts alive, and they know it weakly."""
        model, buffer, pipeline, reducer = self.model, self.buffer, self.pipeline, self.reducer
        known = weakref.ref(engine)
        pipeline.unused.gone = lambda indices: _gone(model, buffer, indices)
        pipeline.on_applied = lambda: _step_scheduler(known())
        pipeline.on_settled = lambda norm: _print_progress(known(), norm)
        hooks = _watch_loading(model, pipeline)
        hooks += self._checkpoint_activations(engine)
        if engine.runner is not None:
            engine.runner.on_loss = functools.partial(_log_loss, known)
        self.monitoring = start_monitoring(engine, model, pipeline, reducer, self.scaler, self.topology)
        hooks += self.monitoring.hooks
        self.fp32.attach()
        if self.partitioned is not None:
            hooks += start_stage3(self.partitioned, engine, pipeline, self.publisher, reducer)
        engine.state_offload = StateOffload(engine.memory_parts, pipeline, engine.coordinator)
        engine.memory_parts = dataclasses.replace(engine.memory_parts, away=engine.state_offload.memory)
        weakref.finalize(engine, engine.state_offload.restore).atexit = False
        weakref.finalize(engine, self.publisher.wait_all).atexit = False
        weakref.finalize(engine, _remove_hooks, reducer.handles, self.publisher.handles, hooks, self.fp32.handles)
        for parameter in self.owned:
            OWNERS[parameter] = known

    def _checkpoint_activations(self, engine: Engine) -> list[Any]:
        """Before other hooks of forward, which then see what they see where the model itself calls the checkpoint."""
        settings, known, pipeline = self.config.activation_checkpointing, weakref.ref(engine), self.pipeline
        tensor = self.topology.tensor if self.topology.tensor.world_size > 1 else None
        attached = attach(self.model, settings, self.device, functools.partial(_print_checkpointing, known), tensor)
        engine.activation_checkpointing = attached
        engine.memory_parts = dataclasses.replace(engine.memory_parts, activations=attached.memory)
        if settings.profile:
            around(pipeline, "apply", lambda: None, lambda: attached.end_step(pipeline.global_steps))
        return list(attached.handles)

    def _let_grow(self, engine: Engine, adopts: bool) -> None:
        """What needs to know of parameters that are trained from some step on: all that there is by now."""
        model, buffer, pipeline, comm, device = self.model, self.buffer, self.pipeline, self.comm, self.device
        fill = functools.partial(_fill, buffer, self.precision, comm, device)
        known = weakref.ref(engine)
        ways = Ways(self._layout_of, fill, lambda parameters: self._tell(parameters, known))
        growth = Growth(model, comm, device, buffer, self.reducer, self.sharded, self.publisher, pipeline, ways, adopts)
        begins = pipeline if self.partitioned is None else self.partitioned.coordinator
        wake = growth.wake if self.trains else functools.partial(check_frozen, model)
        begins.on_begin = wake
        tensors = ModelState(model, buffer, self.sharded, comm, self.topology)
        host = HostGroup(self.topology.world, "checkpoint")
        parts = EngineParts(tensors, pipeline, self.reducer, self.config, device, host, wake)
        engine.checkpointer = Checkpointer(parts)
        self.sharded.connect(
            step=pipeline.step if self.staged is None else functools.partial(_refuse_step, known),
            zero_grad=pipeline.zero_grad,
            read=functools.partial(_settle_schedule, known),
            settle=pipeline.settle,
            save=pipeline.follow_writes,
            load=pipeline.on_masters_loaded,
            add=growth.add_group,
        )

    def _layout_of(self, parameters: Parameters, names: dict[int, str]) -> PartitionLayout:
        """Of parameters that are trained from now on."""
        self.fp32.attach()
        added = self._specs_of(parameters, names, self.sharded.inner.param_groups)
        if self.partitioned is not None:
            return sliced_layout(self.partitioned, parameters, added, self.config, self.comm)
        numel = bucket_numel(self.specs, self.config, self.comm.world_size)
        return PartitionLayout.build(added, self.comm.world_size, numel)

    def _tell(self, parameters: Parameters, known: weakref.ref[Engine]) -> None:
        """They have a place."""
        self.by_index.extend(self.communication(p) for p in parameters)
        self._spread()
        for parameter in parameters:
            OWNERS[parameter] = known
        if self.partitioned is not None:
            tell_trained(self.buffer.parameters)
            self.partitioned.coordinator.look_at_whole()
            follow_units(self.partitioned, self.reducer)


def _connect(
    pipeline: StepPipeline,
    reducer: GradReducer,
    publisher: Publisher,
    scaler: LossScaler | None,
    precision: Precision,
    model: torch.nn.Module,
) -> GraphBoundary:
    """Install the hooks that lead to the pipeline."""

    def on_backward_begin() -> None:
        if not reducer.pass_open:
            boundary.scaled = False
        pipeline.begin_backward()

    def on_first_gradient(index: int) -> None:
        on_backward_begin()
        boundary.check_scaled(reducer.layout.slots[index].name)

    boundary = GraphBoundary(on_backward_begin, pipeline.window_scale if scaler else None, precision)
    reducer.attach(on_first_gradient, publisher.on_gradient if publisher.overlaps else None)
    publisher.attach(model)
    return boundary


def _parameter_specs(
    trained: Parameters,
    names: dict[int, str],
    precision: Precision,
    communication: Callable[[torch.nn.Parameter], torch.dtype | None],
) -> list[ParameterSpec]:
    return [
        ParameterSpec(names[id(p)], whole_numel(p), f"{precision.compute_dtype(p)} sent as {communication(p)}")
        for p in trained
    ]


def _warn_of_padding(layout: PartitionLayout) -> None:
    """Say so if a parameter is too large to be balanced over the ranks."""
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


def _fill(buffer: ParameterBuffer, precision: Precision, comm: Communicator, device: torch.device) -> None:
    """Fill the buckets that are not filled yet: whole parameters, with rank 0's values, or shards."""
    if isinstance(buffer, PartitionedParameterBuffer):
        buffer.fill_from_shards(precision.compute_dtype, precision.master_dtype)
        return
    buckets = buffer.layout.buckets[len(buffer.compute) :]
    indices = [slot.index for bucket in buckets for slot in bucket.slots]
    different = dict(zip(indices, differing([buffer.parameters[i] for i in indices], comm, device), strict=True))

    def synchronize(bucket: Bucket, flat: torch.Tensor) -> None:
        if any(different[slot.index] for slot in bucket.slots):
            broadcast_into(flat, comm, device, "initial_sync")

    buffer.fill(device, precision.compute_dtype, precision.master_dtype, synchronize)


def _synchronize_rest(
    model: torch.nn.Module,
    trained: list[torch.nn.Parameter],
    precision: Precision,
    comm: Communicator,
    device: torch.device,
) -> None:
    """Buffers and (where they are whole) frozen parameters: on the device, with rank 0's values, each in the dtype that
    ``precision`` says."""
    in_layout = {id(p) for p in trained}
    others = [p for p in model.parameters() if id(p) not in in_layout and handle_of(p) is None]
    rest: list[torch.Tensor] = [p.data for p in others]
    for buffer in model.buffers():
        if buffer.dtype != precision.buffer_dtype(buffer):
            buffer.data = buffer.data.to(precision.buffer_dtype(buffer))
    _move_rest(model, device)
    rest += list(model.buffers())
    synchronize_tensors(rest, comm, device, "initial_sync")
    for parameter in others:
        parameter.data = parameter.data.to(device, precision.compute_dtype(parameter))


def _move_rest(model: torch.nn.Module, device: torch.device) -> None:
    """Bring to ``device`` the buffers, shared ones once, and what modules of the user's move in an ``_apply`` of their
    own; parameters stay where they are."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of the original, which is kept alive

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter) or tensor.device == device:
            return tensor
        if id(tensor) not in moved:
            moved[id(tensor)] = (tensor, tensor.to(device))
        return moved[id(tensor)][1]

    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = move(buffer)
        # Those of torch itself (nn.LSTM) lay out parameters anew, which have their places by now.
        own = not type(module)._apply.__module__.startswith("torch.")
        if own and device.type != "cpu" and all(handle_of(p) is None and p.grad is None for p in module.parameters()):
            module._apply(move)


def _check_collectives(engine: Engine, topology: Topology) -> None:
    comm, known = topology.data, weakref.ref(engine)

    def names_of(gathered: bool, key: int) -> list[str]:
        engine = known()
        if engine is None:
            return []
        names = Names(engine)
        return names.of_parameter(key) if gathered else names.of_bucket(key)

    watched = {"gradients and statistics": comm}
    if engine.coordinator is not None and engine.coordinator.comm is not comm:
        watched["gathers of parameters"] = engine.coordinator.comm
    if topology.tensor is not topology.model:
        watched["parts of layers"] = topology.tensor
    watched["parts of the model"] = topology.model
    for label, other in watched.items():
        if other.group is not None and other.world_size > 1:
            other.watch(CollectiveCheck(other, label, names_of))


def _gone(model: torch.nn.Module, buffer: ParameterBuffer, indices: list[int]) -> list[int]:
    """Those of the trained parameters ``indices`` that ``model`` no longer has."""
    there = {id(parameter) for parameter in model.parameters()}
    return [index for index in indices if id(buffer.parameters[index]) not in there]


def _log_loss(known: weakref.ref[Engine], loss: torch.Tensor) -> None:
    engine = known()
    if engine is not None and engine.step_log is not None:
        engine.step_log.add_loss(loss, 1.0, engine.global_steps, first=True)


def _refuse_step(known: weakref.ref[Engine]) -> None:
    engine = known()
    if engine is not None:
        engine.refuse_pipeline("engine.optimizer.step")


def _settle_schedule(known: weakref.ref[Engine]) -> None:
    engine = known()
    if engine is not None:
        engine.settle_schedule()


def _step_scheduler(engine: Engine | None) -> None:
    if engine is not None:
        engine.step_scheduler()


def _watch_loading(model: torch.nn.Module, pipeline: StepPipeline) -> list[Any]:
    """Hooks that tell the pipeline when ``load_state_dict`` of the model, or of a part of it, has changed
    parameters."""
    return [_AfterLoading(pipeline).install(m.register_load_state_dict_post_hook) for m in model.modules()]


class _AfterLoading(WeakHook[StepPipeline]):
    def __call__(self, module: torch.nn.Module, keys: Any) -> None:
        pipeline = self.owner()
        if pipeline is not None:
            pipeline.on_parameters_loaded(module.parameters())


def _remove_hooks(*lists: list[Any]) -> None:
    for handle in [handle for handles in lists for handle in handles]:
        handle.remove()


# -------------------------------------------------------------------- lines for people


def _print_checkpointing(known: weakref.ref[Engine], step: int, times: Mapping[str, float]) -> None:
    engine = known()
    if engine is not None and engine.rank == 0:
        print(describe(step, times), flush=True)


def _print_progress(engine: Engine | None, norm: float) -> None:
    if engine is None:
        return
    every = engine.config.steps_per_print
    steps = engine.global_steps
    if engine.rank == 0 and steps == 1:
        engine.activation_checkpointing.check_used()
    if engine.rank == 0 and every and steps % every == 0:
        lr = ", ".join(f"{value:.3g}" for value in engine.get_lr())
        print(
            f"step {steps}: skipped {engine.skipped_steps}, lr {lr}, grad norm {norm:.4g}, loss scale "
            f"{engine.loss_scale:g}",
            flush=True,
        )
