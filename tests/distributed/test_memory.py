"""Tensor bytes per parameter Ψ and rank, bf16 and Adam: 2 compute weights, 2 gradients, 12 for master and two moments
in fp32."""

from __future__ import annotations

import pytest

from tests.distributed.configs import config
from tests.pool import Pools

CASES = "tests.distributed.cases.memory"
DEPTH, WIDTH = 48, 192  # one layer is 2 % of the model, so that a single fresh gradient stays below the tolerance
BUCKET = DEPTH // 8 * WIDTH**2  # an eighth of the model
TOLERANCE = 0.05
ADAM = ("Adam", {"lr": 1e-3})


@pytest.mark.parametrize("shared_memory", [False, True], ids=["messages", "shared-memory"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world", [2, 4])
def test_resident_and_peak_bytes(pools: Pools, world: int, stage: int, shared_memory: bool) -> None:
    setting = config(
        stage, "bf16", optimizer=ADAM, zero={"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    )
    two_buckets = 2 * 2 * BUCKET / (DEPTH * WIDTH**2)
    resident = 2 + 12 / world
    peak = 4 + 12 / world if stage == 1 else 2 + 14 / world + two_buckets
    if shared_memory:
        # Three regions of a bucket per process, mapped by all of them: the account of each shows them all.
        mapped = world * 3 * 2 * BUCKET / (DEPTH * WIDTH**2)
        resident, peak = resident + mapped, peak + mapped
    elif stage == 2:
        # While a bucket is in flight, what the other ranks send of theirs needs room as well.
        peak += (world - 1) / world * 2 * BUCKET / (DEPTH * WIDTH**2)
    kwargs = {"config": setting, "depth": DEPTH, "width": WIDTH, "shared_memory": shared_memory}
    for result in pools(world).run(f"{CASES}:resident_and_peak", kwargs, timeout=180):
        assert result["resident"] == pytest.approx(resident, rel=TOLERANCE)
        assert result["resident"] < result["peak"] <= peak * (1 + TOLERANCE)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_hundred_steps_grow_nothing(pools: Pools, stage: int) -> None:
    # The profiler does not see what gloo's threads free: the four bytes of a fence, several per step. The smallest
    # gradient or bucket that could be left behind at every step has 64 bytes.
    kwargs = {"config": config(stage, "bf16", 1, 0.4, ADAM), "steps": 200, "profiled": 30}
    for result in pools(2).run(f"{CASES}:growth", kwargs, timeout=120):
        assert abs(result["allocated"]) < 30 * 64
        assert result["reachable"] == 0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_engines_one_after_the_other_return_their_memory(pools: Pools, stage: int) -> None:
    for alive in pools(2).run(f"{CASES}:engines_one_after_the_other", {"config": config(stage, "bf16"), "count": 5}):
        assert alive == [alive[0]] * 5
        assert alive[0] < 4 * 64 * 64  # less than one layer


def test_a_model_outlives_its_engine(pools: Pools) -> None:
    for result in pools(2).run(f"{CASES}:dropped_without_gc", {"config": config(2)}):
        assert result["gradients"]
