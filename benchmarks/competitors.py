"""Who is compared: each competitor turns the same model into a `step(tokens, targets) -> loss`.

All of them train with AdamW at the same hyperparameters and clip the global norm of the averaged gradients to `CLIP`.
In bf16 all of them keep fp32 master weights: DDP through autocast, FSDP2 through its mixed precision policy, DeepSpeed
and zerolite through their config.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.grids import GRIDS
from benchmarks.setting import (
    CLIP,
    Competitor,
    Setting,
    Step,
    adamw_entry,
    autocast,
    engine_loop,
    json_config,
    optimizer_for,
)


def _plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, autocasts: bool) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with autocast(setting) if autocasts else contextlib.nullcontext():
            loss = model(tokens, targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def build_compute(model: nn.Module, setting: Setting) -> Step:
    """No communication: what one rank's share of the work costs, the optimizer included."""
    return _plain_loop(model, optimizer_for(model, fused=True), setting, autocasts=True)


def build_ddp(model: nn.Module, setting: Setting, foreach: bool = False) -> Step:
    kind = {"foreach": True} if foreach else {"fused": True}
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _plain_loop(wrapped, optimizer_for(wrapped, **kind), setting, autocasts=True)


def build_fsdp2(model: nn.Module, setting: Setting, **options: Any) -> Step:
    """As its users write it: each block and the model. `options`: further arguments of `fully_shard`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(setting.device, (setting.world_size,))
    policy = MixedPrecisionPolicy()
    if setting.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    fully_shard(model, mesh=mesh, mp_policy=policy, **options)
    return _plain_loop(model, optimizer_for(model, fused=True), setting, autocasts=False)


def _offloaded(setting: Setting, **devices: str) -> dict[str, Any]:
    """Blocks of `zero_optimization` for `offload_optimizer` and `offload_param`, each "cpu" or "nvme"."""
    on_disk, limit = {"nvme_path": setting.nvme_path}, {"offload_param": {"max_in_cpu": 0}}
    return {
        name: {"device": device, **(on_disk | limit.get(name, {}) if device == "nvme" else {})}
        for name, device in devices.items()
    }


def build_deepspeed(
    model: nn.Module, setting: Setting, stage: int, small_buckets: bool = False, offload: dict[str, str] | None = None
) -> Step:
    """`small_buckets`: of 4 M elements instead of its default, 5e8, which reserves 2 GB. `offload`: see
    :func:`_offloaded`; its own CPU Adam updates then."""
    import deepspeed  # type: ignore[import-not-found]

    config = json_config(setting, stage)
    config["zero_optimization"].update(_offloaded(setting, **(offload or {})))
    if small_buckets:
        config["zero_optimization"]["reduce_bucket_size"] = 4_000_000
        if stage < 3:
            config["zero_optimization"]["allgather_bucket_size"] = 4_000_000
    config["steps_per_print"] = 10**9
    config["zero_allow_untested_optimizer"] = True
    if offload:
        config["optimizer"] = adamw_entry(fused=False)
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        return engine_loop(engine)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer_for(model, fused=True))
    return engine_loop(engine)


def make_zerolite_engine(
    model: nn.Module, setting: Setting, stage: int, zero: dict[str, Any] | None = None, fused: bool = True
) -> Any:
    """`zero`: further keys of `zero_optimization`. fused: torch's fused AdamW updates, as with the competitors;
    otherwise zerolite's kernels."""
    import zerolite

    config = json_config(setting, stage)
    config["zero_optimization"].update(zero or {})
    config["optimizer"] = adamw_entry(fused)
    return zerolite.initialize(model, config)


def build_zerolite(model: nn.Module, setting: Setting, stage: int, **zero: Any) -> Step:
    return engine_loop(make_zerolite_engine(model, setting, stage, zero))


def build_zerolite_offloaded(
    model: nn.Module, setting: Setting, stage: int, offload: dict[str, str] | None = None, **zero: Any
) -> Step:
    """With zerolite's kernels; `offload`: see :func:`_offloaded`."""
    blocks = _offloaded(setting, **(offload or {}))
    return engine_loop(make_zerolite_engine(model, setting, stage, blocks | zero, fused=False))


# Every parameter moves for every use, as under FSDP2's defaults.
RESHARD = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def _offloading() -> list[Competitor]:
    """What offloads to the host or to disk, the optimizer or everything, beside the same without."""
    found: list[Competitor] = []

    def add(name: str, build: Callable[..., Any], **options: Any) -> None:
        package = "deepspeed" if build is build_deepspeed else "zerolite"
        found.append(Competitor(name, build, package, options, extra=True))

    for stage in (1, 2, 3):
        add(f"zerolite-{stage}-kernels", build_zerolite_offloaded, stage=stage)
    add("zerolite-3-reshard-kernels", build_zerolite_offloaded, stage=3, **RESHARD)
    for place, device in (("host", "cpu"), ("disk", "nvme")):
        optimizer = {"offload_optimizer": device}
        for stage in (1, 2, 3):
            add(f"zerolite-{stage}-{place}", build_zerolite_offloaded, stage=stage, offload=optimizer)
            if device == "cpu" or stage == 3:  # DeepSpeed refuses the others
                add(f"deepspeed-{stage}-{place}", build_deepspeed, stage=stage, offload=optimizer, small_buckets=True)
        everything = {"offload_optimizer": device, "offload_param": device}
        add(f"zerolite-3-{place}-all", build_zerolite_offloaded, stage=3, offload=everything, **RESHARD)
        add(f"deepspeed-3-{place}-all", build_deepspeed, stage=3, offload=everything, small_buckets=True)
    return found


def _all_competitors() -> dict[str, Competitor]:
    found = [
        Competitor("compute", build_compute, communicates=False),
        Competitor("ddp", build_ddp),
        Competitor("ddp-foreach", build_ddp, options={"foreach": True}),
        Competitor("fsdp2", build_fsdp2),
        Competitor("fsdp2-keep", build_fsdp2, options={"reshard_after_forward": False}),
    ]
    for stage in range(4):  # stages 1 and 2 were slower with its default buckets
        options = {"stage": stage, "small_buckets": stage in (1, 2)}
        found.append(Competitor(f"deepspeed-{stage}", build_deepspeed, "deepspeed", options))
    options = {"stage": 3, "small_buckets": True}
    found.append(Competitor("deepspeed-3-small", build_deepspeed, "deepspeed", options))
    found += [Competitor(f"zerolite-{s}", build_zerolite, "zerolite", {"stage": s}) for s in range(4)]
    found.append(Competitor("zerolite-3-reshard", build_zerolite, "zerolite", {"stage": 3, **RESHARD}))
    found += _offloading() + GRIDS
    return {competitor.name: competitor for competitor in found}


COMPETITORS = _all_competitors()


def mean_over_ranks(values: list[float], device: str) -> list[float]:
    """Average each value over the ranks of the default group."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()
