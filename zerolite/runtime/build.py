"""Config and model to an engine: every decision that depends on the config is taken here, once."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zerolite.accelerator import default_device, keep_freed_memory
from zerolite.checkpoint.checkpointer import Checkpointer, EngineParts
from zerolite.checkpoint.model_state import ModelState
from zerolite.comm import (
    Communicator,
    HostGroup,
    create_communicator,
    init_distributed,
    local_rank,
    second_communicator,
)
from zerolite.config import ConfigError, ZeroliteConfig, load_config
from zerolite.runtime.accumulation import AccumulationWindow
from zerolite.runtime.arguments import (
    OWNERS,
    OptimizerLike,
    check_not_wrapped,
    check_trained,
    optimizer_maker,
    param_groups_of,
    scheduler_of,
)
from zerolite.runtime.build_stage3 import (
    bucket_numel,
    follow_units,
    partitioned_buffer,
    sliced_layout,
    start_stage3,
    watch_writes,
)
from zerolite.runtime.engine import Engine
from zerolite.runtime.fp32_modules import Fp32Modules
from zerolite.runtime.growth import Growth, Parameters, Ways
from zerolite.runtime.initial_sync import broadcast_into, check_same_model, differing, synchronize_tensors
from zerolite.runtime.kernels import kernel_chooser
from zerolite.runtime.loss_scaler import LossScaler
from zerolite.runtime.monitoring import start_monitoring
from zerolite.runtime.parameter_access import ParameterAccess
from zerolite.runtime.precision import DTYPES, GraphBoundary, Precision
from zerolite.runtime.step import StepOptions, StepPipeline
from zerolite.runtime.zero.bucket_state import ReductionOptions
from zerolite.runtime.zero.buffer import ParameterBuffer, PartitionedParameterBuffer
from zerolite.runtime.zero.grad_reducer import GradReducer
from zerolite.runtime.zero.layout import Bucket, ParameterSpec, PartitionLayout
from zerolite.runtime.zero.partitioned_parameter import handle_of, whole_numel, whole_shape
from zerolite.runtime.zero.publisher import Publisher
from zerolite.runtime.zero.sharded_optimizer import Groups, ShardedOptimizer
from zerolite.runtime.zero.stage3 import PartitionedModel, make_whole
from zerolite.runtime.zero.stages import STAGES, StagePolicy
from zerolite.runtime.zero.weak_hook import WeakHook

logger = logging.getLogger("zerolite")


def initialize(
    model: torch.nn.Module,
    config: ZeroliteConfig | dict[str, Any] | str | os.PathLike[str],
    *,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    broadcast_buffers: bool = False,
    num_local_io_workers: int = 0,
) -> Engine:
    """Make an :class:`~zerolite.runtime.engine.Engine` of ``model``.

    model: moved to this process's device; its parameters take rank 0's values, the compute dtype of ``config``, and
    a place in flat buffers (same ``Parameter`` objects). config: DeepSpeed's schema as a dict, a path, or JSON or
    hjson text. optimizer: an instance, a class, or a function of parameters; otherwise ``config["optimizer"]``.
    model_parameters: parameters or param groups to train, by default all that require a gradient. training_data: a
    dataset, for ``engine.dataloader``. lr_scheduler: an instance, or a function of the optimizer; otherwise
    ``config["scheduler"]``; stepped by the engine after every update. broadcast_buffers: send rank 0's buffers
    before each training forward.
    collate_fn: a list of samples to a batch, for this engine's loaders. num_local_io_workers: processes that load
    ``training_data``; 0 loads in this one.

    Starts torch.distributed from the environment if it does not run. Raises ConfigError for the config, ValueError
    for the other arguments, RuntimeError if ranks hold different models. Called on all ranks, with equal arguments.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"zerolite.initialize: expected model to be a torch.nn.Module, got {type(model).__name__}")
    check_not_wrapped(model)
    given = load_config(config)
    init_distributed()
    device = default_device(local_rank())
    if device.type == "cpu":
        keep_freed_memory()
    comm = create_communicator(device)
    resolved = given.resolve(comm.world_size)
    policy = STAGES[resolved.zero_optimization.stage]
    precision = _precision(resolved)
    fp32 = Fp32Modules(model, resolved.fp32_modules, precision.compute, precision.autocast, device.type)
    precision = dataclasses.replace(precision, keeps_fp32=fp32.holds)
    if not policy.shard_parameters:
        make_whole(model)
        model.to(device)
    groups = param_groups_of(model, optimizer, model_parameters)
    make_inner = optimizer_maker(optimizer, resolved, policy, groups)
    adopts = not isinstance(optimizer, torch.optim.Optimizer) and model_parameters is None
    engine = _assemble(
        model, resolved, policy, precision, fp32, comm, device, make_inner, groups, broadcast_buffers, adopts
    )
    engine.lr_scheduler = scheduler_of(lr_scheduler, resolved, engine.optimizer)
    engine.loaders.collate_fn = collate_fn
    if training_data is not None:
        engine.dataloader = engine.deepspeed_io(training_data, num_local_io_workers=num_local_io_workers)
    if resolved.dump_state and comm.rank == 0:
        _dump_state(engine)
    return engine


