"""Checks of combinations: values that are valid alone and contradict each other together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from .parallelism import ONE_CHUNK, TWO_CHUNKS

if TYPE_CHECKING:
    from .models import ZeroliteConfig


class Contradiction(NamedTuple):
    """The keys that contradict each other (the error is reported at the first) and what to do about it."""

    paths: tuple[str, ...]
    sentence: str


def find_contradictions(config: ZeroliteConfig) -> list[Contradiction]:
    """Every contradiction in the configuration, in a fixed order."""
    return [found for check in _CHECKS for found in check(config)]


def _one_precision(config: ZeroliteConfig) -> Iterator[Contradiction]:
    enabled = [name for name in ("fp16", "bf16", "torch_autocast") if getattr(config, name).enabled]
    if len(enabled) > 1:
        paths = tuple(f"{name}.enabled" for name in enabled)
        yield Contradiction(
            paths,
            f"expected one precision at most, got {' and '.join(f'{path} = true' for path in paths)}; keep one of them",
        )


def _bf16_states_need_bf16_masters(config: ZeroliteConfig) -> Iterator[Contradiction]:
    if config.bf16.enabled and config.bf16.bf16_optimizer_states and not config.bf16.bf16_master_weights_and_grads:
        yield Contradiction(
            ("bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads", "bf16.enabled"),
            "expected bf16.bf16_master_weights_and_grads = true beside it, got false; set both or neither",
        )


def _initial_scale_above_minimum(config: ZeroliteConfig) -> Iterator[Contradiction]:
    fp16, autocast = config.fp16, config.torch_autocast
    scaled = fp16.enabled or (autocast.enabled and autocast.dtype == "fp16")
    if scaled and fp16.loss_scale == 0 and 2**fp16.initial_scale_power < fp16.min_loss_scale:
        yield Contradiction(
            ("fp16.min_loss_scale", "fp16.initial_scale_power", "fp16.loss_scale", "fp16.enabled"),
            f"expected at most the initial scale, 2 to the power of fp16.initial_scale_power = "
            f"{2**fp16.initial_scale_power}, got {fp16.min_loss_scale}; lower it or raise the power",
        )


def _one_communication_dtype(config: ZeroliteConfig) -> Iterator[Contradiction]:
    autocast, everywhere = config.torch_autocast, config.communication_data_type
    if autocast.enabled and autocast.lower_precision_safe_modules and everywhere is not None:
        yield Contradiction(
            ("communication_data_type", "torch_autocast.lower_precision_safe_modules", "torch_autocast.enabled"),
            f"expected null when torch_autocast.lower_precision_safe_modules says whose gradients travel in 16 bits, "
            f'got "{everywhere}", which would be the dtype of all; keep one of the two',
        )


def _one_way_to_divide(config: ZeroliteConfig) -> Iterator[Contradiction]:
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        yield Contradiction(
            ("gradient_predivide_factor", "prescale_gradients"),
            f"expected 1.0 when prescale_gradients is true (gradients are then divided by the number of ranks before "
            f"the sum), got {config.gradient_predivide_factor:g}; keep one of the two",
        )


def _a_disk_has_a_path(config: ZeroliteConfig) -> Iterator[Contradiction]:
    """Unless the stage leaves the device to itself."""
    stage = config.zero_optimization.stage
    for name, fewest in (("offload_optimizer", 1), ("offload_param", 3)):
        block = getattr(config.zero_optimization, name)
        if block.device == "nvme" and block.nvme_path is None and (stage == "auto" or stage >= fewest):
            yield Contradiction(
                (f"zero_optimization.{name}.nvme_path", f"zero_optimization.{name}.device"),
                f'expected the path of a folder on the disk, got nothing, and {name}.device is "nvme"; write it, such '
                'as "/local_nvme"',
            )


def _a_part_is_for_the_host(config: ZeroliteConfig) -> Iterator[Contradiction]:
    block = config.zero_optimization.offload_optimizer
    if config.zero_optimization.stage != 0 and block.device == "nvme" and block.ratio < 1.0:
        yield Contradiction(
            ("zero_optimization.offload_optimizer.ratio", "zero_optimization.offload_optimizer.device"),
            f'expected 1 when offload_optimizer.device is "nvme", got {block.ratio:g}; leave it out, or use "cpu"',
        )


def _threads_have_one_number(config: ZeroliteConfig) -> Iterator[Contradiction]:
    one, other = config.aio.thread_count, config.aio.intra_op_parallelism
    if one is not None and other is not None and one != other:
        yield Contradiction(
            ("aio.intra_op_parallelism", "aio.thread_count"),
            f"expected aio.thread_count = {one}, of which it is another name, got {other}; leave one of the two out",
        )


def _one_piece_is_of_use(config: ZeroliteConfig) -> Iterator[Contradiction]:
    block = config.activation_checkpointing
    if block.contiguous_memory_optimization and block.number_checkpoints is None:
        yield Contradiction(
            (
                "activation_checkpointing.number_checkpoints",
                "activation_checkpointing.contiguous_memory_optimization",
            ),
            "expected the number of checkpoints in one forward, got nothing, and "
            "activation_checkpointing.contiguous_memory_optimization is true; write it, or leave the other key out",
        )
    if block.contiguous_memory_optimization and not (block.partition_activations or block.cpu_checkpointing):
        yield Contradiction(
            (
                "activation_checkpointing.contiguous_memory_optimization",
                "activation_checkpointing.partition_activations",
                "activation_checkpointing.cpu_checkpointing",
            ),
            "expected activation_checkpointing.partition_activations or cpu_checkpointing beside it, got neither, so "
            "inputs stay where they are and nothing is put into the buffer; set one of them, or leave the key out",
        )


def _accumulation_dtype(config: ZeroliteConfig) -> Iterator[Contradiction]:
    """Gradients accumulate in fp32 or in the dtype they are computed in; any other choice loses bits for nothing."""
    given = config.data_types.grad_accum_dtype
    if given is None:
        return
    path = "data_types.grad_accum_dtype"
    compute, switches = "fp32", ("fp16.enabled", "bf16.enabled")
    if config.fp16.enabled:
        compute = "fp16"
    elif config.bf16.enabled:
        compute = "bf16"
    if given not in ("fp32", compute):
        allowed = '"fp32"' if compute == "fp32" else f'"fp32" or "{compute}"'
        yield Contradiction(
            (path, *switches),
            f'expected {allowed} (gradients are computed in {compute}), got "{given}"; use one of these or null',
        )
        return
    for name, block, low in (("fp16", config.fp16, "fp16"), ("bf16", config.bf16, "bf16")):
        key = f"{name}_master_weights_and_grads"
        if block.enabled and getattr(block, key) and given == "fp32":
            yield Contradiction(
                (path, f"{name}.{key}", *switches),
                f'expected "{low}" or null, since {name}.{key} keeps gradients in {low}, got "fp32"; keep one of '
                "the two",
            )


def _something_is_logged(config: ZeroliteConfig) -> Iterator[Contradiction]:
    logger = config.comms_logger
    if logger.enabled and not logger.prof_all and not logger.prof_ops:
        yield Contradiction(
            ("comms_logger.prof_ops", "comms_logger.prof_all", "comms_logger.enabled"),
            "expected operations that zerolite runs when comms_logger.prof_all is false, got none; write some, such as "
            '["all_reduce"], or leave prof_all out',
        )


def _elastic_needs(config: ZeroliteConfig) -> Iterator[Contradiction]:
    """What the block cannot do without. Whether anything fits is found out when the number of ranks is known."""
    block = config.elasticity
    if not block.enabled:
        return
    if block.micro_batch_sizes is None:
        yield Contradiction(
            ("elasticity.micro_batch_sizes", "elasticity.enabled"),
            "expected the sizes that are allowed, got nothing, and elasticity.enabled is true; write them, such as "
            "[2, 4]",
        )
    given = config.train_batch_size is not None and not block.ignore_non_elastic_batch_info
    if block.max_train_batch_size is None and not given:
        yield Contradiction(
            (
                "elasticity.max_train_batch_size",
                "elasticity.ignore_non_elastic_batch_info",
                "elasticity.enabled",
                "train_batch_size",
            ),
            "expected the largest global batch that is allowed, got nothing, and elasticity.enabled is true; write it, "
            "or the batch itself as train_batch_size"
            + (" with ignore_non_elastic_batch_info = false" if block.ignore_non_elastic_batch_info else ""),
        )
    if block.min_gpus > block.max_gpus:
        yield Contradiction(
            ("elasticity.min_gpus", "elasticity.max_gpus", "elasticity.enabled"),
            f"expected at most elasticity.max_gpus = {block.max_gpus}, got {block.min_gpus}; change one of the two",
        )


def _elastic_decides(config: ZeroliteConfig) -> Iterator[Contradiction]:
    """Sizes beside the block that cannot hold for every number of ranks."""
    block = config.elasticity
    if not block.enabled or block.ignore_non_elastic_batch_info:
        return
    switches = ("elasticity.enabled", "elasticity.ignore_non_elastic_batch_info")
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = getattr(config, key)
        if value is not None:
            yield Contradiction(
                (key, *switches),
                f'expected nothing or "auto", since elasticity.enabled makes it follow from the number of ranks, got '
                f"{value}; leave it out or set elasticity.ignore_non_elastic_batch_info",
            )
    train, largest = config.train_batch_size, block.max_train_batch_size
    if train is not None and largest is not None and train > largest:
        yield Contradiction(
            ("train_batch_size", "elasticity.max_train_batch_size", *switches),
            f"expected at most elasticity.max_train_batch_size = {largest}, got {train}; lower it, or leave one of the "
            "two out",
        )


def _one_tensor_size(config: ZeroliteConfig) -> Iterator[Contradiction]:
    block = config.tensor_parallel
    if block.autotp_size > 1 and block.size not in (1, block.autotp_size):
        yield Contradiction(
            ("tensor_parallel.autotp_size", "tensor_parallel.size"),
            f"expected tensor_parallel.size = {block.size}, of which it is another name, got {block.autotp_size}; "
            "leave one of the two out",
        )


def _pipelines_keep_gradients_whole(config: ZeroliteConfig) -> Iterator[Contradiction]:
    stages, stage = config.pipeline.stages, config.zero_optimization.stage
    if stages > 1 and stage in (2, 3):
        what = "reduce-scatter all gradients" if stage == 2 else "gather all parameters and reduce-scatter gradients"
        yield Contradiction(
            ("zero_optimization.stage", "pipeline.stages"),
            f"expected 0 or 1 with a pipeline (pipeline.stages = {stages}), got {stage}: stage {stage} would {what} "
            f"once for every micro-batch, where stage 1 does it once a step; use stage 1",
        )


def _schedules_have_their_chunks(config: ZeroliteConfig) -> Iterator[Contradiction]:
    block = config.pipeline
    if block.stages == 1 or block.chunks is None:
        return
    fits = block.chunks == 1 if block.schedule in ONE_CHUNK else block.chunks > 1 or block.schedule == "zero_bubble"
    if block.schedule in TWO_CHUNKS:
        fits = block.chunks == 2
    if not fits:
        needs = "1" if block.schedule in ONE_CHUNK else "2" if block.schedule in TWO_CHUNKS else "2 or more"
        yield Contradiction(
            ("pipeline.chunks", "pipeline.schedule"),
            f'expected {needs} with pipeline.schedule = "{block.schedule}", got {block.chunks}; change one of the two',
        )


def _splits_say_every_stage(config: ZeroliteConfig) -> Iterator[Contradiction]:
    block = config.pipeline
    parts = block.stages * block.chunks_per_rank
    if block.stages > 1 and block.split != "auto" and len(block.split) != parts - 1:
        yield Contradiction(
            ("pipeline.split", "pipeline.stages", "pipeline.chunks"),
            f"expected {parts - 1} name{'s' if parts > 2 else ''}, of the modules with which the {parts} parts of "
            f"{block.stages} stages begin, but for the first ({block.chunks_per_rank} on each), got "
            f'{len(block.split)}; name as many, or write "auto"',
        )


def _elasticity_is_for_data(config: ZeroliteConfig) -> Iterator[Contradiction]:
    if config.elasticity.enabled and config.model_ranks > 1:
        yield Contradiction(
            ("elasticity.enabled", "tensor_parallel.size", "pipeline.stages"),
            f"expected false where one copy of the model takes {config.model_ranks} ranks (tensor_parallel.size × "
            "pipeline.stages), got true; leave the block out",
        )


def _pipelines_sum_on_the_device(config: ZeroliteConfig) -> Iterator[Contradiction]:
    """Gradients that are summed beside the data ranks are summed where the step finds them."""
    offloads = config.zero_optimization.stage != 0 and config.zero_optimization.offload_optimizer.enabled
    for path, on in (
        ("pipeline.stages", config.pipeline.stages > 1),
        ("tensor_parallel.sequence_parallel", config.tensor_parallel.sequence_parallel),
    ):
        if on and offloads:
            yield Contradiction(
                ("zero_optimization.offload_optimizer.device", path),
                f'expected "none" with {path}, got "{config.zero_optimization.offload_optimizer.device}": gradients '
                "that several stages or parts of a sequence share are summed on the device; leave one of the two out",
            )


def _pipelines_have_no_forward_to_count(config: ZeroliteConfig) -> Iterator[Contradiction]:
    if config.flops_profiler.enabled and config.pipeline.stages > 1:
        yield Contradiction(
            ("flops_profiler.enabled", "pipeline.stages"),
            f"expected false with pipeline.stages = {config.pipeline.stages}, where no rank runs the whole forward of "
            "the model, got true; leave it out (`zerolite plan` counts)",
        )


def _parts_are_of_equal_activations(config: ZeroliteConfig) -> Iterator[Contradiction]:
    if config.activation_checkpointing.partition_activations and config.tensor_parallel.sequence_parallel:
        yield Contradiction(
            ("activation_checkpointing.partition_activations", "tensor_parallel.sequence_parallel"),
            "expected false with tensor_parallel.sequence_parallel, where each rank has a part of the sequence anyway, "
            "got true; leave it out",
        )


_CHECKS: tuple[Callable[[ZeroliteConfig], Iterator[Contradiction]], ...] = (
    _one_precision,
    _bf16_states_need_bf16_masters,
    _initial_scale_above_minimum,
    _one_communication_dtype,
    _one_way_to_divide,
    _a_disk_has_a_path,
    _a_part_is_for_the_host,
    _threads_have_one_number,
    _one_piece_is_of_use,
    _accumulation_dtype,
    _something_is_logged,
    _elastic_needs,
    _elastic_decides,
    _one_tensor_size,
    _pipelines_keep_gradients_whole,
    _schedules_have_their_chunks,
    _splits_say_every_stage,
    _elasticity_is_for_data,
    _pipelines_sum_on_the_device,
    _parts_are_of_equal_activations,
    _pipelines_have_no_forward_to_count,
)
