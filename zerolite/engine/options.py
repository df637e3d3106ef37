"""Options of an engine's parts, where several keys of the config decide together.

What a part takes from one key as it is stands where the part is made, in ``build_parts.py``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from difflib import get_close_matches

import torch

from zerolite.comm import Topology
from zerolite.config import ConfigError, ZeroliteConfig
from zerolite.config.zero import AUTO_GRANULARITY
from zerolite.precision.dtypes import Precision
from zerolite.precision.loss_scaler import LossScaler
from zerolite.utils.dtypes import DTYPES
from zerolite.zero.gradient_dtypes import ReductionOptions
from zerolite.zero.groups import RankGroups
from zerolite.zero.layout import ParameterSpec, auto_bucket_numel
from zerolite.zero.stage3.fetch_plan import FetchLimits
from zerolite.zero.stage3.group_plan import LEAST_MAX_LIVE, LeafRule, default_max_live, leaf_rule
from zerolite.zero.stage3.partitioned_model import Stage3Options
from zerolite.zero.stages import StagePolicy
from zerolite.zero.step_state import StepOptions

logger = logging.getLogger("zerolite")

SKIPS_ON_DEVICE = {"cuda"}
"""Types of device on which the host does not wait for a step's statistics. Tests add "cpu"."""


def precision_of(config: ZeroliteConfig) -> Precision:
    buffers = config.data_types.buffer_dtype
    block = next((block for block in (config.fp16, config.bf16, config.torch_autocast) if block.enabled), None)
    outputs = None if block is None else block.output_dtype
    return dataclasses.replace(
        _precision_of(config),
        buffers=None if buffers is None else DTYPES[buffers],
        outputs_in_fp32=None if outputs is None else outputs == "fp32",
    )


def _precision_of(config: ZeroliteConfig) -> Precision:
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


def loss_scaler(config: ZeroliteConfig) -> LossScaler | None:
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


EXACT_SUMS_FROM = 64
"""From this number of ranks on, bf16 gradients are reduced in fp32, unless the config says otherwise.

A ring adds the values of one rank after the other, and rounds each time. In a simulation in bf16 the relative error of
the sum grows from 3e-3 at 8 ranks to 3.5e-2 at 1,024."""


def communication_dtypes(
    model: torch.nn.Module, config: ZeroliteConfig, precision: Precision, world_size: int
) -> Callable[[torch.nn.Parameter], torch.dtype | None]:
    """Return a function from a parameter to the dtype in which its gradient is reduced over ``world_size`` ranks, those
    that split a bucket. It returns None for the gradient's own dtype. Sums over replicas are taken in fp32 or wider."""

    def by_default(parameter: torch.nn.Parameter) -> torch.dtype | None:
        long = world_size >= EXACT_SUMS_FROM
        return torch.float32 if long and precision.compute_dtype(parameter) == torch.bfloat16 else None

    if config.communication_data_type is not None:
        everywhere = DTYPES[config.communication_data_type]
        return lambda parameter: everywhere
    autocast = config.torch_autocast
    if not autocast.enabled or not autocast.lower_precision_safe_modules:
        return by_default
    safe = set(autocast.lower_precision_safe_modules)
    low: set[int] = set()
    named: set[str] = set()
    for module in model.modules():
        for cls in type(module).__mro__:
            matches = {f"{cls.__module__}.{cls.__qualname__}", _public_name(cls), cls.__qualname__} & safe
            if matches:
                named |= matches
                low |= {id(parameter) for parameter in module.parameters(recurse=False)}
    if safe - named:
        sentence = (
            f"expected classes of modules in the model, got {', '.join(sorted(safe - named))}, which none of its "
            "modules is; write the class as in torch.nn.Linear"
        )
        raise ConfigError([("torch_autocast.lower_precision_safe_modules", sentence)])
    dtype = DTYPES[autocast.dtype]

    def by_module(parameter: torch.nn.Parameter) -> torch.dtype | None:
        chosen = id(parameter) in low and not precision.keeps_fp32(parameter)
        return dtype if chosen else by_default(parameter)

    return by_module


def _public_name(cls: type) -> str:
    """Return the name that users write: torch.nn.Linear, not torch.nn.modules.linear.Linear."""
    return f"torch.nn.{cls.__qualname__}" if getattr(torch.nn, cls.__qualname__, None) is cls else ""


def reduction_options(
    config: ZeroliteConfig,
    policy: StagePolicy,
    precision: Precision,
    groups: RankGroups,
    several_expected: bool,
    communication: Callable[[torch.nn.Parameter], torch.dtype | None],
    keep_buckets: bool,
    alone: bool,
) -> ReductionOptions:
    """Return the options of gradient reduction.

    Args:
        groups: the groups of the reductions.
        several_expected: a step may have several backwards.
        communication: the dtype in which a parameter's gradient is reduced.
        alone: there is only one process. A gradient that is not finite then need not be traced to its rank.
    """
    zero = config.zero_optimization
    asked = config.data_types.grad_accum_dtype
    if asked is not None:
        accumulate: torch.dtype | None = DTYPES[asked]
    else:
        accumulate = torch.float32 if precision.separate_masters else None
    predivide = float(groups.mean.world_size) if config.prescale_gradients else config.gradient_predivide_factor
    # Dividing by a power of two is exact. So by default the mean is taken while gradients are copied into their
    # buckets, at no cost. Not in fp16, where it could push small gradients below the smallest number.
    divisor = groups.divisor
    free = predivide == 1.0 and divisor & (divisor - 1) == 0 and precision.compute != torch.float16
    return ReductionOptions(
        reduce_each_backward=policy.shard_gradients,
        shard=policy.shard_optimizer,
        use_reduce_scatter=zero.reduce_scatter,
        accumulate_dtype=accumulate,
        several_expected=several_expected,
        communication_dtype=communication,
        copy_factor=1.0 / divisor if free else 1.0,
        predivide_factor=predivide,
        copy_on_arrival=zero.contiguous_gradients,
        overlap=zero.overlap_comm is not False,
        keep_buckets=keep_buckets,
        sum_buckets=not alone,
    )


def step_options(config: ZeroliteConfig, update_numel: int, skip_on_device: bool, topology: Topology) -> StepOptions:
    return StepOptions(
        max_norm=config.gradient_clipping,
        check_finite=config.bf16.check_grad_overflow or not config.bf16.enabled,
        max_skipped_in_a_row=config.max_consecutive_skipped_steps,
        logs=topology.data.is_rank0,
        skip_on_device=skip_on_device,
        update_numel=update_numel,
        divide_plain_backward=config.divide_plain_backward,
        has_parts=not topology.trivial,
    )


# -------------------------------------------------------------------- buckets, and the groups of stage 3


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


def stage3_options(config: ZeroliteConfig, model: torch.nn.Module, logs: bool) -> Stage3Options:
    """Return the options of parameter groups and of their gathers. Raises ConfigError for leaf modules that the model
    does not have. ``logs``: this rank logs for all."""
    _check_leaves(model, config)
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
