"""Plans of long sequences: divided among ranks, with tiles and offloaded inputs, against real runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning.jobs import planned
from tests.planning.test_plan_is_right import MEASURED, assert_right
from tests.toolkit.pool import Pools

TILES = {"tiled_loss": 64, "tiled_mlp": 64}
ON_HOST = {"activation_checkpointing": {"modules": ["LongBlock"], "cpu_checkpointing": True}}
PEAK = 0.02


@pytest.mark.parametrize(
    ("world", "size", "stage", "precision", "more"),
    [
        (2, 2, 3, "fp32", TILES | ON_HOST),
        pytest.param(2, 2, 2, "fp32", {}, marks=pytest.mark.slow),
        pytest.param(4, 2, 1, "fp32", TILES, marks=pytest.mark.slow),
        pytest.param(4, 4, 3, "bf16", TILES | ON_HOST, marks=pytest.mark.slow),
        pytest.param(1, 1, 3, "bf16", TILES | ON_HOST, marks=pytest.mark.slow),
    ],
)
def test_a_plan_of_long_sequences_is_right(
    pools: Pools, world: int, size: int, stage: int, precision: str, more: dict[str, Any]
) -> None:
    setting = {
        "stage": stage, "buckets": "large", "precision": precision, "sequence_parallel": {"size": size},
        "train_micro_batch_size_per_gpu": 1, **more,
    }  # fmt: skip
    made = planned("long", world, world - 1, **setting)
    measured = pools(world).run(MEASURED, {"kind": "long", **setting}, timeout=180)[world - 1]
    assert_right(made, measured, PEAK, PEAK)
    rows = {(row.op, row.tag, row.dimension): row for row in made.traffic}
    if size > 1:  # two all-to-alls a layer in forward and backward, and forward again in a checkpoint
        exchanged = rows["all_to_all", "sequence", "sequence"]
        assert exchanged.count == 3 * (6 if "activation_checkpointing" in more else 4)
        assert exchanged.ranks == size
