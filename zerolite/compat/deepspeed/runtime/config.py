"""Translation of a DeepSpeed config for zerolite's strict loader.

DeepSpeed ignores unknown keys at the top level, replaces "auto" by defaults, and accepts deprecated names. Keys that
change no numbers are removed with a warning, once, on rank 0. An unsupported key that would change numbers is an error
of ``zerolite.config``.
"""

from __future__ import annotations

import base64
import binascii
import copy
import os
import sys
from collections.abc import Mapping
from typing import Any

from zerolite.compat.deepspeed.utils.logging import warn_once
from zerolite.config.errors import ConfigError, printable
from zerolite.config.known_keys import OTHER_NAMES, RENAMED, UNSUPPORTED
from zerolite.config.load import supported_keys
from zerolite.config.source import read_source
from zerolite.config.values import as_number

_TOP_LEVEL = frozenset(path.partition(".")[0] for path in (*supported_keys(), *UNSUPPORTED, *RENAMED, *OTHER_NAMES))

# Keys for speed, memory, logs and file formats. No loss and no weight depends on them.
_WITHOUT_NUMBERS = (
    "aio.use_gds",
    "autotuning",
    "checkpoint.checkpoint_serialization",
    "checkpoint.parallel_write",
    "checkpoint.use_node_local_storage",
    "checkpoint.writer",
    "comet",
    "compile",
    "disable_python_gc",
    "hybrid_engine",
    "inference",
    "log_level",
    "nebula",
    "optimizer.legacy_fusion",
    "timers",
    "zero_optimization.enable_sanity_checks",
    "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.offload_optimizer.super_offload",
    "zero_optimization.pipeline_loading_checkpoint",
    "zero_optimization.save_muon_momentum_buffer_in_memory",
    "zero_optimization.stage3_allgather_sequential",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params",
)

_ON_THE_HOST = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}


DeepSpeedConfigError = ConfigError


class DeepSpeedConfig:
    """A config in two forms. DeepSpeed's attributes are absent: read the dict.

    Attributes:
        raw: the user's own dict, which clients read again.
        zerolite: the config for zerolite.
    """

    def __init__(self, config: Any, mpu: object = None) -> None:
        """
        Args:
            config: a dict, which stays unchanged, a path, JSON text, or JSON text in base64.
            mpu: must be None.

        Raises:
            ConfigError: it is unreadable.
            ValueError: for an ``mpu``.
        """
        if mpu is not None:
            raise ValueError(f"DeepSpeedConfig: expected no mpu, got {mpu!r}; set tensor_parallel.size in the config")
        if isinstance(config, str) and not os.path.exists(config):
            config = _decoded(config)
        self.raw: dict[str, Any] = config if isinstance(config, dict) else read_source(config).values
        self.zerolite = _translate(self.raw)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"DeepSpeedConfig has no attribute {name!r}; read the dict in its attribute raw")


def read_config(source: Any) -> DeepSpeedConfig:
    """Return ``source`` itself if it is a DeepSpeedConfig, otherwise one that is made of it."""
    return source if isinstance(source, DeepSpeedConfig) else DeepSpeedConfig(source)


