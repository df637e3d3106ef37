"""Checks of combinations: values that are valid alone and contradict each other together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from .parallelism import ONE_CHUNK, TWO_CHUNKS

if TYPE_CHECKING:
    from .models import ZeroliteConfig


class Contradiction(NamedTuple):
    """Keys that contradict each other, and a sentence. The error is reported at the first key."""

    paths: list[str]
    sentence: str


Found = Iterator[tuple[str, str]]  # (paths separated by blanks, sentence)


def find_contradictions(config: ZeroliteConfig) -> list[Contradiction]:
    """Return all contradictions in the configuration, in a fixed order."""
    return [Contradiction(paths.split(), sentence) for check in _CHECKS for paths, sentence in check(config)]


def _precision(config: ZeroliteConfig) -> Found:
    enabled = [f"{name}.enabled" for name in ("fp16", "bf16", "torch_autocast") if getattr(config, name).enabled]
    if len(enabled) > 1:
        switched_on = " and ".join(f"{path} = true" for path in enabled)
        yield " ".join(enabled), f"expected one precision at most, got {switched_on}; keep one of them"
    bf16, fp16, autocast = config.bf16, config.fp16, config.torch_autocast
    if bf16.enabled and bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        yield (
            "bf16.bf16_optimizer_states bf16.bf16_master_weights_and_grads bf16.enabled",
            "expected bf16.bf16_master_weights_and_grads = true beside it, got false; set both or neither",
        )
    scaled = fp16.enabled or (autocast.enabled and autocast.dtype == "fp16")
    if scaled and fp16.loss_scale == 0 and 2**fp16.initial_scale_power < fp16.min_loss_scale:
        yield (
            "fp16.min_loss_scale fp16.initial_scale_power fp16.loss_scale fp16.enabled",
            f"expected at most the initial scale, 2 to the power of fp16.initial_scale_power = "
            f"{2**fp16.initial_scale_power}, got {fp16.min_loss_scale}; lower it or raise the power",
        )


def _communication(config: ZeroliteConfig) -> Found:
    autocast, everywhere = config.torch_autocast, config.communication_data_type
    if autocast.enabled and autocast.lower_precision_safe_modules and everywhere is not None:
        yield (
            "communication_data_type torch_autocast.lower_precision_safe_modules torch_autocast.enabled",
            f"expected null beside torch_autocast.lower_precision_safe_modules, which chooses the gradients that are "
            f'reduced in 16 bits, got "{everywhere}" for all gradients; keep one of the two',
        )
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        yield (
            "gradient_predivide_factor prescale_gradients",
            f"expected 1.0 when prescale_gradients is true (gradients are then divided by the number of ranks before "
            f"the sum), got {config.gradient_predivide_factor:g}; keep one of the two",
        )


def _unmanaged(config: ZeroliteConfig) -> Found:
    if config.managed_gradient_accumulation:
        return
    path, accumulation = "managed_gradient_accumulation", config.gradient_accumulation_steps
    if accumulation not in (None, 1):
        yield (
            f"gradient_accumulation_steps {path}",
            f"expected 1 with {path} = false, where every engine.step() updates and no loss is divided, got "
            f"{accumulation}; leave it out and divide the losses yourself",
        )
    if config.pipeline.stages > 1:
        yield (
            f"{path} pipeline.stages",
            f"expected true with a pipeline (pipeline.stages = {config.pipeline.stages}), whose train_batch runs whole "
            "steps, got false; leave it out",
        )


def _offload(config: ZeroliteConfig) -> Found:
    """Require a path for a disk, unless nothing is offloaded at this stage."""
    zero = config.zero_optimization
    for name, fewest in (("offload_optimizer", 1), ("offload_param", 3)):
        block = getattr(zero, name)
        if block.device == "nvme" and block.nvme_path is None and zero.stage >= fewest:
            yield (
                f"zero_optimization.{name}.nvme_path zero_optimization.{name}.device",
                f'expected the path of a folder on the disk, got nothing, and {name}.device is "nvme"; write it, such '
                'as "/local_nvme"',
            )
    optimizer = zero.offload_optimizer
    if zero.stage != 0 and optimizer.device == "nvme" and optimizer.ratio < 1.0:
        yield (
            "zero_optimization.offload_optimizer.ratio zero_optimization.offload_optimizer.device",
            f'expected 1 when offload_optimizer.device is "nvme", got {optimizer.ratio:g}; leave it out, or use "cpu"',
        )
    one, other = config.aio.thread_count, config.aio.intra_op_parallelism
    if one is not None and other is not None and one != other:
        yield (
            "aio.intra_op_parallelism aio.thread_count",
            f"expected the value of its other name, aio.thread_count = {one}, got {other}; leave one of the two out",
        )


def _accumulation_dtype(config: ZeroliteConfig) -> Found:
    """Allow accumulation in fp32 or in the dtype of the computation. Any other dtype loses bits without a gain."""
    dtype, path = config.data_types.grad_accum_dtype, "data_types.grad_accum_dtype"
    switches = "fp16.enabled bf16.enabled"
    compute = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    if dtype not in (None, "fp32", compute):
        allowed = '"fp32"' if compute == "fp32" else f'"fp32" or "{compute}"'
        yield (
            f"{path} {switches}",
            f'expected {allowed} (gradients are computed in {compute}), got "{dtype}"; use one of these or null',
        )
    for low, block in (("fp16", config.fp16), ("bf16", config.bf16)):
        key = f"{low}_master_weights_and_grads"
        if dtype == "fp32" and block.enabled and getattr(block, key):
            yield (
                f"{path} {low}.{key} {switches}",
                f'expected "{low}" or null, since {low}.{key} keeps gradients in {low}, got "fp32"; keep one of the '
                "two",
            )


def _pipeline(config: ZeroliteConfig) -> Found:
    block, stage = config.pipeline, config.zero_optimization.stage
    if block.stages == 1:
        return
    if stage in (2, 3):
        what = "reduce-scatter all gradients" if stage == 2 else "gather all parameters and reduce-scatter gradients"
        yield (
            "zero_optimization.stage pipeline.stages",
            f"expected 0 or 1 with a pipeline (pipeline.stages = {block.stages}), got {stage}: stage {stage} would "
            f"{what} once for every micro-batch, where stage 1 does it once a step; use stage 1",
        )
    chunks, one, two = block.chunks, block.schedule in ONE_CHUNK, block.schedule in TWO_CHUNKS
    fits = chunks == 1 if one else chunks == 2 if two else chunks != 1 or block.schedule == "zero_bubble"
    if chunks is not None and not fits:
        needs = "1" if one else "2" if two else "2 or more"
        yield (
            "pipeline.chunks pipeline.schedule",
            f'expected {needs} with pipeline.schedule = "{block.schedule}", got {chunks}; change one of the two',
        )
    parts = block.stages * block.chunks_per_rank
    if block.split != "auto" and len(block.split) != parts - 1:
        yield (
            "pipeline.split pipeline.stages pipeline.chunks",
            f"expected {parts - 1} name{'s' if parts > 2 else ''}: the first module of each part but the first "
            f"({block.stages} stages x {block.chunks_per_rank} = {parts} parts), got {len(block.split)}; name as many, "
            'or write "auto"',
        )
    if config.flops_profiler.enabled:
        yield (
            "flops_profiler.enabled pipeline.stages",
            f"expected false with pipeline.stages = {block.stages}, where no rank runs the whole forward of the model, "
            "got true; leave it out (`zerolite plan` counts)",
        )


def _replicas(config: ZeroliteConfig) -> Found:
    zero = config.zero_optimization
    if zero.shard_size is not None and zero.mics_shard_size not in (-1, 0, zero.shard_size):
        yield (
            "zero_optimization.mics_shard_size zero_optimization.shard_size",
            f"expected the value of its other name, zero_optimization.shard_size = {zero.shard_size}, got "
            f"{zero.mics_shard_size}; leave one of the two out",
        )
    if zero.feeds_errors_back and not zero.zero_quantized_gradients:
        yield (
            "zero_optimization.zeropp_loco_param zero_optimization.zero_quantized_gradients",
            "expected zero_optimization.zero_quantized_gradients = true beside it, whose errors it feeds back, got "
            "false; set both or neither",
        )
    for name in ("zero_quantized_weights", "zero_quantized_gradients") if zero.ranks_of_shards is None else ():
        if getattr(zero, name) and zero.stage == 3:
            yield (
                f"zero_optimization.{name} zero_optimization.stage",
                "expected false, got true: it needs zero_optimization.shard_size or zero_hpz_partition_size, because "
                "only traffic between sets of ranks is compressed; set one of them to the ranks of a node",
            )
    if zero.zero_quantized_gradients and zero.stage in (1, 2) and zero.ranks_of_shards and not zero.reduce_scatter:
        yield (
            "zero_optimization.zero_quantized_gradients zero_optimization.reduce_scatter",
            "expected zero_optimization.reduce_scatter = true beside it, because an all-reduce of all ranks is not "
            "compressed, got false; leave one of the two out",
        )
    if not zero.is_hierarchical:
        return
    key, size = "zero_optimization.zero_hpz_partition_size", zero.zero_hpz_partition_size
    for name in ("shard_size", "mics_shard_size"):
        if (getattr(zero, name) or 0) > 0:
            yield (
                f"{key} zero_optimization.{name}",
                f"expected 1 beside zero_optimization.{name}, with which each set of ranks has all states, got {size}; "
                "leave one of the two out",
            )
    if zero.offload_param.enabled:
        yield (
            f"{key} zero_optimization.offload_param.device",
            "expected 1 with zero_optimization.offload_param, because updates send parameters from device to device, "
            f"got {size}; leave one of the two out (zero_optimization.offload_optimizer goes with both)",
        )


def _tensor_parallel(config: ZeroliteConfig) -> Found:
    block = config.tensor_parallel
    if block.autotp_size > 1 and block.size not in (1, block.autotp_size):
        yield (
            "tensor_parallel.autotp_size tensor_parallel.size",
            f"expected the value of its other name, tensor_parallel.size = {block.size}, got {block.autotp_size}; "
            "leave one of the two out",
        )


def _sequence_parallel(config: ZeroliteConfig) -> Found:
    block = config.sequence_parallel
    if block.size == 1:
        return
    if config.pipeline.stages > 1:
        yield (
            "sequence_parallel.size pipeline.stages",
            f"expected 1 with a pipeline (pipeline.stages = {config.pipeline.stages}), got {block.size}; leave one of "
            "the two out",
        )
    if config.tensor_parallel.sequence_parallel and config.tensor_parallel.ranks > 1:
        yield (
            "sequence_parallel.size tensor_parallel.sequence_parallel",
            f"expected 1 with tensor_parallel.sequence_parallel, which divides each part of a sequence again, got "
            f"{block.size}; leave one of the two out",
        )


def _expert_parallel(config: ZeroliteConfig) -> Found:
    block, zero = config.expert_parallel, config.zero_optimization
    if block.autoep_size and block.size > 1 and block.size != block.autoep_size:
        yield (
            "expert_parallel.autoep_size expert_parallel.size",
            f"expected the value of its other name, expert_parallel.size = {block.size}, got {block.autoep_size}; "
            "leave one of the two out",
        )
    for key, value in (("capacity", block.capacity), ("log_load", block.log_load)):
        if value and block.ranks == 1:
            yield (
                f"expert_parallel.{key} expert_parallel.size",
                f"expected no {key} where the ranks do not share experts (expert_parallel.size 1), got "
                f"{json.dumps(value)}; leave it out: it would have no effect",
            )
    others = {
        "pipeline.stages": config.pipeline.stages > 1,
        "tensor_parallel.size": config.tensor_parallel.ranks > 1,
        "zero_optimization.zero_quantized_weights": zero.zero_quantized_weights,
        "zero_optimization.zero_quantized_gradients": zero.zero_quantized_gradients,
    }
    for path in others if block.ranks > 1 else ():
        if others[path]:
            yield (
                f"expert_parallel.size {path}",
                f"expected 1 with {path}, which does not know experts on several ranks yet, got {block.ranks}; leave "
                "one of the two out",
            )


def _sums_on_the_device(config: ZeroliteConfig) -> Found:
    """Refuse offload of gradients that must also be summed over stages or over parts of a sequence.

    Those sums run on the device, before the step. With offload the gradients would be on the host by then.
    """
    offload = config.zero_optimization.offload_optimizer
    on = {"pipeline.stages": config.pipeline.stages > 1}
    on["tensor_parallel.sequence_parallel"] = config.tensor_parallel.sequence_parallel
    for path in on if config.zero_optimization.stage != 0 and offload.enabled else ():
        if on[path]:
            yield (
                f"zero_optimization.offload_optimizer.device {path}",
                f'expected "none" with {path}, got "{offload.device}": gradients that several stages or parts of a '
                "sequence share are summed on the device; leave one of the two out",
            )


_CHECKS: tuple[Callable[[ZeroliteConfig], Found], ...] = (
    _precision,
    _communication,
    _unmanaged,
    _offload,
    _accumulation_dtype,
    _replicas,
    _tensor_parallel,
    _sequence_parallel,
    _expert_parallel,
    _pipeline,
    _sums_on_the_device,
)
