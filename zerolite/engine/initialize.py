"""``zerolite.initialize``: set up communication, divide the model over its grid, build the engine."""

from __future__ import annotations

import fnmatch
import json
import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from zerolite.checkpoint.partial_state import forbid_partial_state_dicts
from zerolite.comm import (
    Communicator,
    HostGroup,
    RaiseTogether,
    Topology,
    collective,
    create_communicator,
    create_topology,
    init_distributed,
    local_rank,
    ranks_of_host,
    with_experts,
    with_replicas,
    with_sequence,
)
from zerolite.config import ConfigError, ZeroliteConfig, load_config
from zerolite.config.parallelism import ExpertParallelConfig
from zerolite.data.micro_batch import LossFunction
from zerolite.diagnostics.rank_comparison import (
    Description,
    check_equal_on_ranks,
    describe_config,
    describe_process,
    joined,
)
from zerolite.diagnostics.watchdog import Watchdog, start_watchdog
from zerolite.engine.arguments import Arguments, OptimizerLike, check_model
from zerolite.engine.build import build_engine
from zerolite.engine.engine import Engine
from zerolite.engine.engine_base import parts_of
from zerolite.tensor_parallel.shard_spec import is_of_experts
from zerolite.utils.accelerator import default_device, keep_freed_memory, make_current
from zerolite.zero.inner_tensors import check_has_memory

if TYPE_CHECKING:
    from zerolite.pipe.prepare import PreparedStage

logger = logging.getLogger("zerolite")


@collective
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
    loss_fn: LossFunction | None = None,
) -> Engine:
    """Make an :class:`~zerolite.engine.engine.Engine` of ``model``.

    Starts torch.distributed if it is not running. A grid leaves in ``model`` only the part of this rank.

    Args:
        model: moved to this process's device. Its ``Parameter`` objects stay; they get rank 0's values, the compute
            dtype of ``config``, and memory in flat buffers.
        config: DeepSpeed's schema as a dict, a path, or JSON or hjson text.
        optimizer: an instance, a class, or a function of parameters; default: ``config["optimizer"]``. Without either
            the parameters are frozen, and the engine only evaluates.
        model_parameters: parameters or param groups to train; default: all that require a gradient.
        training_data: a dataset, for ``engine.dataloader``.
        lr_scheduler: an instance, or a function of the optimizer; default: ``config["scheduler"]``. The engine steps it
            after every update.
        collate_fn: makes a batch of a list of samples, for this engine's loaders.
        broadcast_buffers: send rank 0's buffers before each training forward.
        num_local_io_workers: processes that load ``training_data``; 0 loads in this one.
        loss_fn: function of (outputs, targets) that returns a scalar, for ``engine.train_batch``; None if the model
            computes its loss itself.

    Raises:
        ConfigError: for the config.
        ValueError: for the other arguments.
        RuntimeError: ranks have different models, configs or optimizers.
    """
    check_model(model)
    resolved, topology, device, watchdog = _join_ranks(load_config(config))
    trained = _listed(model_parameters)  # now, because an iterator over the model would find its shards later
    pipe_stage, loss_fn = parallelize_model(model, resolved, topology, device, loss_fn)
    resolved = _keep_local_patterns(model, resolved, topology)
    arguments = Arguments(optimizer, trained, lr_scheduler, broadcast_buffers, collate_fn, loss_fn)
    engine = build_engine(model, resolved, arguments, topology, device, pipe_stage=pipe_stage)
    watchdog.watch(engine, parts_of(engine))
    if training_data is not None:
        engine.dataloader = engine.deepspeed_io(training_data, num_local_io_workers=num_local_io_workers)
    _print_state(engine, topology)
    return engine


def _print_state(engine: Engine, topology: Topology) -> None:
    """Print engine and config on rank 0, if the config asks for it."""
    if engine.config.dump_state and topology.data.is_rank0:
        print(f"{engine!r}\n{json.dumps(engine.config.model_dump(mode='json'), indent=2, default=str)}", flush=True)


def _join_ranks(config: ZeroliteConfig) -> tuple[ZeroliteConfig, Topology, torch.device, Watchdog]:
    """Start this process and its watchdog, and form the grid with the other ranks. Return the config with batch sizes
    resolved, the grid, this process's device and the watchdog."""
    device = _start_process()
    watchdog = start_watchdog(config.desync_timeout_s)
    topology = _make_topology(config, create_communicator(device), device)
    return _resolved(config, topology), topology, device, watchdog


def _start_process() -> torch.device:
    """Start torch.distributed if it is not running, and return this process's device."""
    init_distributed()
    device = default_device(local_rank())
    make_current(device)  # also if the user has started torch.distributed
    if device.type == "cpu":
        keep_freed_memory()
    return device


