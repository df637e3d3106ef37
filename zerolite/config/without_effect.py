"""Settings without effect at the chosen stage: they are replaced by their defaults, with a warning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .offload import OffloadOptimizerConfig, OffloadParamConfig
from .values import show

if TYPE_CHECKING:
    from .models import ZeroliteConfig
    from .zero import ZeroConfig

_OF_STAGE_3 = ("leaf_modules", "leaf_module", "zero_hpz_partition_size")
_SAME_AT_ALL_STAGES = ("stage3_gather_16bit_weights_on_model_save",)
# DeepSpeed's default, which configs of all stages have, and the other value that means nothing.
_WRITTEN_OUT = {"stage3_max_live_parameters": 1_000_000_000, "zero_hpz_partition_size": 0}


_Found = tuple[str, str, dict[str, Any]]  # key of `zero_optimization`, reason, replacements for its values


def needs_stage_3(stage: int, value: object) -> str:
    """Return the sentence for a stage-3 setting at a lower stage."""
    return f"got {show(value)}, which has an effect at zero_optimization.stage 3 only, and the stage is {stage}"


def drop_ineffective(config: ZeroliteConfig, found_before: Iterable[tuple[str, str]]) -> ZeroliteConfig:
    """Return the configuration without ineffective settings. Its `without_effect` lists them, and `found_before`."""
    zero = config.zero_optimization
    settings = list(_find(zero))
    replacements = {key: value for *_, values in settings for key, value in values.items()}
    if replacements:
        config = config.model_copy(update={"zero_optimization": zero.model_copy(update=replacements)})
    config.note_without_effect((*found_before, *((f"zero_optimization.{path}", why) for path, why, _ in settings)))
    return config


def find_dropped(config: ZeroliteConfig) -> list[tuple[str, str]]:
    """Return (path, sentence) of each setting that would be dropped at this stage, but not at another one."""
    settings = _find(config.zero_optimization)
    return [(f"zero_optimization.{path}", why) for path, why, replacements in settings if replacements]


def _find(zero: ZeroConfig) -> Iterator[_Found]:
    """Yield the settings without effect."""
    stage = zero.stage
    for name in ("offload_optimizer", "offload_param"):
        names = getattr(zero, name).model_fields_set
        if names and "device" not in names:
            keys = " and ".join(sorted(names))
            yield name, f'got {keys} without a device, so nothing is offloaded; write "device": "cpu" beside', {}
    if stage == 0 and zero.offload_optimizer.enabled:
        sentence = (
            f"got {show(zero.offload_optimizer.device)}, and at stage 0 every rank keeps all states on its device"
        )
        yield "offload_optimizer.device", sentence, {"offload_optimizer": OffloadOptimizerConfig()}
    if stage < 3 and zero.offload_param.enabled:
        sentence = needs_stage_3(stage, zero.offload_param.device)
        yield "offload_param.device", sentence, {"offload_param": OffloadParamConfig()}
    if stage == 0 and zero.shard_size is not None:
        sentence = f"got {zero.shard_size}, and at stage 0 every rank keeps all states"
        yield "shard_size", sentence, {"shard_size": None}
    if zero.zero_quantized_weights and not zero.is_hierarchical:
        sentence = "got true, and no updated values travel between sets of ranks without zero_hpz_partition_size"
        yield "zero_quantized_weights", sentence, {"zero_quantized_weights": False}
    if zero.zero_quantized_gradients and (stage == 0 or zero.ranks_of_shards is None):
        sentence = "got true, and gradients are compressed between sets of ranks alone (shard_size)"
        yield "zero_quantized_gradients", sentence, {"zero_quantized_gradients": False}
    if stage == 0 and not zero.reduce_scatter:
        yield "reduce_scatter", "got false, and at stage 0 gradients are always all-reduced", {}
    if stage == 3 and not zero.reduce_scatter:
        sentence = "got false, and at stage 3 gradients are always reduce-scattered to their owners"
        yield "reduce_scatter", sentence, {"reduce_scatter": True}
    if stage < 3:
        for name in sorted(zero.model_fields_set):
            of_stage_3 = name.startswith("stage3_") or name in _OF_STAGE_3
            value, default = getattr(zero, name), type(zero).model_fields[name].get_default(call_default_factory=True)
            if of_stage_3 and name not in _SAME_AT_ALL_STAGES and value not in (default, _WRITTEN_OUT.get(name)):
                yield name, needs_stage_3(stage, value), {}
