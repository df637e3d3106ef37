"""Names of DeepSpeed's modules, functions and methods that zerolite does not have, and what to use instead."""

from __future__ import annotations

_NO_EXPERTS = "it has no layers for mixtures of experts; a model's own layers train at every stage"
_NO_INFERENCE = (
    "it has no inference engine; generate with the trained module, or export it with engine.save_16bit_model()"
)
_NO_COMPRESSION = "it compresses no models"
_FLOPS = (
    "the config's block flops_profiler counts the FLOPs of a training step; torch.utils.flop_counter counts those of "
    "any code"
)
_MONITOR = "the config's blocks csv_monitor, tensorboard and wandb write values, and engine.monitor takes your own"
_SCALER = (
    "the scale is optimizer.loss_scale, and the config's block fp16 sets it; load_checkpoint reads DeepSpeed's "
    "universal checkpoints"
)
_TOPOLOGY = (
    "the config sets the grid of ranks, by pipeline.stages and tensor_parallel.size; pass num_stages= to PipelineModule"
)
_SEQUENCES = (
    "the config's sequence_parallel.size divides sequences among ranks, and accelerate's "
    "ParallelismConfig(sp_size=...) works"
)
_UNIVERSAL = "every checkpoint loads at any stage and number of ranks, so none is converted"

_PLAN = "`zerolite plan` shows the memory of a model at each stage, with and without offload"
_PARTS = "safe_get_full_... and safe_set_full_... have the whole values at every stage, on all ranks"
_META = 'torch.device("meta") is a context, and torch.set_default_dtype sets the dtype'
_RANGES = "torch.profiler.record_function and torch.cuda.nvtx.range name ranges"

_BATCH_SIZE = "the batch size is that of the config for the engine's whole life"

ABSENT = {
    "DeepSpeedEngine.redundant_experts": _NO_EXPERTS,
    "DeepSpeedEngine.set_train_batch_size": _BATCH_SIZE,
    "DeepSpeedEngine.set_train_micro_batch_size": _BATCH_SIZE,
    "InferenceEngine": _NO_INFERENCE,
    "OnDevice": _META,
    "PipelineEngine": "a pipeline is trained by DeepSpeedEngine.train_batch()",
    "autotuning": "`zerolite plan --compare` says which stage is the first that fits",
    "checkpoint.ds_to_universal": _UNIVERSAL,
    "checkpoint.universal_checkpoint": _UNIVERSAL,
    "compression.basic_layer": _NO_COMPRESSION,
    "compression.compress": _NO_COMPRESSION,
    "default_inference_config": _NO_INFERENCE,
    "inference": _NO_INFERENCE,
    "init_inference": _NO_INFERENCE,
    "moe": _NO_EXPERTS,
    "monitor": _MONITOR,
    "ops.adagrad": "torch.optim.Adagrad is updated by zerolite's kernels, also on the host",
    "profiling": _FLOPS,
    "runtime.fp16": _SCALER,
    "runtime.pipe": _TOPOLOGY,
    "runtime.zero.stage3": _PLAN,
    "runtime.zero.stage_1_and_2": _PLAN,
    "sequence": _SEQUENCES,
    "utils.init_on_device": _META,
    "utils.instrument_w_nvtx": _RANGES,
    "utils.nvtx": _RANGES,
    **{
        f"utils.safe_{verb}_local_{what}": _PARTS
        for verb in ("get", "set")
        for what in ("fp32_param", "grad", "optimizer_state")
    },
    "utils.timer": "wall_clock_breakdown in the config times the phases of each step",
}
"""Reason by name, without "deepspeed.". It is also that of everything below a module."""


def sentence_for(name: str) -> str | None:
    """Return the sentence about the absent ``deepspeed.<name>``; None for a name that is not listed."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        reason = ABSENT.get(".".join(parts[:end]))
        if reason is not None:
            return f"zerolite's deepspeed has no {name!r}: {reason} (docs/deepspeed.md)"
    return None
