"""Construction of an engine from config and model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from zerolite.activation_checkpointing import attach
from zerolite.comm import Topology, collective, raise_together
from zerolite.config import ZeroliteConfig
from zerolite.diagnostics.consistency import ConsistencyCheck, read_numbers, shared_weights
from zerolite.diagnostics.rank_comparison import check_initialize, check_made_optimizer
from zerolite.engine.arguments import (
    Arguments,
    OptimizerChoice,
    check_states,
    choose_optimizer,
    freeze,
    param_groups_of,
    scheduler_of,
)
from zerolite.engine.build_parts import PartsBuilder, start_stage3
from zerolite.engine.compiling import warn_if_compiled_whole
from zerolite.engine.engine import Engine
from zerolite.engine.lifetime import own_until_end
from zerolite.engine.options import SKIPS_ON_DEVICE
from zerolite.engine.sequence_engine import DividedModel, SequenceEngine, SequenceEvaluationEngine, check_sequences
from zerolite.engine.special_engines import (
    CheckBeforeForward,
    EvaluationEngine,
    PipelineEngine,
    PipelineEvaluationEngine,
    check_frozen,
    refuse_in_pipeline,
)
from zerolite.engine.step_observers import (
    ExpertLoads,
    LearningRateSchedule,
    ProgramCollectives,
    Progress,
    RouterBiases,
)
from zerolite.engine.trained_params import UnfrozenParams
from zerolite.moe.experts import spread_calls
from zerolite.monitor.monitoring import Monitoring
from zerolite.nn.deferred_logits import LossTiling
from zerolite.nn.heads import WeightChanges, tile_losses
from zerolite.nn.tiled_mlp import tile_mlps
from zerolite.optim.adamw8bit import AdamW8bit, keep_embeddings_in_fp32
from zerolite.optim.muon import muon_groups
from zerolite.utils.memory_tags import ACTIVATIONS, BUCKETS
from zerolite.utils.module_hook import WeakHook
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.inner_tensors import attach as attach_weights
from zerolite.zero.inner_tensors import check_has_memory, separate
from zerolite.zero.stage3.partitioned_model import unpartition_model
from zerolite.zero.step import StepPipeline
from zerolite.zero.step_observers import ScheduleAgreement, UnusedParameters

if TYPE_CHECKING:
    from zerolite.pipe.prepare import PreparedStage
    from zerolite.pipe.runner import PipelineRunner

logger = logging.getLogger("zerolite")


@collective
def build_engine(
    model: torch.nn.Module,
    config: ZeroliteConfig,
    arguments: Arguments,
    topology: Topology,
    device: torch.device,
    device_kind: str | None = None,
    pipe_stage: PreparedStage | None = None,
) -> Engine:
    """Make the engine of ``model`` on ``device``.

    Args:
        model: this rank's part of the full model.
        config: resolved for the number of data ranks in ``topology``.
        device_kind: type of device whose rules of memory apply; default: that of ``device``. A dry run for CUDA has its
            tensors on the CPU, and passes "cuda".
        pipe_stage: the pipeline stage, if ``model`` is one.
    """
    optimizer, comm = arguments.optimizer, topology.data
    trains = optimizer is not None or config.optimizer is not None
    if trains:
        groups = param_groups_of(model, optimizer, arguments.model_parameters, pipe_stage is not None)
        if optimizer is None and config.optimizer is not None and config.optimizer.type.lower() == "muon":
            groups = muon_groups(model, groups)
    else:
        groups = freeze(model, config, arguments.model_parameters, arguments.lr_scheduler)
    if topology.trivial:  # layers of several ranks know no such weights
        separate(model.modules())
    builder = PartsBuilder(model, config, topology, device, device_kind or device.type, pipe_stage)
    others = {"broadcast_buffers": arguments.broadcast_buffers, "lr_scheduler": arguments.lr_scheduler}
    for name, parameter in model.named_parameters():
        check_has_memory(name, parameter)
    _keep_packing(model)
    check_initialize(config, model, optimizer, groups, comm, device, **others)
    divided = check_sequences(model, config.sequence_parallel)
    if not builder.policy.shard_parameters:
        unpartition_model(model)
    choice = choose_optimizer(optimizer, config, builder.policy, groups, topology.divides_layers)
    if issubclass(choice.cls, AdamW8bit):
        keep_embeddings_in_fp32(model)
    if choice.existing is not None and choice.existing is not optimizer:  # a function has made it just now
        check_made_optimizer(choice.existing, model, comm, device)
    _check_states_on_all_ranks(choice, model, topology, device, not builder.policy.shard_optimizer)
    if comm.is_rank0:
        _warn(choice, model, comm.world_size > 1, builder.policy.shard_parameters)
    parts = builder.build(choice, groups, trains)
    schedule = LearningRateSchedule(scheduler_of(arguments.lr_scheduler, config, parts.optimizer), parts.pipeline.state)
    return _make_engine(parts, builder, arguments, schedule, pipe_stage, divided)


def _keep_packing(model: torch.nn.Module) -> None:
    """Keep layers of bitsandbytes from packing their weights anew in evaluation, as they do on CPUs with AVX512-BF16.

    The new bytes are lost when stage 3 releases the weight, whose ``quant_state`` then describes them and not the
    shards. At every stage bitsandbytes cannot train with the new packing.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _warn(choice: OptimizerChoice, model: torch.nn.Module, is_divided: bool, shards_parameters: bool) -> None:
    if choice.untested:
        logger.warning(
            "zero_allow_untested_optimizer: this optimizer updates flat parts of parameters. If an update depends on "
            "more than the element's own gradient and state (norms, rows and columns), its results are wrong"
        )
    if is_divided:
        warn_if_compiled_whole(model, shards_parameters)