def _make_topology(config: ZeroliteConfig, world: Communicator, device: torch.device) -> Topology:
    """Make the grid of the config. Raises on all ranks if their configs have different grids."""
    pipe, tensor, shard = config.pipeline.stages, config.tensor_parallel.size, config.zero_optimization.ranks_of_shards
    key, sequence = config.zero_optimization.key_of_sets, config.sequence_parallel.size
    experts = config.expert_parallel.ranks
    sizes = ((_PIPE, pipe), (_TENSOR, tensor), (_SEQUENCE, sequence), (_EXPERTS, experts), (key, shard))
    facts = {f"config key {name}": {"": str(size)} for name, size in sizes}
    local = ranks_of_host(os.environ)
    if shard is not None:
        facts["the number of ranks on this host"] = {"": str(local)}
    different = "zerolite.initialize: the ranks are to form different grids"
    check_equal_on_ranks(Description(facts), world, device, different)
    return form_grid(config, world, device, local)


@collective
def form_grid(config: ZeroliteConfig, world: Communicator, device: torch.device, host: int | None) -> Topology:
    """Divide the ranks of ``world``, all of the job, as the config says. In a dry run the grid is dry too.

    Raises ConfigError if they cannot form the grid.

    Args:
        host: ranks on each host; None if unknown.
    """
    pipe, tensor, zero = config.pipeline.stages, config.tensor_parallel.size, config.zero_optimization
    key = _PIPE if pipe > 1 else _TENSOR
    try:
        topology = create_topology(world, device, pipe, tensor, host)
        key = _SEQUENCE
        topology = with_sequence(topology, device, config.sequence_parallel.size)
        key = _EXPERTS
        topology = with_experts(topology, device, config.expert_parallel.ranks)
        key = zero.key_of_sets
        shard = zero.ranks_of_shards
        return topology if shard is None else with_replicas(topology, device, shard)
    except ValueError as error:
        raise ConfigError([(key, str(error))]) from None


def _resolved(config: ZeroliteConfig, topology: Topology) -> ZeroliteConfig:
    """Warn of keys without effect, and resolve the batch sizes.

    With several dimensions an error says that its world size counts data-parallel ranks only.
    """
    if topology.data.is_rank0:
        for path, sentence in config.without_effect:
            logger.warning("%s has no effect: %s", path, sentence)
    try:
        return config.resolve(topology.batch.world_size)
    except ConfigError as error:
        if topology.trivial and topology.batch is topology.data:
            raise
        counted = f"the world size is that of data-parallel ranks: {topology.grid} of {topology.world.world_size}"
        raise ConfigError([(path, f"{sentence} ({counted})") for path, sentence in error.errors]) from None


_PIPE, _TENSOR, _SEQUENCE = "pipeline.stages", "tensor_parallel.size", "sequence_parallel.size"
_EXPERTS = "expert_parallel.size"


def _listed(model_parameters: Iterable[Any] | None) -> list[Any] | None:
    """Return parameters and param groups with lists for iterators, which can be read only once."""
    if model_parameters is None:
        return None

    def listed(entry: Any) -> Any:
        params = entry.get("params") if isinstance(entry, dict) else None
        return entry if params is None or isinstance(params, torch.Tensor) else {**entry, "params": list(params)}

    return [listed(entry) for entry in model_parameters]


# -------------------------------------------------------------------- this rank's part of the model


@collective
def parallelize_model(
    model: torch.nn.Module,
    config: ZeroliteConfig,
    topology: Topology,
    device: torch.device,
    loss_fn: LossFunction | None,
) -> tuple[PreparedStage | None, LossFunction | None]:
    """Reduce ``model`` to this rank's pipeline stage and its tensor-parallel shards.

    Returns:
        The prepared stage, None without a pipeline; and the loss function, the given one or the model's.
    """
    pipe_stage: Any = None
    if not topology.trivial or topology.batch is not topology.data or topology.expert.world_size > 1:
        described = joined(describe_process(), describe_config(config))
        different = "zerolite.initialize: the ranks hold different configs or versions"
        check_equal_on_ranks(described, topology.world, device, different)
    is_pipeline_module = getattr(model, "is_pipeline_module", False)  # whose layers are not there yet
    if not is_pipeline_module and (not topology.trivial or topology.expert.world_size > 1):
        for name, parameter in model.named_parameters():
            check_has_memory(name, parameter)
    if topology.pipe.world_size > 1 or is_pipeline_module:
        from zerolite.pipe.prepare import prepare

        pipe_stage = prepare(model, config.pipeline, topology, device, loss_fn)
    if topology.tensor.world_size > 1:
        _shard_layers(model, config, topology, device)
    if topology.expert.world_size > 1:
        _spread_experts(model, topology, device, config.expert_parallel)
    elif any(map(is_of_experts, model.parameters())):
        raise RuntimeError(
            "zerolite.initialize: expected a model with all experts, got one of which an engine with expert_parallel "
            "has left this rank a part; build the model again, or keep the block in the config"
        )
    forbid_partial_state_dicts(model, topology)
    if pipe_stage is not None:
        loss_fn = pipe_stage.loss_fn
    return pipe_stage if topology.pipe.world_size > 1 else None, loss_fn


