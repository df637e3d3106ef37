"""Checks of combinations: values that are valid alone and contradict each other together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .parallelism import ONE_CHUNK, TWO_CHUNKS

if TYPE_CHECKING:
    from .models import ZeroliteConfig

_ONE_OUT = "leave one of the two out"
_ZERO = "zero_optimization"


Found = Iterator[tuple[str, str, object, str]]  # paths separated by blanks, what is expected, what came, what to do


def find_contradictions(config: ZeroliteConfig) -> Iterator[tuple[list[str], str]]:
    """Yield keys that contradict each other, and a sentence. The error is reported at the first key."""
    for check in (_precision, _accumulation, _offload, _replicas, _parallelism, _experts, _pipeline):
        for paths, expected, got, remedy in check(config):
            yield paths.split(), f"expected {expected}, got {got}; {remedy}"


def _precision(config: ZeroliteConfig) -> Found:
    enabled = [f"{name}.enabled" for name in ("fp16", "bf16", "torch_autocast") if getattr(config, name).enabled]
    if len(enabled) > 1:
        yield " ".join(enabled), "one precision at most", f"{' and '.join(enabled)} = true", "keep one of them"
    bf16, fp16, autocast, everywhere = config.bf16, config.fp16, config.torch_autocast, config.communication_data_type
    if bf16.enabled and bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        paths = "bf16.bf16_optimizer_states bf16.bf16_master_weights_and_grads bf16.enabled"
        yield paths, "bf16.bf16_master_weights_and_grads = true beside it", "false", "set both or neither"
    if autocast.enabled and autocast.lower_precision_safe_modules and everywhere is not None:
        safe = "torch_autocast.lower_precision_safe_modules"
        expected = f"null beside {safe}, which chooses the gradients that are reduced in 16 bits"
        paths = f"communication_data_type {safe} torch_autocast.enabled"
        yield paths, expected, f'"{everywhere}" for all gradients', "keep one of the two"
    # Gradients add up in fp32 or in the dtype of the computation. Any other dtype loses bits without a gain.
    dtype, path = config.data_types.grad_accum_dtype, "data_types.grad_accum_dtype"
    switches = "fp16.enabled bf16.enabled"
    compute = "fp16" if fp16.enabled else "bf16" if bf16.enabled else "fp32"
    if dtype not in (None, "fp32", compute):
        expected = '"fp32"' if compute == "fp32" else f'"fp32" or "{compute}"'
        expected += f" (gradients are computed in {compute})"
        yield f"{path} {switches}", expected, f'"{dtype}"', "use one of these or null"
    for low, block in (("fp16", fp16), ("bf16", bf16)):
        key = f"{low}_master_weights_and_grads"
        if dtype == "fp32" and block.enabled and getattr(block, key):
            expected = f'"{low}" or null, since {low}.{key} keeps gradients in {low}'
            yield f"{path} {low}.{key} {switches}", expected, '"fp32"', "keep one of the two"


def _accumulation(config: ZeroliteConfig) -> Found:
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        expected = "1.0 when prescale_gradients is true (gradients are divided by the number of ranks before the sum)"
        paths = "gradient_predivide_factor prescale_gradients"
        yield paths, expected, f"{config.gradient_predivide_factor:g}", "keep one of the two"
    path, accumulation = "managed_gradient_accumulation", config.gradient_accumulation_steps
    if not config.managed_gradient_accumulation and accumulation not in (None, 1):
        expected = f"1 with {path} = false, where every engine.step() updates and no loss is divided"
        remedy = "leave it out and divide the losses yourself"
        yield f"gradient_accumulation_steps {path}", expected, accumulation, remedy
    if not config.managed_gradient_accumulation and config.pipeline.stages > 1:
        expected = f"true with a pipeline ({_stages(config)}), whose train_batch runs whole steps"
        yield f"{path} pipeline.stages", expected, "false", "leave it out"


def _stages(config: ZeroliteConfig) -> str:
    return f"pipeline.stages = {config.pipeline.stages}"


def _offload(config: ZeroliteConfig) -> Found:
    zero = config.zero_optimization
    for name, fewest in (("offload_optimizer", 1), ("offload_param", 3)):
        block = getattr(zero, name)
        if block.device == "nvme" and block.nvme_path is None and zero.stage >= fewest:
            got = f'nothing, and {name}.device is "nvme"'
            paths = f"{_ZERO}.{name}.nvme_path {_ZERO}.{name}.device"
            yield paths, "the path of a folder on the disk", got, 'write it, such as "/local_nvme"'
    block, path = zero.offload_optimizer, f"{_ZERO}.offload_optimizer"
    if zero.stage == 0:
        return
    if block.device == "nvme" and block.ratio < 1.0:
        expected = '1 when offload_optimizer.device is "nvme"'
        yield f"{path}.ratio {path}.device", expected, f"{block.ratio:g}", 'leave it out, or use "cpu"'
    # Gradients that are also summed over stages, or over parts of a sequence, are summed on the device, before the
    # step. With offload they would be on the host by then.
    on = {"pipeline.stages": config.pipeline.stages > 1}
    on["tensor_parallel.sequence_parallel"] = config.tensor_parallel.sequence_parallel
    for other in on if block.enabled else ():
        if on[other]:
            got = (
                f'"{block.device}": gradients that several stages or parts of a sequence share are summed on the device'
            )
            yield f"{path}.device {other}", f'"none" with {other}', got, _ONE_OUT


def _replicas(config: ZeroliteConfig) -> Found:
    zero = config.zero_optimization
    if zero.feeds_errors_back and not zero.zero_quantized_gradients:
        expected = f"{_ZERO}.zero_quantized_gradients = true beside it, whose errors it feeds back"
        paths = f"{_ZERO}.zeropp_loco_param {_ZERO}.zero_quantized_gradients"
        yield paths, expected, "false", "set both or neither"
    for name in ("zero_quantized_weights", "zero_quantized_gradients") if zero.ranks_of_shards is None else ():
        if getattr(zero, name) and zero.stage == 3:
            got = (
                f"true: it needs {_ZERO}.shard_size or zero_hpz_partition_size, because only traffic between sets of "
                "ranks is compressed"
            )
            yield f"{_ZERO}.{name} {_ZERO}.stage", "false", got, "set one of them to the ranks of a node"
    if zero.zero_quantized_gradients and zero.stage in (1, 2) and zero.ranks_of_shards and not zero.reduce_scatter:
        expected = f"{_ZERO}.reduce_scatter = true beside it, because an all-reduce of all ranks is not compressed"
        yield f"{_ZERO}.zero_quantized_gradients {_ZERO}.reduce_scatter", expected, "false", _ONE_OUT
    if not zero.is_hierarchical:
        return
    key, size = f"{_ZERO}.zero_hpz_partition_size", zero.zero_hpz_partition_size
    if zero.shard_size is not None:
        expected = f"1 beside {_ZERO}.shard_size, with which each set of ranks has all states"
        yield f"{key} {_ZERO}.shard_size", expected, size, _ONE_OUT
    if zero.offload_param.enabled:
        expected = f"1 with {_ZERO}.offload_param, because updates send parameters from device to device"
        remedy = f"{_ONE_OUT} ({_ZERO}.offload_optimizer goes with both)"
        yield f"{key} {_ZERO}.offload_param.device", expected, size, remedy


def _parallelism(config: ZeroliteConfig) -> Found:
    size = config.sequence_parallel.size
    if size > 1 and config.pipeline.stages > 1:
        yield "sequence_parallel.size pipeline.stages", f"1 with a pipeline ({_stages(config)})", size, _ONE_OUT
    if size > 1 and config.gradient_allreduce_op == "sum":
        expected = f'"mean" with sequence_parallel.size = {size}, whose ranks have parts of one loss'
        yield "gradient_allreduce_op sequence_parallel.size", expected, '"sum"', _ONE_OUT
    if size > 1 and config.tensor_parallel.sequence_parallel and config.tensor_parallel.size > 1:
        expected = "1 with tensor_parallel.sequence_parallel, which divides each part of a sequence again"
        yield "sequence_parallel.size tensor_parallel.sequence_parallel", expected, size, _ONE_OUT


def _experts(config: ZeroliteConfig) -> Found:
    block, zero = config.expert_parallel, config.zero_optimization
    for key in ("capacity", "load_balance_coeff", "log_load"):
        if (value := getattr(block, key)) and block.ranks == 1:
            expected = f"no {key} where the ranks do not share experts (expert_parallel.size 1)"
            paths = f"expert_parallel.{key} expert_parallel.size"
            yield paths, expected, json.dumps(value), "leave it out: it would have no effect"
    others = {
        "pipeline.stages": config.pipeline.stages > 1,
        f"{_ZERO}.zero_quantized_weights": zero.zero_quantized_weights,
        f"{_ZERO}.zero_quantized_gradients": zero.zero_quantized_gradients,
    }
    for path in others if block.ranks > 1 else ():
        if others[path]:
            expected = f"1 with {path}, which does not know experts on several ranks yet"
            yield f"expert_parallel.size {path}", expected, block.ranks, _ONE_OUT


def _pipeline(config: ZeroliteConfig) -> Found:
    block, stage = config.pipeline, config.zero_optimization.stage
    if block.stages == 1:
        return
    if stage in (2, 3):
        what = "reduce-scatter all gradients" if stage == 2 else "gather all parameters and reduce-scatter gradients"
        got = f"{stage}: stage {stage} would {what} once for every micro-batch, where stage 1 does it once a step"
        yield f"{_ZERO}.stage pipeline.stages", f"0 or 1 with a pipeline ({_stages(config)})", got, "use stage 1"
    chunks, one, two = block.chunks, block.schedule in ONE_CHUNK, block.schedule in TWO_CHUNKS
    fits = chunks == 1 if one else chunks == 2 if two else chunks != 1 or block.schedule == "zero_bubble"
    if chunks is not None and not fits:
        expected = f'{"1" if one else "2" if two else "2 or more"} with pipeline.schedule = "{block.schedule}"'
        yield "pipeline.chunks pipeline.schedule", expected, chunks, "change one of the two"
    parts = block.stages * block.chunks_per_rank
    if block.split != "auto" and len(block.split) != parts - 1:
        expected = (
            f"{parts - 1} name{'s' if parts > 2 else ''}: the first module of each part but the first ({block.stages} "
            f"stages x {block.chunks_per_rank} = {parts} parts)"
        )
        paths = "pipeline.split pipeline.stages pipeline.chunks"
        yield paths, expected, len(block.split), 'name as many, or write "auto"'
    if config.flops_profiler.enabled:
        expected = f"false with pipeline.stages = {block.stages}, where no rank runs the whole forward of the model"
        yield "flops_profiler.enabled pipeline.stages", expected, "true", "leave it out (`zerolite plan` counts)"