def _check_states_on_all_ranks(
    choice: OptimizerChoice, model: torch.nn.Module, topology: Topology, device: torch.device, keeps_full: bool
) -> None:
    """Raise ValueError on all ranks if the user's optimizer has states of one rank's part on some of them."""
    if choice.existing is None:
        return
    error = None
    try:
        check_states(choice.existing, model, choice.undivided or keeps_full)
    except ValueError as wrong:
        error = wrong
    raise_together(topology.world, device, "errors", error, "zerolite.initialize", ValueError)


@collective
def _make_engine(
    parts: EngineParts,
    builder: PartsBuilder,
    arguments: Arguments,
    schedule: LearningRateSchedule,
    pipe_stage: PreparedStage | None,
    divided: DividedModel | None,
) -> Engine:
    """Install the hooks and observers, and make the engine."""
    model, config, topology, observers = parts.model, parts.config, parts.topology, parts.observers
    _watch_program(parts)
    hooks = [_AfterLoading(parts.pipeline).install(m.register_load_state_dict_post_hook) for m in model.modules()]
    if not parts.trains:
        hooks.append(CheckBeforeForward().install(model.register_forward_pre_hook))
    # Activation checkpointing comes before all other forward hooks, which then run as they would if the model itself
    # called the checkpoint function.
    checkpointing = attach(model, config.activation_checkpointing, parts.device)
    parts.memory_sources.append(lambda: ((ACTIVATIONS, buffer) for buffer in checkpointing.memory()))
    if topology.world.rank == 0:
        if config.steps_per_print or checkpointing.checkpointing is not None:
            observers.add(Progress(parts, checkpointing))
    hooks += _tile(parts, is_pipe_stage=pipe_stage is not None)
    monitoring = Monitoring(parts)
    hooks += monitoring.watch_module()
    if config.expert_parallel.ranks > 1:
        _watch_experts(parts, monitoring)
    schedule.observe()  # after the monitors, which log the learning rates of the step
    builder.fp32.attach()
    start_stage3(parts)
    attach_weights(model)
    agreement = _observe_steps(parts, builder.device_kind)
    register = _connect_optimizer(parts, builder, _adopts(arguments), schedule, pipe_stage is not None)
    runner = None if pipe_stage is None else _make_runner(parts, pipe_stage, monitoring)
    sequence = None if divided is None else divided.make_forward(parts)
    make = _engine_class(parts.trains, pipe_stage is not None, sequence is not None)
    engine = make(parts, arguments, schedule, monitoring, register, runner)
    if sequence is not None:
        assert isinstance(engine, SequenceEngine | SequenceEvaluationEngine), "see _engine_class"
        engine.use_sequence(sequence)
    if isinstance(engine, EvaluationEngine):
        engine.compare_schedules_by(agreement)
    if (shared := builder.shared_grads) is not None:
        parts.memory_sources.append(lambda: ((BUCKETS, t) for comm in shared.comms for t in comm.memory()))
    engine._reference.finalizers += monitoring.end_with(engine)
    stage3_hooks = [] if parts.partitioned is None else parts.partitioned.hooks
    if divided is not None:
        hooks += divided.install()  # last: an exception after it would leave attention replaced
    own_until_end(engine, (hooks, checkpointing.handles, stage3_hooks, builder.fp32.handles))
    return engine