def _translate(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config for zerolite's strict loader. ``raw`` stays unchanged."""
    values = _without_auto(copy.deepcopy(dict(raw)))
    _rename_deprecated(values)
    for key in [key for key in values if key not in _TOP_LEVEL]:
        warn_once(f"config: {printable(str(key))} is no key of the config, and is ignored as DeepSpeed does")
        del values[key]
    for path in _WITHOUT_NUMBERS:
        block, key = _find(values, path)
        if block is not None and key in block:
            if _has_effect(block.pop(key)):
                warn_once(f"config: {path} has no effect here; numbers do not depend on it")
    _set_defaults(values)
    _count_copies(values)
    return values


def _count_copies(values: dict[str, Any]) -> None:
    """Let ``train_batch_size`` count the samples of a step. DeepSpeed counts those of every rank, also where
    ``autotp_size`` of them have one copy of the model and get the same samples."""
    block, train = values.get("tensor_parallel"), as_number(values.get("train_batch_size"))
    ranks = as_number(block.get("autotp_size")) if isinstance(block, dict) else None
    if isinstance(ranks, int) and isinstance(train, int) and ranks > 1 and train % ranks == 0:
        values["train_batch_size"] = train // ranks


def _decoded(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        return text


def _without_auto(values: dict[str, object]) -> dict[str, object]:
    """Return ``values`` without the keys whose value is "auto", so that their defaults are used."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if not (isinstance(value, str) and value == "auto")
    }


def _rename_deprecated(values: dict[str, object]) -> None:
    """Replace deprecated names by the current ones, as DeepSpeed does."""
    for old, new in _ON_THE_HOST.items():
        zero = values.get("zero_optimization")
        if isinstance(zero, dict) and isinstance(zero.get(old), bool):
            if zero.pop(old):
                zero.setdefault(new, {"device": "cpu"})
    for old, new in RENAMED.items():
        block, key = _find(values, old)
        if block is None or key not in block or new not in _SUPPORTED or old.startswith("optimizer."):
            continue  # max_grad_norm of an optimizer is an error in DeepSpeed too
        target, name = _find(values, new, make=True)
        if target is not None:
            target.setdefault(name, block.pop(key))
            warn_once(f"config: {old} is read as {new}, its current name")


_SUPPORTED = frozenset(supported_keys())


def _set_defaults(values: dict[str, object]) -> None:
    """Set DeepSpeed's defaults that differ from zerolite's: Adam without weight decay, bf16 outputs, gradients clipped
    at 1, and experts that are not spread unless the block says so."""
    values.setdefault("gradient_clipping", 1.0)
    experts = values.get("expert_parallel")
    if isinstance(experts, dict) and not experts.get("enabled", "size" in experts):
        if "enabled" not in experts and as_number(experts.get("autoep_size")) not in (None, 0, 1):
            warn_once('config: expert_parallel has no effect without "enabled": true in it, as in DeepSpeed')
        del values["expert_parallel"]
    zero = values.get("zero_optimization")
    for key in ("reduce_bucket_size", "allgather_bucket_size"):  # 0 in DeepSpeed: each parameter by itself
        if isinstance(zero, dict) and zero.get(key) == 0 and not isinstance(zero[key], bool):
            zero[key] = 1
    optimizer = values.get("optimizer")
    if isinstance(optimizer, dict) and str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
        params = optimizer["params"] = dict(optimizer.get("params") or {})
        if not params.get("torch_adam"):
            params.setdefault("weight_decay", 0.0)
    bf16 = values.get("bf16", values.get("bfloat16"))
    if isinstance(bf16, dict) and bf16.get("enabled"):
        bf16.setdefault("output_dtype", "bf16")


def _find(values: dict[str, object], path: str, make: bool = False) -> tuple[dict[str, object] | None, str]:
    """Return the block of the last key of ``path``, None if it is missing, and that key."""
    *names, key = path.split(".")
    block: Any = values
    for name in names:
        block = block.setdefault(name, {}) if make else block.get(name)
        if not isinstance(block, dict):
            return None, key
    return block, key


def _has_effect(value: object) -> bool:
    """Return True if the value of a removed key would change anything in DeepSpeed."""
    if isinstance(value, Mapping):
        return bool(value.get("enabled", any(map(_has_effect, value.values()))))
    return value is True or (value is not None and value not in (0, 1, -1))  # as group sizes, 1 and -1 mean none


def is_stage3(values: Mapping[str, object]) -> bool:
    """Return True if a translated config sets stage 3."""
    zero = values.get("zero_optimization")
    return isinstance(zero, Mapping) and zero.get("stage", 0) == 3


def with_accelerates_replicas(values: dict[str, Any]) -> dict[str, Any]:
    """Return a translated config whose ranks divide states as accelerate's ``ParallelismConfig`` says.

    Its ``dp_replicate_size`` sets of ``dp_shard_size`` ranks, times ``sp_size``, hold the same shards.

    Raises:
        ConfigError: the config itself has another size.
    """
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return values
    parallelism = getattr(state.AcceleratorState(), "parallelism_config", None)
    if parallelism is None or parallelism.dp_replicate_size == 1:
        return values
    size = parallelism.dp_shard_size * parallelism.sp_size
    if size == 1:
        warn_once(
            "ParallelismConfig: dp_replicate_size without dp_shard_size has no effect: the stage says what ranks divide"
        )
        return values
    zero = values.get("zero_optimization") or {}
    for key in ("shard_size", "mics_shard_size", "zero_hpz_partition_size"):
        written = zero.get(key)
        if as_number(written) == size:
            return values
        if as_number(written) not in (None, 0, -1) and (key, written) != ("zero_hpz_partition_size", 1):
            sentence = (
                f"expected {size}, as dp_shard_size of accelerate's ParallelismConfig (times sp_size) says, got "
                f"{written}; leave one of the two out"
            )
            raise ConfigError([(f"zero_optimization.{key}", sentence)])
    return {**values, "zero_optimization": {**zero, "shard_size": size}}
