"""Names of DeepSpeed's modules and functions that zerolite does not have, and what to use instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

PACKAGE = __name__.rpartition(".")[0]

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
    "the scale is optimizer.loss_scale, and the config's block fp16 sets it; load_checkpoint reads DeepSpeed's files"
)
_TOPOLOGY = (
    "the config sets the grid of ranks, by pipeline.stages and tensor_parallel.size; pass num_stages= to PipelineModule"
)
_UNIVERSAL = "every checkpoint loads at any stage and number of ranks, so none is converted"

ABSENT = {
    "InferenceEngine": _NO_INFERENCE,
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
    "profiling": _FLOPS,
    "runtime.fp16": _SCALER,
    "runtime.pipe": _TOPOLOGY,
    "sequence": "it has no attention of DeepSpeed-Ulysses; tensor_parallel.sequence_parallel shards sequences",
    "utils.timer": "wall_clock_breakdown in the config times the phases of each step",
    "tp_model_init": "tensor parallelism is set in the config, by tensor_parallel.size",
}
"""Reason by name, without "deepspeed.". It is also that of everything below a module."""


def sentence_for(name: str) -> str | None:
    """Return what to say of ``deepspeed.<name>``; None if nothing is known of it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        reason = ABSENT.get(".".join(parts[:end]))
        if reason is not None:
            return f"zerolite's deepspeed has no {name!r}: {reason} (docs/deepspeed.md)"
    return None


def with_sentences(package: str, load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``load``, a module's ``__getattr__``, with the sentences of absent names."""
    prefix = package.removeprefix(PACKAGE).lstrip(".")

    def get(name: str) -> Any:
        sentence = sentence_for(f"{prefix}.{name}" if prefix else name) if not name.startswith("__") else None
        if sentence is not None and f"{package}.{name}" not in sys.modules:
            raise AttributeError(sentence)
        return load(name)

    return get