def _tile(parts: EngineParts, is_pipe_stage: bool) -> list[Any]:
    """Let losses and MLPs go over tiles of tokens, as the config says. Return the handles, whose ``remove()`` ends it.

    Their hooks on the model come before those of stage 3: logits become whole inside its forward.
    """
    if is_pipe_stage:
        return []
    partitioned = parts.partitioned
    shares = partitioned is not None and partitioned.context.groups.shard.world_size > 1
    tiling = LossTiling(always=shares, logs=parts.topology.world.rank == 0)
    handles = tile_losses(parts.model, parts.config.tiled_loss, tiling)
    if handles:
        parts.observers.add(WeightChanges(tiling))
    groups = [] if partitioned is None else partitioned.groups
    gathered = {id(group.module) for group in groups}
    return handles + tile_mlps(
        parts.model,
        parts.config.tiled_mlp,
        is_divided=lambda mlp: any(id(child) in gathered for child in mlp.children()),
    )


def _adopts(arguments: Arguments) -> bool:
    """Return True if parameters that are unfrozen later join the only param group."""
    return not isinstance(arguments.optimizer, torch.optim.Optimizer) and arguments.model_parameters is None


def _engine_class(trains: bool, is_pipe_stage: bool, divides_sequences: bool) -> type[Engine]:
    if divides_sequences:
        return SequenceEngine if trains else SequenceEvaluationEngine
    if is_pipe_stage:
        return PipelineEngine if trains else PipelineEvaluationEngine
    return Engine if trains else EvaluationEngine


def _watch_experts(parts: EngineParts, monitoring: Monitoring) -> None:
    """Count the tokens of experts if the config asks for something that needs the numbers."""
    config, calls = parts.config.expert_parallel, spread_calls(parts.model)
    if config.log_load:
        parts.observers.add(ExpertLoads(calls, parts.device, monitoring.log))
    if config.load_balance_coeff and parts.trains:
        parts.observers.add(RouterBiases(parts, calls, config.load_balance_coeff))


def _watch_program(parts: EngineParts) -> None:
    """Let the reducer know if the program communicates within backwards, where it waits for reductions inside them."""
    communicates, comm = parts.config.zero_optimization.collectives_in_backward, parts.topology.data
    if parts.partitioned is not None:
        return  # all ranks launch in one order there, with the program's collectives at the same places
    if parts.topology.expert.world_size > 1 or (communicates is None and parts.topology.sequence.world_size > 1):
        # Tokens are exchanged in the backward, and experts may get tokens of some ranks alone.
        communicates = True
    if communicates is not None:
        parts.reducer.program_communicates = communicates
    elif parts.trains and comm.group is not None and comm.world_size > 1:
        parts.observers.add(ProgramCollectives(parts.reducer, parts.call, logs=comm.is_rank0))


