"""Loops of docs/drop-in.md whose steady steps do not wait for the device, at all stages."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu import NEEDS_GPU
from tests.gpu.test_kernels import no_synchronisation
from tests.toolkit.configs import at
from tests.toolkit.pool import Pool
from tests.toolkit.training import make_engine

pytestmark = NEEDS_GPU

DEVICE = "cuda"
WIDTH, WARMUP, STEPS = 256, 4, 5
STAGES = ["0", "1", "2", "3 moving", "3 kept", "3 defaults"]


class Loop:
    """Engine, optimizer and batch of a loop, on the device."""

    def __init__(self, stage: str, precision: str, own: bool = False, clip: float = 0.0, accumulation: int = 1) -> None:
        fused = ("AdamW", {"lr": 1e-3, "fused": True})
        buckets = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
        config = at(stage, precision, accumulation, clip, fused, zero=buckets)
        more: dict[str, Any] = {}
        if own:
            del config["optimizer"]
            more["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        self.engine = make_engine(config, "Chain", {"depth": 4, "width": WIDTH}, **more)
        self.optimizer = self.engine.optimizer
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.x = torch.randn(2, WIDTH, device=DEVICE)

    def loss(self) -> Tensor:
        loss: Tensor = self.engine(self.x).float().square().mean()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def engine_step(loop: Loop) -> None:
    loop.engine.backward(loop.loss())
    loop.engine.step()


def plain(loop: Loop) -> None:
    loop.loss().backward()
    loop.update()


def clip_grad_norm(loop: Loop) -> None:
    loop.loss().backward()
    nn.utils.clip_grad_norm_(loop.engine.parameters(), 0.1)
    loop.update()


def clip_gradients(loop: Loop) -> None:
    loop.engine.backward(loop.loss())
    loop.engine.clip_gradients(0.1)
    loop.engine.step()


def clip_grad_value(loop: Loop) -> None:
    loop.loss().backward()
    nn.utils.clip_grad_value_(loop.engine.parameters(), 0.01)
    loop.update()


def several_backwards(loop: Loop) -> None:
    for _ in range(3):
        (loop.loss() / 3).backward()
    loop.update()


def no_sync(loop: Loop) -> None:
    with loop.engine.no_sync():
        loop.engine.backward(loop.loss() / 2)
    loop.engine.backward(loop.loss() / 2)
    loop.engine.step()


def weights(loop: Loop) -> None:
    loop.engine.backward(loop.loss(), weight=3)
    loop.engine.step()


def grad_scaler(loop: Loop, clip: bool = False) -> None:
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = loop.loss()
    loop.scaler.scale(loss).backward()
    if clip:
        loop.scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.engine.parameters(), 0.1)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()


def autocast(loop: Loop) -> None:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = loop.loss()
    loss.backward()
    loop.update()


def norms_of_gradients(loop: Loop) -> None:
    loop.loss().backward()
    torch.stack([p.grad.norm() for p in loop.engine.parameters() if p.grad is not None]).norm()
    loop.update()


def gradient_in_place(loop: Loop) -> None:
    loop.loss().backward()
    for p in loop.engine.parameters():
        p.grad.mul_(0.5)
    loop.update()


def penalty(loop: Loop) -> None:
    x = loop.x.clone().requires_grad_()
    loss = loop.engine(x).float().square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.float().square().mean()).backward()
    loop.update()


def scheduler(loop: Loop) -> None:
    plain(loop)
    loop.scheduler.step()


def evaluation_between(loop: Loop) -> None:
    plain(loop)
    loop.engine.eval()
    with torch.no_grad():
        loop.loss()
    loop.engine.train()


def average_of_weights(loop: Loop) -> None:
    plain(loop)
    with torch.no_grad():
        for p in loop.engine.parameters():
            p.detach().mul(0.9)


LOOPS: dict[str, tuple[Callable[[Loop], None], str, dict[str, Any]]] = {
    "engine": (engine_step, "bf16", {}),
    "engine, clip": (engine_step, "bf16", {"clip": 0.1}),
    "engine, clip, accumulation": (engine_step, "bf16", {"clip": 0.1, "accumulation": 2}),
    "engine, fp32": (engine_step, "fp32", {"clip": 0.1}),
    "plain": (plain, "bf16", {}),
    "plain, fp32": (plain, "fp32", {}),
    "own optimizer": (plain, "bf16", {"own": True}),
    "clip_grad_norm_": (clip_grad_norm, "bf16", {}),
    "clip_grad_norm_, own optimizer": (clip_grad_norm, "fp32", {"own": True}),
    "clip_gradients": (clip_gradients, "bf16", {}),
    "clip_grad_value_": (clip_grad_value, "bf16", {}),
    "several backwards": (several_backwards, "bf16", {}),
    "no_sync": (no_sync, "bf16", {}),
    "weights": (weights, "bf16", {}),
    "GradScaler": (grad_scaler, "fp32", {}),
    "GradScaler, own optimizer": (grad_scaler, "fp32", {"own": True}),
    "GradScaler, clip": (functools.partial(grad_scaler, clip=True), "fp32", {}),
    "autocast": (autocast, "fp32", {}),
    "norms of p.grad": (norms_of_gradients, "bf16", {}),
    "p.grad in place": (gradient_in_place, "bf16", {}),
    "gradient penalty": (penalty, "bf16", {}),
    "scheduler": (scheduler, "bf16", {}),
    "evaluation between steps": (evaluation_between, "bf16", {}),
    "average of weights": (average_of_weights, "bf16", {}),
}


def waits(name: str, stages: list[str]) -> dict[str, str]:
    """By stage, the traceback of the first synchronisation in five steady steps; empty if there is none."""
    found = {}
    for stage in stages:
        step, precision, options = LOOPS[name]
        loop = Loop(stage, precision, **options)
        for _ in range(WARMUP):
            step(loop)
        found[stage] = ""
        try:
            with no_synchronisation():
                for _ in range(STEPS):
                    step(loop)
        except RuntimeError:
            found[stage] = traceback.format_exc()
        assert loop.engine.global_steps > WARMUP // 2, f"stage {stage} has not trained"
    return found


@pytest.mark.parametrize("name", LOOPS)
def test_steady_steps_do_not_wait_for_the_device(lone: Pool, name: str) -> None:
    found = lone.run(waits, {"name": name, "stages": STAGES}, timeout=180)[0]
    assert not any(found.values()), "\n".join(f"stage {stage}: {text}" for stage, text in found.items() if text)
