"""A steady step never waits for the device, whatever the loop, and gives the numbers of one that does."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.configs import ADAMW, PARTITIONED, config
from tests.distributed.test_parity import assert_same_bits
from tests.pool import Pools

CASES = "tests.distributed.cases.host_reads"
FUSED = ("AdamW", {**ADAMW[1], "fused": True})
SLOW = pytest.mark.slow


@pytest.mark.fast("1-schedule", "2-weight", "3-engine")
@pytest.mark.parametrize("loop", ["engine", "schedule", "weight", "unused"])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 1, 2, 3])
def test_a_steady_step_waits_for_nothing(pools: Pools, stage: int, loop: str) -> None:
    made = config(stage, clip=0.4, optimizer=ADAMW, zero=PARTITIONED["defaults"] if stage == 3 else None)
    for ranks in pools(2).run(f"{CASES}:run", {"config": made, "loop": loop}):
        assert ranks["waits"] == [0] * 4


@pytest.mark.parametrize(
    ("stage", "optimizer", "precision", "phases"),
    [
        (0, ADAMW, "fp32", False),
        (2, ADAMW, "bf16", True),
        (3, FUSED, "bf16", False),
        pytest.param(1, ADAMW, "fp32", True, marks=SLOW),
        pytest.param(3, ADAMW, "bf16", False, marks=SLOW),
        pytest.param(1, FUSED, "fp32", False, marks=SLOW),
        pytest.param(0, FUSED, "bf16", False, marks=SLOW),
        pytest.param(1, FUSED, "bf16", True, marks=SLOW),
    ],
)
def test_parameters_that_no_rank_uses_stay(
    pools: Pools, stage: int, optimizer: tuple, precision: str, phases: bool
) -> None:
    made = config(stage, precision, optimizer=optimizer)
    arguments = {"config": made, "loop": "unused", "phases": phases}
    ranks = pools(2).run(f"{CASES}:run", arguments)
    by_host = pools(2).run(f"{CASES}:run", {**arguments, "on_device": False})
    wanted = pools(1).run(f"{CASES}:plain", {"config": made, "world": 2})[0]
    for result, reference in zip(ranks, by_host, strict=True):
        assert result["waits"] == [0] * 4
        assert_same_bits(result["parameters"], reference["parameters"], "told by the device and by the host")
        for mine, other in zip(result["states"], reference["states"], strict=True):
            assert all(torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(other[name])) for name in mine)
        if precision == "fp32":
            torch.testing.assert_close(result["parameters"], wanted, rtol=1e-5, atol=1e-6)
