"""By default a repeated block is gathered, released and reduced as one, whatever way it is used."""

from __future__ import annotations

import pytest

from tests.distributed.configs import ADAMW, config
from tests.distributed.test_parity import assert_same_bits
from tests.pool import Pools

CASES = "tests.distributed.cases.stage3_blocks"
USES = ["forward", "inside", "twice", "tied", "experts", "checkpointed", "reentrant"]
UNITS = ["", "embed", *(f"blocks.{index}" for index in range(6)), "head"]
BLOCK = 6 * 7 + 12 * 7 + 6 * 13  # elements
EDGES = 11 * 6 + 11 * 7  # of the embedding and the head


@pytest.mark.fast("forward")
@pytest.mark.parametrize("use", [use if use in USES[:5] else pytest.param(use, marks=pytest.mark.slow) for use in USES])
def test_blocks_in_every_use_give_the_numbers_of_plain_training(pools: Pools, use: str) -> None:
    moving = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    kept = {**moving, "stage3_max_reuse_distance": 10 * BLOCK, "stage3_prefetch_bucket_size": 1}
    plain = pools(2).run(f"{CASES}:train", {"config": config(0, optimizer=ADAMW), "use": use})[0]
    for zero in (moving, kept):
        case = {"config": config(3, optimizer=ADAMW, zero=zero), "use": use}
        for result in pools(2).run(f"{CASES}:train", case):
            assert result["units"] == UNITS and result["followed"]
            assert_same_bits(result["parameters"], plain["parameters"], use)


@pytest.mark.fast("forward")
@pytest.mark.parametrize("use", ["forward", "inside"])
def test_at_most_two_blocks_are_whole_at_a_time(pools: Pools, use: str) -> None:
    zero = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 1,  # from one call inside a block to the next
        "stage3_prefetch_bucket_size": 1,
    }
    result = pools(2).run(f"{CASES}:train", {"config": config(3, zero=zero), "use": use})[0]
    assert BLOCK <= result["most"] <= 2 * BLOCK + EDGES
    # Forward 8 units, backward 7: the head's values are kept, and the embedding's are not needed.
    assert result["gathers"] <= 15
