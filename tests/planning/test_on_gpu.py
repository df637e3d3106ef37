"""A plan for CUDA against a real run on one device."""

from __future__ import annotations

import pytest
import torch

from tests.planning.jobs import planned
from tests.planning.test_plan_is_right import MEASURED, assert_right
from tests.toolkit.pool import Pools

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PEAK = 0.05
"""Of the allocator's peak, which contains cuBLAS' workspace and what kernels take inside themselves."""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_one_device(pools: Pools, stage: int, precision: str) -> None:
    setting = {"kind": "wide", "stage": stage, "buckets": "auto", "precision": precision}
    (measured,) = pools(1).run(MEASURED, setting)
    assert_right(planned(world=1, device="cuda", **setting), measured, PEAK, rest=PEAK)  # type: ignore[arg-type]
