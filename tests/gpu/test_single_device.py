"""One CUDA device: the numbers of plain PyTorch, no synchronisation in a step, and memory that comes back."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.gpu import NEEDS_GPU
from tests.toolkit import models, reference
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, SGD, STATIC_SCALE, at, config
from tests.toolkit.faults import poison
from tests.toolkit.pool import Pool
from tests.toolkit.training import make_engine, snapshot

pytestmark = NEEDS_GPU

# The same sums in another order and, on tensor cores, another width: two units in the last place of the compute
# dtype. fp32 without TF32.
TOLERANCE = {"fp32": 1e-5, "bf16": 2.0**-6, "fp16": 2.0**-9}


STEPS = 5
STAGES = ["0", "1", "2", "3 moving", "3 kept", "3 defaults"]


def on_device(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = models.token_batch(step, micro, rank)
    return tokens.cuda(), targets.cuda()


def train_beside_reference(config: dict[str, Any], precision: str) -> dict[str, Any]:
    """The engine's run and the reference's, both on this device."""
    scale = STATIC_SCALE if precision == "fp16" else 1.0
    torch.backends.cuda.matmul.allow_tf32 = False
    accumulation, world = config["gradient_accumulation_steps"], dist.get_world_size()
    batches = [
        [[on_device(step, micro, rank) for rank in range(world)] for micro in range(accumulation)]
        for step in range(STEPS)
    ]
    model = models.build(models.OddModel).cuda()
    wanted = reference.train(model, models.token_loss, batches, precision, SGD, 0.4, scale)
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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_parity_with_plain_pytorch(request: pytest.FixtureRequest, world: int, stage: str, precision: str) -> None:
    pool: Pool = request.getfixturevalue("lone" if world == 1 else "pair")
    for accumulation in (1, 4):
        kwargs = {"config": at(stage, precision, accumulation, 0.4, SGD), "precision": precision}
        tolerance = TOLERANCE[precision]
        for result in pool.run(train_beside_reference, kwargs, timeout=180):
            assert result["device"] == "cuda"
            assert result["norms"] == pytest.approx(result["wanted norms"], rel=tolerance)
            torch.testing.assert_close(result["parameters"], result["wanted"], rtol=tolerance, atol=tolerance / 4)


def train_empty_parameters(stages: list[int]) -> list[dict[str, Any]]:
    results = []
    for stage in stages:
        engine = make_engine(config(stage), "PrimeMlp")
        for step in range(STEPS):
            x, y = (tensor.cuda() for tensor in models.float_batch(step, 0, dist.get_rank()))
            engine.backward(models.square_loss(engine, (x, y)))
            engine.step()
        results.append({name: value.cpu() for name, value in snapshot(engine).items()})
    return results


def test_persistent_parameters_without_elements(pair: Pool) -> None:
    """Beside others of one all-gather: a copy to a size of 0 kills the process."""
    for wanted, found in pair.run(train_empty_parameters, {"stages": [2, 3]}, timeout=180):
        assert_same_bits(found, wanted, "stage 3 and stage 2")


@pytest.mark.parametrize("stage", STAGES)
def test_a_skipped_step_is_found_without_waiting(lone: Pool, stage: str) -> None:
    fused = ("AdamW", {"lr": 1e-3, "fused": True})
    result = lone.run(skipped_on_device, {"config": at(stage, "bf16", 1, 0.0, fused)}, timeout=180)[0]
    assert result == {"unchanged": True, "skipped": 1, "steps": 2, "finite": True}


@pytest.mark.parametrize("stage", STAGES)
def test_memory_comes_back_when_the_engine_is_dropped(stage: str) -> None:
    def train() -> None:
        engine: Any = zerolite.initialize(models.build(models.Chain), at(stage, "bf16", 1, 0.0, ADAMW))
        for _ in range(2):
            engine.backward(engine(torch.randn(2, 384, device="cuda")).square().mean())
            engine.step()

    try:
        train()  # libraries keep their workspaces after the first use
        gc.collect()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            train()
            gc.collect()
            assert torch.cuda.memory_allocated() == before
    finally:
        zerolite.destroy()
