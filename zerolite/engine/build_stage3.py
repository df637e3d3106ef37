"""Construction of the stage 3 components: sliced buckets, partitioned parameters and their gathering."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from difflib import get_close_matches

import torch

from zerolite.config import ConfigError, ZeroliteConfig
from zerolite.config.zero import AUTO_GRANULARITY
from zerolite.offload.placements import Placements
from zerolite.precision.dtypes import Precision
from zerolite.zero.buffer import ParameterBuffer, PartitionedParameterBuffer
from zerolite.zero.gradient_memory import GradientMemory
from zerolite.zero.layout import ParameterSpec, PartitionLayout, auto_bucket_numel
from zerolite.zero.observers import Observers
from zerolite.zero.reducer import Reducer
from zerolite.zero.stage3.fetch_plan import FetchLimits
from zerolite.zero.stage3.launch_plan import LaunchPlan
from zerolite.zero.stage3.param_group import LEAST_MAX_LIVE, LeafRule, default_max_live, leaf_rule
from zerolite.zero.stage3.partitioned_model import PartitionedModel, Stage3Options, bucket_groups, groups_of_buckets
from zerolite.zero.stage3.partitioned_param_coordinator import CoordinatorCallbacks, PartitionedParameterCoordinator
from zerolite.zero.stage3.partitioned_parameter import handle_of, move_shard
from zerolite.zero.step import StepPipeline

logger = logging.getLogger("zerolite")


def bucket_numel(specs: list[ParameterSpec], config: ZeroliteConfig, world_size: int) -> int:
    """Return the elements of a bucket: from the config, or chosen by the sizes of the model and the data-parallel
    group."""
    zero = config.zero_optimization
    # A bucket is reduced as one and gathered as one, so the smaller of the two sizes counts.
    sizes = [size for size in (zero.reduce_bucket_size, zero.allgather_bucket_size) if size is not None]
    if sizes:
        return min(sizes)
    total = sum(spec.numel for spec in specs)
    # With a ratio whole buckets are on the host or on the device. At least 32 of them come close to any ratio.
    divided = zero.offload_optimizer.enabled and 0 < zero.offload_optimizer.ratio < 1
    numel = auto_bucket_numel(total, world_size)
    return min(numel, -(-total // 32)) if divided else numel


def partitioned_buffer(
    partitioned: PartitionedModel,
    trained: list[torch.nn.Parameter],
    specs: list[ParameterSpec],
    config: ZeroliteConfig,
    precision: Precision,
    memory: GradientMemory,
    placements: Placements,
) -> ParameterBuffer:
    """Make stage 3's buffer: shards in sliced buckets, each bucket in its placement."""
    _check_leaves(partitioned.model, config)
    shard = memory.groups.shard
    partitioned.plan(_stage3_options(config, partitioned.model, shard.main))
    layout = sliced_layout(partitioned, trained, specs, config, shard.world_size)
    buffer = PartitionedParameterBuffer(layout, trained, memory, move_shard, placements, _is_persistent)
    buffer.fill_from_shards(precision.compute_dtype, precision.master_dtype)
    in_layout = {id(p) for p in trained}
    numel = bucket_numel(specs, config, shard.world_size)
    partitioned.place_frozen(in_layout, precision.compute_dtype, placements, numel)
    return buffer


def _is_persistent(parameter: torch.nn.Parameter) -> bool:
    handle = handle_of(parameter)
    return handle is not None and handle.persistent


def sliced_layout(
    partitioned: PartitionedModel,
    parameters: Sequence[torch.nn.Parameter],
    specs: list[ParameterSpec],
    config: ZeroliteConfig,
    shards: int,
) -> PartitionLayout:
    """Make the layout of ``parameters``, with a bucket for each parameter group. Small neighbours share one."""
    # Persistent parameters join a bucket of others, whose shards have the same placement then. Offloaded ones differ.
    together = not config.zero_optimization.offload_param.enabled
    # The limit does not grow with the number of ranks: before the reduction a bucket has full gradients on each rank.
    limit = bucket_numel(specs, config, world_size=1)
    groups = bucket_groups(parameters, partitioned.groups, limit, together)
    return PartitionLayout.build_sliced(specs, groups, shards)