def _spread_experts(
    model: torch.nn.Module, topology: Topology, device: torch.device, config: ExpertParallelConfig
) -> None:
    """Leave this rank its experts. Raises ConfigError on all ranks if the model has none that can be spread."""
    from zerolite.moe.balancing import find_biases
    from zerolite.moe.experts import describe_experts, find_experts, spread_experts

    found: dict[str, torch.nn.Module] = {}
    error = None
    try:
        found = find_experts(model, topology.expert.world_size)
        if config.load_balance_coeff:
            find_biases(model, found)
        facts = describe_experts(found)
    except ConfigError as refused:
        error, facts = refused, {"the experts": {"": str(refused)}}
    different = "zerolite.initialize: the ranks have different experts"
    check_equal_on_ranks(Description(facts), topology.world, device, different)
    if error is not None:
        raise error
    spread_experts(model, found, topology, device, config.capacity)


def _shard_layers(model: torch.nn.Module, config: ZeroliteConfig, topology: Topology, device: torch.device) -> None:
    """Shard the layers by the tensor-parallel plan. If the plan is wrong on one stage, all stages raise ValueError. It
    may match nothing on some stages, but not on all."""
    from zerolite import tensor_parallel
    from zerolite.tensor_parallel.plan import no_plan_sentence, unmatched

    stages = topology.pipe.world_size
    unused = RaiseTogether(HostGroup(topology.pipe, "parts"), "zerolite.initialize", ValueError).gather(
        lambda: tensor_parallel.parallelize_module(
            model, config.tensor_parallel, topology.tensor, device, stage=stages > 1
        )
    )
    nowhere = set.intersection(*map(set, unused))
    if nowhere and len(unused) == stages > 1:  # a dry run sees its own stage only, so it cannot tell
        sentence = no_plan_sentence(model) if "auto" in nowhere else f"{unmatched(min(nowhere), ())}, on any stage"
        raise ValueError(f"tensor_parallel.plan: {sentence}")


@collective
def _keep_local_patterns(model: torch.nn.Module, config: ZeroliteConfig, topology: Topology) -> ZeroliteConfig:
    """Return ``config`` without the patterns that match only modules of other stages.

    A LayerSpec makes its layer on its own stage alone, so the other stages do not have that module. Raises ConfigError
    on all ranks for a pattern that matches on no stage.
    """
    if topology.pipe.world_size == 1:
        return config
    patterns_of = {
        "fp32_modules": config.fp32_modules,
        "activation_checkpointing.modules": config.activation_checkpointing.modules,
        "torch_autocast.lower_precision_safe_modules": config.torch_autocast.lower_precision_safe_modules or (),
    }
    if not any(patterns_of.values()):
        return config
    matching = {key: frozenset(p for p in patterns if _some_match(model, p)) for key, patterns in patterns_of.items()}
    of_stages = HostGroup(topology.pipe, "parts").gather(matching)
    on_some_stage = {key: frozenset().union(*(of_stage[key] for of_stage in of_stages)) for key in patterns_of}
    errors = [
        (key, f'expected patterns of modules in the model, got "{pattern}", which matches none on any stage')
        for key, patterns in patterns_of.items()
        for pattern in patterns
        if pattern not in on_some_stage[key]
    ]
    if errors and len(of_stages) == topology.pipe.world_size:  # a dry run sees its own stage only, so it cannot tell
        raise ConfigError(errors)
    local = {key: tuple(p for p in patterns if p in matching[key]) for key, patterns in patterns_of.items()}
    checkpointing = {"modules": local["activation_checkpointing.modules"]}
    autocast = {"lower_precision_safe_modules": local["torch_autocast.lower_precision_safe_modules"] or None}
    return config.model_copy(
        update={
            "fp32_modules": local["fp32_modules"],
            "activation_checkpointing": config.activation_checkpointing.model_copy(update=checkpointing),
            "torch_autocast": config.torch_autocast.model_copy(update=autocast),
        }
    )


def _some_match(model: torch.nn.Module, pattern: str) -> bool:
    """Return True if the name of a module, or of its class, matches. Each key has stricter rules of its own, applied
    later."""
    for name, module in model.named_modules(remove_duplicate=False):
        mro = type(module).__mro__
        classes = [text for cls in mro for text in (cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}")]
        names = (name, f".{name}", f"torch.nn.{type(module).__name__}", *classes)
        if name and any(fnmatch.fnmatchcase(text, pattern) for text in names):
            return True
    return False
