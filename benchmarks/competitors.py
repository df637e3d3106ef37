"""Competitors of `compare.py`: each turns the same model into a `step(tokens, targets) -> loss`.

All of them train with AdamW at the same hyperparameters and clip the global norm of the averaged gradients to `CLIP`.
In bf16 all of them keep fp32 master weights: DDP through autocast, FSDP2 through its mixed precision policy, DeepSpeed
and zerolite through their config.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.engines import RESHARD, build_deepspeed, build_zerolite
from benchmarks.pipelines import PIPELINES
from benchmarks.setting import CLIP, Competitor, Setting, Step, autocast, by_name, optimizer_for
from benchmarks.tensor_parallel import TENSOR_PARALLEL


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, autocasts: bool) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with autocast(setting) if autocasts else contextlib.nullcontext():
            loss = model(tokens, targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def wrap_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def wrap_fsdp2(model: nn.Module, setting: Setting, mesh: Any = None, **options: Any) -> nn.Module:
    """As its users write it: each block and the model. mesh: of all ranks. `options`: further arguments of
    `fully_shard`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options["mesh"] = mesh or init_device_mesh(setting.device, (setting.world_size,))
    if setting.dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    return fully_shard(model, **options)


def build_compute(model: nn.Module, setting: Setting) -> Step:
    """No communication: what one rank's share of the work costs, the optimizer included."""
    return plain_loop(model, optimizer_for(model, fused=True), setting, autocasts=True)


def build_ddp(model: nn.Module, setting: Setting, kind: str) -> Step:
    wrapped = wrap_ddp(model)
    return plain_loop(wrapped, optimizer_for(wrapped, **{kind: True}), setting, autocasts=True)


def build_fsdp2(model: nn.Module, setting: Setting, **options: Any) -> Step:
    wrap_fsdp2(model, setting, **options)
    return plain_loop(model, optimizer_for(model, fused=True), setting, autocasts=False)


def _deepspeed(suffix: str, stage: int, small_buckets: bool, extra: bool = False, **options: Any) -> Competitor:
    options |= {"stage": stage, "small_buckets": small_buckets}
    return Competitor(f"deepspeed-{stage}{suffix}", build_deepspeed, "deepspeed", options, extra=extra)


def _zerolite(suffix: str, stage: int, extra: bool = False, **options: Any) -> Competitor:
    return Competitor(f"zerolite-{stage}{suffix}", build_zerolite, "zerolite", {"stage": stage, **options}, extra=extra)


def _offloading() -> list[Competitor]:
    """Competitors that offload to the host or to disk, the optimizer or everything, beside the same without; zerolite
    with its own kernels."""
    ours: dict[str, Any] = {"extra": True, "fused": False}
    theirs: dict[str, Any] = {"extra": True, "small_buckets": True}
    found = [_zerolite("-kernels", stage, **ours) for stage in (1, 2, 3)]
    found.append(_zerolite("-reshard-kernels", 3, **ours, **RESHARD))
    for place, device in (("host", "cpu"), ("disk", "nvme")):
        optimizer = {"offload_optimizer": device}
        for stage in (1, 2, 3):
            found.append(_zerolite(f"-{place}", stage, offload=optimizer, **ours))
            if device == "cpu" or stage == 3:  # DeepSpeed refuses the others
                found.append(_deepspeed(f"-{place}", stage, offload=optimizer, **theirs))
        everything = {"offload_optimizer": device, "offload_param": device}
        found.append(_zerolite(f"-{place}-all", 3, offload=everything, **ours, **RESHARD))
        found.append(_deepspeed(f"-{place}-all", 3, offload=everything, **theirs))
    return found


COMPETITORS = by_name(
    [
        Competitor("compute", build_compute, communicates=False),
        Competitor("ddp", build_ddp, options={"kind": "fused"}),
        Competitor("ddp-foreach", build_ddp, options={"kind": "foreach"}),
        Competitor("fsdp2", build_fsdp2),
        Competitor("fsdp2-keep", build_fsdp2, options={"reshard_after_forward": False}),
        # Stages 1 and 2 were slower with its default buckets.
        *(_deepspeed("", stage, small_buckets=stage in (1, 2)) for stage in range(4)),
        _deepspeed("-small", 3, small_buckets=True),
        *(_zerolite("", stage) for stage in range(4)),
        _zerolite("-reshard", 3, **RESHARD),
        *(_zerolite("-wait", stage, extra=True, overlap_comm=False) for stage in (1, 2)),  # gathers end with the step
        *_offloading(),
        *TENSOR_PARALLEL,
        *PIPELINES,
    ]
)