def _stage3_options(config: ZeroliteConfig, model: torch.nn.Module, logs: bool) -> Stage3Options:
    zero = config.zero_optimization
    leaf, granularity = zero.leaf_module, zero.stage3_module_granularity_threshold
    is_leaf = leaf_rule(zero.leaf_modules, leaf.classes, leaf.names, leaf.name_suffixes)
    max_live = zero.stage3_max_live_parameters
    if max_live is None:
        max_live = LEAST_MAX_LIVE if granularity is not None else default_max_live(model, is_leaf, AUTO_GRANULARITY)
        if logs and max_live > LEAST_MAX_LIVE:
            logger.info(
                "zero_optimization.stage3_max_live_parameters is %d: two and a half of the largest repeated block",
                max_live,
            )
    return Stage3Options(
        persistence=zero.stage3_param_persistence_threshold,
        model_persistence=zero.stage3_model_persistence_threshold,
        granularity=AUTO_GRANULARITY if granularity is None else granularity,
        blocks=granularity is None,
        is_leaf=is_leaf,
        limits=FetchLimits(
            prefetch_numel=0 if zero.overlap_comm is False else zero.stage3_prefetch_bucket_size,
            max_live_numel=max_live,
            max_reuse_distance=zero.stage3_max_reuse_distance,
            read_numel=zero.offload_param.buffer_count * zero.offload_param.buffer_size,
        ),
    )


def _check_leaves(model: torch.nn.Module, config: ZeroliteConfig) -> None:
    """Raise ConfigError for leaf modules that the model does not have.

    With a misspelled name the module would be gathered in parts, and ranks might hang. DeepSpeed's block
    ``leaf_module`` may list classes of other models, if at least one entry matches.
    """
    zero, leaf = config.zero_optimization, config.zero_optimization.leaf_module
    modules = list(model.named_modules())

    def lacks(rule: LeafRule) -> bool:
        return not any(rule(name, module) for name, module in modules)

    missing = {"leaf_modules": [pattern for pattern in zero.leaf_modules if lacks(leaf_rule([pattern]))]}
    named = [*leaf.classes, *leaf.names, *leaf.name_suffixes]
    if lacks(leaf_rule((), leaf.classes, leaf.names, leaf.name_suffixes)):
        missing["leaf_module"] = named
    known = [name for name, _ in modules if name] + sorted({type(module).__name__ for _, module in modules})
    errors = []
    for key, entries in missing.items():
        if entries:
            close = [match for entry in entries for match in get_close_matches(entry, known, 1)]
            hint = f"; the closest name is '{close[0]}'" if close else ""
            listed = ", ".join(f"'{entry}'" for entry in entries)
            sentence = (
                f"expected classes or qualified names of modules in the model, got {listed}, which none has{hint}"
            )
            errors.append((f"zero_optimization.{key}", sentence))
    if errors:
        raise ConfigError(errors)


def start_stage3(
    partitioned: PartitionedModel, pipeline: StepPipeline, reducer: Reducer, observers: Observers
) -> PartitionedParameterCoordinator:
    """Install the hooks that gather parameters, and return their coordinator. The caller must keep it alive, because
    hooks refer to it weakly."""
    coordinator = partitioned.start(CoordinatorCallbacks(observers, pipeline.begin_backward, reducer.on_group_end))
    observers.on_parameters_updated.append(coordinator.on_update)
    observers.on_gradients_dropped.append(coordinator.end_failed)
    launch_by_groups(partitioned, reducer)
    pipeline.written.use_coordinator(coordinator)
    return coordinator


def launch_by_groups(partitioned: PartitionedModel, reducer: Reducer) -> None:
    """Tell the coordinator which parameters are trained, and launch each bucket when the backward of its group has
    ended. The order of these ends is learned from here on."""
    coordinator = partitioned.coordinator
    coordinator.set_trained(reducer.parameters)
    groups = groups_of_buckets(reducer.buffer.layout, reducer.parameters, partitioned.groups)
    reducer.use_launch_plan(LaunchPlan(groups, coordinator.plan_progress))
