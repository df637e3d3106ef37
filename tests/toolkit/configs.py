"""JSON configs for the distributed tests."""

from __future__ import annotations

from typing import Any

Optimizer = tuple[str, dict[str, Any]]

SGD: Optimizer = ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})
ADAMW: Optimizer = ("AdamW", {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1})
STATIC_SCALE = 256.0

# Settings of stage 3 for models of a few hundred elements, for which the defaults would do nothing at all.
_ALL = {"stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}
PARTITIONED: dict[str, dict[str, Any]] = {
    "moving": {**_ALL, "stage3_max_reuse_distance": 0},  # released after every use
    "kept": _ALL,  # from the forward to the backward
    "tight": {  # prefetch of a layer or two, evictions
        **_ALL,
        "stage3_prefetch_bucket_size": 150,
        "stage3_max_live_parameters": 300,
        "stage3_max_reuse_distance": 250,
    },
    "defaults": {},  # every parameter stays whole
    "one unit": {"stage3_param_persistence_threshold": 0},
}


def config(
    stage: int = 0,
    precision: str = "fp32",
    accumulation: int = 1,
    clip: float = 0.0,
    optimizer: Optimizer = SGD,
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A config of two sequences per rank, with buckets so small that even the test models fill several.

    ``zero`` is added to the zero_optimization section, ``more`` to the top level; a section there replaces the
    default one.
    """
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": optimizer[0], "params": optimizer[1]},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100, "allgather_bucket_size": 100, **(zero or {})},
        "steps_per_print": 1_000_000,
    }
    if clip:
        result["gradient_clipping"] = clip
    if precision == "bf16":
        result["bf16"] = {"enabled": True}
    if precision == "fp16":
        result["fp16"] = {"enabled": True, "loss_scale": STATIC_SCALE}
    return result | more


def at(stage: int | str, *arguments: Any, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """:func:`config` of a stage by name: 2 or "2"; "3 tight", with settings of ``PARTITIONED``; 3 is "3 moving"."""
    number, _, setting = str(stage).partition(" ")
    partition = PARTITIONED[setting or "moving"] if number == "3" else {}
    return config(int(number), *arguments, zero={**partition, **(zero or {})}, **more)


def dynamic_fp16(**more: Any) -> dict[str, Any]:
    """An fp16 section with a dynamic scale that starts at 256 and shrinks at the first overflow."""
    return {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "hysteresis": 1, "min_loss_scale": 1, **more}