# -------------------------------------------------------------------- the parts


def _assemble(
    model: torch.nn.Module,
    config: ZeroliteConfig,
    policy: StagePolicy,
    precision: Precision,
    fp32: Fp32Modules,
    comm: Communicator,
    device: torch.device,
    make_inner: Any,
    groups: Groups,
    broadcast_buffers: bool,
    adopts: bool,
) -> Engine:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    trained = [p for p in model.parameters() if id(p) in chosen]
    check_trained(trained, names, meta_allowed=policy.shard_parameters)
    _check_same_model(model, comm, device)
    communication = _communication_dtypes(model, config, precision)
    specs = _parameter_specs(trained, names, precision, communication)
    partitioned = None
    if policy.shard_parameters:
        partitioned = PartitionedModel(model, comm, second_communicator(comm, device), device)
        buffer = partitioned_buffer(partitioned, trained, specs, config, precision, comm, device)
    else:
        layout = PartitionLayout.build(specs, comm.world_size, bucket_numel(specs, config))
        buffer = ParameterBuffer(layout, trained, comm.rank, policy.shard_optimizer)
        _fill(buffer, precision, comm, device)
    _synchronize_rest(model, trained, precision, comm, device)

    accumulation = config.gradient_accumulation_steps or 1
    window = AccumulationWindow(accumulation)
    by_index = [communication(p) for p in trained]
    reduction = _reduction_options(config, policy, precision, comm, accumulation, by_index)
    strides = [h.strides if (h := handle_of(p)) is not None else p.stride() for p in trained]
    reducer = GradReducer(buffer.layout, trained, comm, reduction, window.next_backward_closes, strides)
    sharded = ShardedOptimizer(make_inner, groups, buffer, precision.update_dtype, kernel_chooser(comm, device))
    overlap_forward = config.zero_optimization.overlap_comm is True and not policy.shard_parameters
    gather = policy.shard_optimizer and not policy.shard_parameters
    publisher = Publisher(buffer, comm, gather=gather, overlap_forward=overlap_forward)
    scaler = _loss_scaler(config)
    options = _step_options(config, bucket_numel(specs, config) // comm.world_size if policy.shard_parameters else 0)
    pipeline = StepPipeline(buffer, reducer, sharded, publisher, comm, window, scaler, options, device)
    boundary = _connect(pipeline, reducer, publisher, scaler, model)
    engine = Engine(
        module=model,
        config=config,
        device=device,
        comm=comm,
        precision=precision,
        pipeline=pipeline,
        reducer=reducer,
        publisher=publisher,
        optimizer=sharded,
        window=window,
        boundary=boundary,
        lr_scheduler=None,
        dataloader=None,
        broadcast_buffers=broadcast_buffers,
    )
    engine.parameter_access = ParameterAccess(pipeline, reducer, buffer, sharded, comm)
    known = weakref.ref(engine)  # the pipeline does not keep its engine alive
    pipeline.unused.gone = lambda indices: _gone(model, buffer, indices)
    pipeline.on_applied = lambda: _step_scheduler(known())
    pipeline.on_settled = lambda norm: _print_progress(known(), norm)
    hooks = _watch_loading(model, pipeline) + start_monitoring(engine, model, pipeline, reducer, scaler, comm)
    fp32.attach()
    if partitioned is not None:
        hooks += start_stage3(partitioned, engine, pipeline, publisher, reducer)
    weakref.finalize(engine, _remove_hooks, reducer.handles, publisher.handles, hooks, fp32.handles)
    for parameter in trained:
        OWNERS[parameter] = known

    def layout_of(parameters: Parameters, names: dict[int, str]) -> PartitionLayout:
        fp32.attach()
        added = _parameter_specs(parameters, names, precision, communication)
        if partitioned is not None:
            return sliced_layout(partitioned, parameters, added, config, comm)
        return PartitionLayout.build(added, comm.world_size, bucket_numel(specs, config))

    def tell(parameters: Parameters) -> None:
        by_index.extend(communication(p) for p in parameters)
        for parameter in parameters:
            OWNERS[parameter] = known
        if partitioned is not None:
            watch_writes(pipeline, buffer.parameters)
            partitioned.coordinator.look_at_whole()
            follow_units(partitioned, reducer)

    ways = Ways(layout_of, functools.partial(_fill, buffer, precision, comm, device), tell)
    growth = Growth(model, comm, device, buffer, reducer, sharded, publisher, pipeline, ways, adopts)
    begins = pipeline if partitioned is None else partitioned.coordinator
    begins.on_begin = growth.wake
    tensors, host = ModelState(model, buffer, sharded, comm), HostGroup(comm, "checkpoint")
    engine.checkpointer = Checkpointer(EngineParts(tensors, pipeline, reducer, config, device, host, growth.wake))
    sharded.connect(
        step=pipeline.step,
        zero_grad=pipeline.zero_grad,
        settle=pipeline.settle,
        save=pipeline.follow_writes,
        load=pipeline.on_masters_loaded,
        add=growth.add_group,
    )
    return engine


def _step_options(config: ZeroliteConfig, update_numel: int) -> StepOptions:
    return StepOptions(
        max_norm=config.gradient_clipping,
        check_finite=config.bf16.check_grad_overflow or not config.bf16.enabled,
        max_skipped_in_a_row=config.max_consecutive_skipped_steps,
        ignore_unused=config.zero_optimization.ignore_unused_parameters,
        update_numel=update_numel,
    )


def _connect(
    pipeline: StepPipeline,
    reducer: GradReducer,
    publisher: Publisher,
    scaler: LossScaler | None,
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

    boundary = GraphBoundary(on_backward_begin, pipeline.window_scale if scaler else None)
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


def _fill(buffer: ParameterBuffer, precision: Precision, comm: Communicator, device: torch.device) -> None:
    """Fill the buckets that are not filled yet: whole parameters, with rank 0's values, or shards."""
    if isinstance(buffer, PartitionedParameterBuffer):
        buffer.fill_from_shards(device, precision.compute_dtype, precision.master_dtype)
        return
    buckets = buffer.layout.buckets[len(buffer.compute) :]
    indices = [slot.index for bucket in buckets for slot in bucket.slots]
    different = dict(zip(indices, differing([buffer.parameters[i] for i in indices], comm, device), strict=True))

    def synchronize(bucket: Bucket, flat: torch.Tensor) -> None:
        if any(different[slot.index] for slot in bucket.slots):
            broadcast_into(flat, comm, device, "initial_sync")

    buffer.fill(device, precision.compute_dtype, precision.master_dtype, synchronize)


def _reduction_options(
    config: ZeroliteConfig,
    policy: StagePolicy,
    precision: Precision,
    comm: Communicator,
    accumulation: int,
    communication: list[torch.dtype | None],
) -> ReductionOptions:
    zero = config.zero_optimization
    asked = config.data_types.grad_accum_dtype
    if asked is not None:
        accumulate: torch.dtype | None = DTYPES[asked]
    else:
        accumulate = torch.float32 if precision.separate_masters else None
    predivide = float(comm.world_size) if config.prescale_gradients else config.gradient_predivide_factor
    # Multiplying by a power of two is exact, so where nothing else is asked for the mean is taken while gradients
    # move into their buckets. Not in fp16, whose small numbers it would push below the smallest.
    free = predivide == 1.0 and comm.world_size & (comm.world_size - 1) == 0 and precision.compute != torch.float16
    return ReductionOptions(
        reduce_each_pass=policy.shard_gradients,
        shard=policy.shard_optimizer,
        use_reduce_scatter=zero.reduce_scatter,
        accumulate_dtype=accumulate,
        several_expected=accumulation > 1,
        communication_dtype=lambda bucket: communication[bucket.slots[0].index],
        arrival_factor=1.0 / comm.world_size if free else 1.0,
        predivide=predivide,
        copy_on_arrival=zero.contiguous_gradients,
        overlap=zero.overlap_comm is not False,
    )


# -------------------------------------------------------------------- precision


def _precision(config: ZeroliteConfig) -> Precision:
    if config.fp16.enabled:
        low = config.fp16.fp16_master_weights_and_grads
        return Precision(compute=torch.float16, separate_masters=not low, update_in_fp32=True)
    if config.bf16.enabled:
        low = config.bf16.bf16_master_weights_and_grads
        return Precision(
            compute=torch.bfloat16, separate_masters=not low, update_in_fp32=not config.bf16.bf16_optimizer_states
        )
    if config.torch_autocast.enabled:
        return Precision(autocast=DTYPES[config.torch_autocast.dtype])
    return Precision()


def _loss_scaler(config: ZeroliteConfig) -> LossScaler | None:
    fp16 = config.fp16
    autocast_fp16 = config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16"
    if not (fp16.enabled or autocast_fp16):
        return None
    if fp16.loss_scale:
        return LossScaler(scale=fp16.loss_scale, dynamic=False)
    return LossScaler(
        scale=2.0**fp16.initial_scale_power,
        dynamic=True,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_scale=fp16.min_loss_scale,
    )


def _communication_dtypes(
    model: torch.nn.Module, config: ZeroliteConfig, precision: Precision
) -> Callable[[torch.nn.Parameter], torch.dtype | None]:
    """The dtype in which a parameter's gradient travels; None: the one it has."""
    if config.communication_data_type is not None:
        everywhere = DTYPES[config.communication_data_type]
        return lambda parameter: everywhere
    autocast = config.torch_autocast
    if not autocast.enabled or not autocast.lower_precision_safe_modules:
        return lambda parameter: None
    safe = set(autocast.lower_precision_safe_modules)
    low: set[int] = set()
    found: set[str] = set()
    for module in model.modules():
        for cls in type(module).__mro__:
            matches = {f"{cls.__module__}.{cls.__qualname__}", _public_name(cls), cls.__qualname__} & safe
            if matches:
                found |= matches
                low |= {id(parameter) for parameter in module.parameters(recurse=False)}
    if safe - found:
        raise ConfigError(
            [
                (
                    "torch_autocast.lower_precision_safe_modules",
                    f"expected classes of modules in the model, got {', '.join(sorted(safe - found))}, which none "
                    "of its modules is; write "
                    "the class as in torch.nn.Linear",
                )
            ]
        )
    dtype = DTYPES[autocast.dtype]
    return lambda parameter: dtype if id(parameter) in low and not precision.keeps_fp32(parameter) else None


def _public_name(cls: type) -> str:
    """torch.nn.Linear rather than torch.nn.modules.linear.Linear."""
    return f"torch.nn.{cls.__qualname__}" if getattr(torch.nn, cls.__qualname__, None) is cls else ""


def _check_same_model(model: torch.nn.Module, comm: Communicator, device: torch.device) -> None:
    if comm.world_size > 1:
        lines = [f"{n} {tuple(whole_shape(p))} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()]
        lines += [f"{n} {tuple(b.shape)} {b.dtype}" for n, b in model.named_buffers()]
        check_same_model(lines, comm, device)


def _synchronize_rest(
    model: torch.nn.Module,
    trained: list[torch.nn.Parameter],
    precision: Precision,
    comm: Communicator,
    device: torch.device,
) -> None:
    """Take rank 0's buffers and (where they are whole) frozen parameters, the latter in the compute dtype."""
    in_layout = {id(p) for p in trained}
    others = [p for p in model.parameters() if id(p) not in in_layout and handle_of(p) is None]
    rest: list[torch.Tensor] = [p.data for p in others]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
    rest += list(model.buffers())
    synchronize_tensors(rest, comm, device, "initial_sync")
    for parameter in others:
        parameter.data = parameter.data.to(precision.compute_dtype(parameter))


def _gone(model: torch.nn.Module, buffer: ParameterBuffer, indices: list[int]) -> list[int]:
    """Those of the trained parameters ``indices`` that ``model`` no longer has."""
    there = {id(parameter) for parameter in model.parameters()}
    return [index for index in indices if id(buffer.parameters[index]) not in there]


def _step_scheduler(engine: Engine | None) -> None:
    if engine is not None:
        engine.step_scheduler()


def _watch_loading(model: torch.nn.Module, pipeline: StepPipeline) -> list[Any]:
    """Hooks that tell the pipeline when ``load_state_dict`` of the model, or of a part of it, has changed
    parameters."""
    hook = _AfterLoading(pipeline)
    return [module.register_load_state_dict_post_hook(hook) for module in model.modules()]


class _AfterLoading(WeakHook[StepPipeline]):
    def __call__(self, module: torch.nn.Module, keys: Any) -> None:
        pipeline = self.owner()
        if pipeline is not None:
            pipeline.on_parameters_loaded(module.parameters())


def _remove_hooks(*lists: list[Any]) -> None:
    for handle in [handle for handles in lists for handle in handles]:
        handle.remove()


# -------------------------------------------------------------------- lines for people


def _print_progress(engine: Engine | None, norm: float) -> None:
    if engine is None:
        return
    every = engine.config.steps_per_print
    steps = engine.global_steps
    if engine.rank == 0 and every and steps % every == 0:
        lr = ", ".join(f"{value:.3g}" for value in engine.get_lr())
        print(
            f"step {steps}: skipped {engine.skipped_steps}, lr {lr}, grad norm {norm:.4g}, loss scale "
            f"{engine.loss_scale:g}",
            flush=True,
        )


def _dump_state(engine: Engine) -> None:
    print(f"{engine!r}\n{json.dumps(engine.config.model_dump(mode='json'), indent=2, default=str)}", flush=True)
