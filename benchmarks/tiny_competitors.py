"""Competitors of `host_overhead.py`, which train the stack of tiny layers.

All of them take AdamW (torch's fused kernel, zerolite's by its default) and nothing else: no clipping.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.competitors import wrap_ddp
from benchmarks.engines import DEEPSPEED_KEYS, SMALL_BUCKET
from benchmarks.setting import Competitor, by_name
from benchmarks.tiny_layers import BATCH, FAKE_WORLD, MODULES, RESHARD, CollectiveClock, loss_of, null_communicator


@dataclass(frozen=True)
class Trainee:
    """A competitor, built: `step(x) -> loss`, the clock of what only pretends, stage 3's coordinator where there is
    one."""

    step: Callable[[Tensor], Tensor]
    clock: CollectiveClock
    coordinator: Any = None


def plain_loop(model: nn.Module) -> Trainee:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainee(step, CollectiveClock())


def engine_loop(engine: Any, clock: CollectiveClock, coordinator: Any = None) -> Trainee:
    def step(x: Tensor) -> Tensor:
        loss = loss_of(engine(x))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainee(step, clock, coordinator)


def build_ddp(model: nn.Sequential) -> Trainee:
    return plain_loop(wrap_ddp(model))


def build_fsdp2(model: nn.Sequential) -> Trainee:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_loop(model)


def build_deepspeed(model: nn.Sequential, stage: int) -> Trainee:
    import deepspeed  # type: ignore[import-not-found]

    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    elif stage:
        zero.update(reduce_bucket_size=SMALL_BUCKET, allgather_bucket_size=SMALL_BUCKET)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": zero,
        "gradient_clipping": 0.0,  # its default is 1.0
        **DEEPSPEED_KEYS,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    return engine_loop(engine, CollectiveClock())


def build_zerolite(model: nn.Sequential, stage: int, fake: bool = False, **zero: int) -> Trainee:
    """`fake`: as one rank of `FAKE_WORLD` whose collectives send nothing. `zero`: keys of `zero_optimization`."""
    import zerolite
    from zerolite.comm import use_communicator

    keys: dict[str, Any] = {"stage": stage, **zero}
    if stage == 3:
        keys["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": keys,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "consistency_check_interval": 0 if fake else 100,  # ranks that send nothing do not agree
    }
    clock = CollectiveClock()
    with use_communicator(lambda rank, world: null_communicator(clock)) if fake else contextlib.nullcontext():
        engine = zerolite.initialize(model, config)
    return engine_loop(engine, clock, engine._parts.coordinator)


def _zerolite(suffix: str, stage: int, fake: bool = False, **zero: int) -> Competitor:
    options = {"stage": stage, "fake": fake, **zero}
    world = f"-w{FAKE_WORLD}" if fake else ""
    name = f"zerolite-{stage}{world}{suffix}"
    return Competitor(name, build_zerolite, "zerolite", options, communicates=not fake)


COMPETITORS = by_name(
    [
        Competitor("plain", plain_loop),
        Competitor("ddp", build_ddp),
        Competitor("fsdp2", build_fsdp2),
        *(Competitor(f"deepspeed-{stage}", build_deepspeed, "deepspeed", {"stage": stage}) for stage in (1, 3)),
        _zerolite("", 0),
        _zerolite("", 1, fake=True),
        _zerolite("", 2, fake=True),
        *(
            _zerolite(suffix, 3, fake, **keys)
            for suffix, keys in (("", {}), ("-modules", MODULES), ("-modules-reshard", RESHARD))
            for fake in (False, True)
        ),
    ]
)
