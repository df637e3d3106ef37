"""Engines with a JSON config, which DeepSpeed and zerolite read alike, and the loop of their users."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.setting import BETAS, CLIP, EPS, LEARNING_RATE, WEIGHT_DECAY, Competitor, Setting, Step, optimizer_for

# Every parameter moves for every use, as under FSDP2's defaults.
RESHARD = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
# DeepSpeed's default buckets, 5e8 elements, reserve 2 GB.
SMALL_BUCKET = 4_000_000
# A foreign optimizer, and no report of its own.
DEEPSPEED_KEYS = {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9}


def json_config(setting: Setting, stage: int) -> dict[str, Any]:
    """The keys that DeepSpeed and zerolite share."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
    }
    if setting.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def adamw_entry(fused: bool) -> dict[str, Any]:
    """The block `optimizer` for zerolite. fused: torch's fused AdamW updates; otherwise zerolite's kernels."""
    params = {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    return {"type": "AdamW", "params": params | ({"fused": True} if fused else {})}


def _offloaded(setting: Setting, offload: dict[str, str]) -> dict[str, Any]:
    """Blocks of `zero_optimization` for `offload_optimizer` and `offload_param`, each "cpu" or "nvme"."""
    on_disk, limit = {"nvme_path": setting.nvme_path}, {"offload_param": {"max_in_cpu": 0}}
    return {
        name: {"device": device, **(on_disk | limit.get(name, {}) if device == "nvme" else {})}
        for name, device in offload.items()
    }


def make_deepspeed_engine(
    model: nn.Module, setting: Setting, stage: int, small_buckets: bool = False, offload: dict[str, str] | None = None
) -> Any:
    """small_buckets: of 4 M elements. offload: see :func:`_offloaded`; its own CPU Adam updates then, otherwise torch's
    fused AdamW."""
    import deepspeed  # type: ignore[import-not-found]

    config = json_config(setting, stage) | DEEPSPEED_KEYS
    zero = config["zero_optimization"]
    zero.update(_offloaded(setting, offload or {}))
    if small_buckets:
        zero["reduce_bucket_size"] = SMALL_BUCKET
        if stage < 3:
            zero["allgather_bucket_size"] = SMALL_BUCKET
    if offload:
        config["optimizer"] = adamw_entry(fused=False)
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    else:
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer_for(model, fused=True))
    return engine


def zerolite_config(
    setting: Setting, stage: int, fused: bool = True, offload: dict[str, str] | None = None, **zero: Any
) -> dict[str, Any]:
    """fused: torch's fused AdamW updates, as with the competitors; otherwise zerolite's kernels. offload: see
    :func:`_offloaded`. zero: further keys of `zero_optimization`."""
    config = json_config(setting, stage) | {"optimizer": adamw_entry(fused)}
    config["zero_optimization"].update(_offloaded(setting, offload or {}), **zero)
    return config


def make_zerolite_engine(model: nn.Module, setting: Setting, stage: int, **options: Any) -> Any:
    """options: of :func:`zerolite_config`."""
    import zerolite

    return zerolite.initialize(model, zerolite_config(setting, stage, **options))


def engine_loop(engine: Any) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def build_deepspeed(model: nn.Module, setting: Setting, **options: Any) -> Step:
    return engine_loop(make_deepspeed_engine(model, setting, **options))


def build_zerolite(model: nn.Module, setting: Setting, **options: Any) -> Step:
    return engine_loop(make_zerolite_engine(model, setting, **options))


# ------------------------------------------------------------------ one copy of the model over all ranks


def grid_config(setting: Setting, **blocks: Any) -> dict[str, Any]:
    config = json_config(setting, stage=0) | {"optimizer": adamw_entry(fused=True)} | blocks
    config["train_micro_batch_size_per_gpu"] = setting.micro_batch * setting.world_size
    return config


def pair(
    suffix: str, theirs: Any, ours: Any, their_options: dict[str, Any], our_options: dict[str, Any]
) -> list[Competitor]:
    """PyTorch's row, then zerolite's, which is compared with it."""
    common: dict[str, Any] = {"joint": True, "extra": True, "peer": f"torch-{suffix}"}
    return [
        Competitor(f"torch-{suffix}", theirs, "torch", their_options, **common),
        Competitor(f"zerolite-{suffix}", ours, "zerolite", our_options, **common),
    ]
