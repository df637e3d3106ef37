"""One CUDA device: the numbers of plain PyTorch, no synchronisation in a step, and memory that comes back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import ADAMW, SGD, STATIC_SCALE, config
from tests.toolkit.pool import Pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")

# The same sums in another order and, on tensor cores, another width: two units in the last place of the compute
# dtype. fp32 without TF32.
TOLERANCE = {"fp32": 1e-5, "bf16": 2.0**-6, "fp16": 2.0**-9}


@pytest.fixture(scope="module")
def lone() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Two ranks that share the device. NCCL refuses that, so their group is gloo's."""
    with Pool(2) as pool:
        yield pool


CASES = "tests.gpu.cases"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_parity_with_plain_pytorch(request: pytest.FixtureRequest, world: int, stage: int, precision: str) -> None:
    pool: Pool = request.getfixturevalue("lone" if world == 1 else "pair")
    for accumulation in (1, 4):
        kwargs = {
            "config": config(stage, precision, accumulation, 0.4, SGD),
            "precision": precision,
            "loss_scale": STATIC_SCALE if precision == "fp16" else 1.0,
            "optimizer": SGD,
            "clip": 0.4,
        }
        tolerance = TOLERANCE[precision]
        results = pool.run(f"{CASES}:train_beside_reference", kwargs, timeout=180)
        for result in results:
            assert result["device"] == "cuda"
            assert result["norms"] == pytest.approx(result["wanted norms"], rel=tolerance)
            torch.testing.assert_close(result["parameters"], result["wanted"], rtol=tolerance, atol=tolerance / 4)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_steady_step_does_not_wait_for_the_device(lone: Pool, stage: int, clip: float) -> None:
    fused = ("AdamW", {"lr": 1e-3, "fused": True})
    setting = config(
        stage, "bf16", 2, clip, fused, zero={"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    )
    result = lone.run(f"{CASES}:steps_without_synchronisation", {"config": setting, "steps": 5}, timeout=180)[0]
    assert result["steps"] == 8
    assert result["changed"]


def test_a_skipped_step_is_found_without_waiting(lone: Pool) -> None:
    fused = ("AdamW", {"lr": 1e-3, "fused": True})
    result = lone.run(f"{CASES}:skipped_on_device", {"config": config(1, "bf16", optimizer=fused)}, timeout=180)[0]
    assert result == {"unchanged": True, "skipped": 1, "steps": 2, "finite": True}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_memory_comes_back_when_the_engine_is_dropped(stage: int) -> None:
    def train() -> None:
        engine: Any = zerolite.initialize(models.build(models.Chain), config(stage, "bf16", optimizer=ADAMW))
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
