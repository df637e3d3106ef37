"""Cases of the GPU tests for the workers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from tests.toolkit import models, reference
from tests.toolkit.faults import poison
from tests.toolkit.training import make_engine, snapshot

STEPS = 5


def on_device(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = models.token_batch(step, micro, rank)
    return tokens.cuda(), targets.cuda()


def train_beside_reference(
    config: dict[str, Any], precision: str, loss_scale: float, optimizer: tuple[str, dict[str, Any]], clip: float
) -> dict[str, Any]:
    """The engine's run and the reference's, both on this device."""
    torch.backends.cuda.matmul.allow_tf32 = False
    accumulation, world = config["gradient_accumulation_steps"], dist.get_world_size()
    batches = [
        [[on_device(step, micro, rank) for rank in range(world)] for micro in range(accumulation)]
        for step in range(STEPS)
    ]
    model = models.build(models.OddModel).cuda()
    wanted = reference.train(model, models.token_loss, batches, precision, optimizer, clip, loss_scale)
    engine = make_engine(config)
    norms = []
    for window in batches:
        for ranks in window:
            engine.backward(models.token_loss(engine, ranks[dist.get_rank()]))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return {
        "device": engine.device.type,
        "norms": norms,
        "wanted norms": wanted.norms,
        "parameters": {name: value.float().cpu() for name, value in snapshot(engine).items()},
        "wanted": {name: value.cpu() for name, value in wanted.parameters.items()},
    }


def steps_without_synchronisation(config: dict[str, Any], steps: int) -> dict[str, Any]:
    """After three windows to warm up, any synchronisation inside forward, backward or step raises."""
    engine = make_engine(config, "Chain", {"depth": 4, "width": 256})
    x = torch.randn(2, 256, device="cuda")

    def window() -> None:
        for _ in range(config["gradient_accumulation_steps"]):
            engine.backward(engine(x).square().mean())
            engine.step()

    for _ in range(3):
        window()
    before = snapshot(engine)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            window()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    changed = any(not torch.equal(before[name], value) for name, value in snapshot(engine).items())
    return {"steps": engine.global_steps, "changed": changed}


def skipped_on_device(config: dict[str, Any]) -> dict[str, Any]:
    """A gradient that is not a number in the second of two steps."""
    engine = make_engine(config, "Chain", {"depth": 3, "width": 64})
    x = torch.randn(2, 64, device="cuda")
    engine.backward(engine(x).square().mean())
    engine.step()
    before = snapshot(engine)
    poison(engine, "layers.1.weight", math.nan)
    engine.backward(engine(x).square().mean())
    engine.step()
    after = snapshot(engine)
    return {
        "unchanged": all(torch.equal(before[name], value) for name, value in after.items()),
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
        "finite": all(bool(torch.isfinite(value).all()) for value in after.values()),
    }