@collective
def _observe_steps(parts: EngineParts, device_kind: str) -> ScheduleAgreement | None:
    """Add the observers that have a slice of the statistics, or raise what these show.

    Args:
        device_kind: type of device whose rules of memory apply.

    Returns:
        The ranks' agreement on stage 3's schedule; None at other stages.
    """
    model, config, topology, observers = parts.model, parts.config, parts.topology, parts.observers
    data, coordinator = topology.data, parts.coordinator
    agreement = compared = None
    if coordinator is not None:
        schedule, parts_of_model = coordinator.schedule, topology.model
        agreement = ScheduleAgreement(schedule, parts_of_model.rank, parts_of_model.world_size, data.is_rank0)
        observers.add(agreement)
        if topology.trivial:  # a tensor shard may be small enough to stay whole on one rank and not on another
            compared = schedule
    inner, interval = parts.optimizer.inner, config.consistency_check_interval
    if interval and topology.world.world_size > 1:
        weights = functools.partial(shared_weights, model, parts.buffer, warns=data.is_rank0)
        late = device_kind in SKIPS_ON_DEVICE
        read = functools.partial(read_numbers, inner, compared)
        observers.add(ConsistencyCheck(topology, parts.device, read, weights, interval, late))
    find_removed = functools.partial(_find_removed, model, parts.buffer)
    observers.add(UnusedParameters(parts.buffer, config.zero_optimization.ignore_unused_parameters, find_removed))
    return agreement


def _find_removed(model: torch.nn.Module, buffer: ParameterBuffer, indices: list[int]) -> list[int]:
    """Return the trained parameters among ``indices`` that ``model`` no longer has."""
    present = {id(parameter) for parameter in model.parameters()}
    return [index for index in indices if id(buffer.parameters[index]) not in present]


class _AfterLoading(WeakHook[StepPipeline]):
    """Hook after ``load_state_dict`` of the model, or of a part of it, has changed parameters."""

    def __call__(self, module: torch.nn.Module, keys: object) -> None:
        pipeline = self.owner()
        if pipeline is not None:
            pipeline.written.on_loaded(module.parameters())


def _connect_optimizer(
    parts: EngineParts, builder: PartsBuilder, adopts: bool, schedule: LearningRateSchedule, is_pipe_stage: bool
) -> Callable[[], None]:
    """Let the engine carry out the optimizer's calls. Return the function that registers unfrozen parameters."""
    topology = parts.topology
    unfrozen = UnfrozenParams(parts, builder.rules, adopts)
    register: Callable[[], None] = unfrozen.register_unfrozen_params
    if not parts.trains:
        register = functools.partial(check_frozen, parts.model)
        unfrozen.event.append(register)
    step = functools.partial(refuse_in_pipeline, "engine.optimizer.step") if is_pipe_stage else None
    grid = {} if topology.trivial else {"tensor": topology.tensor.rank, "pipe": topology.pipe.rank}

    def raise_on_all(error: ValueError | None) -> None:
        raise_together(topology.world, parts.device, "verify", error, "engine.optimizer.load_state_dict", ValueError)

    parts.optimizer.connect(
        parts.pipeline, unfrozen.add_group, schedule.settle, step, raise_together=raise_on_all, grid=grid
    )
    return register


def _make_runner(parts: EngineParts, pipe_stage: PreparedStage, monitoring: Monitoring) -> PipelineRunner:
    from zerolite.pipe.runner import PipelineRunner  # only where there is a pipeline

    def log_loss(loss: torch.Tensor) -> None:
        if monitoring.monitor.enabled:
            monitoring.log.add_loss(loss, 1.0, parts.pipeline.state.global_steps, first=True)

    return PipelineRunner(pipe_stage, parts, log_loss)
