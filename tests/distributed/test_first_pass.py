"""The first backward at stages 1 and 2 reduces bucket by bucket, before anybody knows how many contributions each
gradient has: what comes late is reduced once more. The numbers are plain PyTorch's, the memory that of later steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.cases import first_pass
from tests.distributed.configs import config
from tests.distributed.test_parity import assert_same_bits
from tests.pool import Pools

CASES = "tests.distributed.cases.first_pass"
OPTIMIZER = {"lr": 0.05, "momentum": 0.9}
HOW = ("engine", "plain", "weights", "twice", "broken", "join", "absent")
OF_SEVERAL = ("plain", "no_sync", "weights", "join")
LATE = {"shared": True}  # contributions that come late
APART = {"shared": False, "branches": True}  # each rank uses other parameters


def settings(stage: int, precision: str = "fp32", micros: int = 1, **zero: Any) -> dict[str, Any]:
    made = config(stage, precision, micros, 0.0, ("SGD", OPTIMIZER), {"reduce_bucket_size": 200, **zero})
    return made | {"train_micro_batch_size_per_gpu": 4}


def run_many(pools: Pools, world: int, runs: dict[Any, dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    """The results of all ranks, by run; equal on all of them."""
    ranks = pools(world).run(f"{CASES}:train_many", {"runs": runs}, timeout=180)
    results = {name: [rank[name] for rank in ranks] for name in runs}
    for name, of_ranks in results.items():
        for rank in of_ranks[1:]:
            assert_same_bits(rank["parameters"], of_ranks[0]["parameters"], f"{name}: parameters of two ranks")
            assert rank["steps"] == of_ranks[0]["steps"] == first_pass.STEPS
    return results


@pytest.mark.fast("1-2")
@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3, 4))])
@pytest.mark.parametrize("micros", [1, 3])
def test_numbers_are_those_of_plain_pytorch(pools: Pools, world: int, micros: int) -> None:
    kinds = [(how, LATE) for how in (HOW if micros == 1 else OF_SEVERAL)]
    kinds += [(how, APART) for how in ("engine", "join")]
    runs = {
        (number, stage): {"config": settings(stage, micros=micros), "how": how, "model": model}
        for number, (how, model) in enumerate(kinds)
        for stage in (1, 2)
    }
    results = run_many(pools, world, runs)
    for number, (how, model) in enumerate(kinds):
        wanted = first_pass.plain(how, world, micros, model, OPTIMIZER)
        for stage in (1, 2):
            for name, value in wanted.items():
                torch.testing.assert_close(
                    results[number, stage][0]["parameters"][name],
                    value,
                    rtol=0,
                    atol=2e-6,
                    msg=lambda m, n=name, h=how, s=stage: f"{h}, stage {s}, {n}: {m}",
                )


@pytest.mark.fast("contiguous_gradients")
@pytest.mark.parametrize(
    "options",
    [
        {"contiguous_gradients": False},
        {"reduce_scatter": False},
        *(pytest.param(o, marks=pytest.mark.slow) for o in ({"overlap_comm": False}, {"overlap_comm": True})),
    ],
    ids=lambda options: "-".join(options),
)
def test_numbers_with_other_ways_of_reducing(pools: Pools, options: dict[str, Any]) -> None:
    runs = {stage: {"config": settings(stage, **options), "model": LATE} for stage in (1, 2)}
    wanted = first_pass.plain("engine", 2, 1, LATE, OPTIMIZER)
    for result in run_many(pools, 2, runs).values():
        for name, value in wanted.items():
            torch.testing.assert_close(result[0]["parameters"][name], value, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", *(pytest.param(p, marks=pytest.mark.slow) for p in ("fp32", "fp16"))])
def test_stages_agree(pools: Pools, precision: str) -> None:
    models = {"apart": APART, "late": LATE}
    runs = {
        (stage, kind): {"config": settings(stage, precision), "model": model}
        for stage in (0, 1, 2)
        for kind, model in models.items()
    }
    results = {key: ranks[0]["parameters"] for key, ranks in run_many(pools, 2, runs).items()}
    for stage in (1, 2):
        assert_same_bits(results[0, "apart"], results[stage, "apart"], f"stages 0 and {stage}")
        assert_same_bits(results[1, "late"], results[stage, "late"], f"stages 1 and {stage}")
        for name, value in results[0, "late"].items():  # two means, rounded one by one, instead of one
            tolerance = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1e-2}[precision]
            torch.testing.assert_close(results[stage, "late"][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_weight_that_is_unfrozen_may_have_several_contributions(pools: Pools, stage: int) -> None:
    wanted = first_pass.wake(None, OPTIMIZER, 2)
    for rank in pools(2).run(f"{CASES}:wake", {"config": settings(stage), "optimizer": OPTIMIZER}):
        for name, value in wanted.items():
            torch.testing.assert_close(rank[name], value, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_only_late_buckets_are_reduced_again_and_only_at_first(pools: Pools) -> None:
    runs = {kind: {"config": settings(2), "model": model} for kind, model in (("apart", APART), ("late", LATE))}
    for kind, ranks in run_many(pools, 2, runs).items():
        for rank in ranks:
            first, second, third = (step.count(("reduce_scatter", "gradients")) for step in rank["collectives"])
            assert second == third
            assert first - second == (0 if kind == "apart" else 2)  # of the shared weight, and of its bias


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_backward_takes_no_more_memory_than_later_ones(pools: Pools, world: int) -> None:
    depth, width = 48, 192
    layer, bucket = 1 / depth, 1 / 8  # of the model
    setting = config(
        2,
        "bf16",
        optimizer=("Adam", {"lr": 1e-3}),
        zero={"reduce_bucket_size": depth // 8 * width**2, "allgather_bucket_size": depth // 8 * width**2},
    )
    kwargs = {"config": setting, "depth": depth, "width": width, "steps": 3}
    # This rank's part of the gradients; a bucket that fills, two that travel, one that is kept for the next (on the
    # CPU); what the others send of the two that travel; one gradient.
    most = 2 / world + 2 * (4 * bucket + 2 * (world - 1) / world * bucket + layer)
    for first, second, third in pools(world).run(f"{CASES}:backward_bytes", kwargs, timeout=180):
        assert first == pytest.approx(third, rel=0.05)
        assert 2 / world < second <= most * 1.05
