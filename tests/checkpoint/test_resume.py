"""A run that is saved and loaded goes on as if nothing had happened, at any stage and world size.

Each test saves a run at some stages, loads it at others into engines with other weights, and compares what was saved,
the next three losses, and everything after them. States are equal to the bit everywhere. What follows is equal to the
bit where the arithmetic is the same: at as many ranks and, with several micro-batches, at stages that sum alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.cases.recipes import RECIPES
from tests.checkpoint.cases.resume import Place, check
from tests.toolkit.pool import Pools


def at(world: int, *stages: int) -> list[Place]:
    return [(world, {"stage": stage}) for stage in stages]


def rotated() -> Iterator[Any]:
    """Every recipe with the stages at which it is saved and loaded."""
    for number, name in enumerate(RECIPES):
        stages = RECIPES[name].stages
        saved, loaded = stages[number % len(stages)], stages[(number + 1 + number // 4 % 3) % len(stages)]
        yield pytest.param(name, saved, [loaded, saved] if RECIPES[name].micros > 1 else [loaded], id=name)


@pytest.mark.fast("mixture", "Lion")
@pytest.mark.parametrize(("name", "saved", "loaded"), list(rotated()))
def test_as_many_ranks(pools: Pools, tmp_path: Path, name: str, saved: int, loaded: list[int]) -> None:
    check(pools, tmp_path, name, at(2, saved), [at(2, *loaded)])


SAMPLE: list[Any] = [
    ("mixture", at(2, 3, 1), at(3, 0, 3)),
    ("mixture", at(3, 2), at(2, 3, 1)),
    ("NAdam", at(2, 0), at(2, 3)),
    ("mixture in bf16", at(2, 1), at(3, 3)),
    ("normed", at(2, 3), at(3, 1)),
    ("accumulation", at(2, 1), at(3, 2, 1)),
    ("Adafactor", at(2, 0), at(3, 0)),
    ("adapters in bf16", at(2, 3), at(3, 2)),
    ("moments in bf16", at(3, 1), at(2, 3)),
]


@pytest.mark.fast("mixture-saves1-loads1", "NAdam-saves2-loads2")
@pytest.mark.parametrize(("name", "saves", "loads"), SAMPLE)
def test_other_numbers_of_ranks(
    pools: Pools, tmp_path: Path, name: str, saves: list[Place], loads: list[Place]
) -> None:
    check(pools, tmp_path, name, saves, [loads] * len(saves))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture", "mixture in fp16", "accumulation with weights in fp16"])
def test_every_stage_and_world_size_into_every_other(pools: Pools, tmp_path: Path, name: str) -> None:
    everywhere = [place for world in (1, 2, 3, 4) for place in at(world, 0, 1, 2, 3)]
    check(pools, tmp_path, name, everywhere, [everywhere] * len(everywhere))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "zero"),
    [
        (1, 2, {"reduce_bucket_size": 37}),
        (2, 0, {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}),
        (3, 3, {"stage3_param_persistence_threshold": 1_000_000}),
        (0, 3, {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 50}),
    ],
)
def test_other_buckets_and_thresholds(
    pools: Pools, tmp_path: Path, saved: int, loaded: int, zero: dict[str, Any]
) -> None:
    check(pools, tmp_path, "mixture", at(2, saved), [[(2, {"stage": loaded, "zero": zero})]])


# -------------------------------------------------------------------- placements

PLACEMENTS = ("none", "cpu", "nvme")


def offloaded(placement: str, directory: Path) -> dict[str, Any]:
    if placement == "none":
        return {}
    path = {"nvme_path": str(directory)} if placement == "nvme" else {}
    return {"offload_optimizer": {"device": placement, **path}, "sub_group_size": 100}


def placed(directory: Path, world: int, *placements: tuple[str, int]) -> list[Place]:
    """placements: with the stage."""
    return [(world, {"stage": n, "zero": offloaded(one, directory), "apart": True}) for one, n in placements]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture in bf16", "NAdam", "woken", "autocast"])
def test_every_placement_goes_on_at_another(pools: Pools, tmp_path: Path, name: str) -> None:
    """Checkpoints know nothing of placements."""
    saves = placed(tmp_path, 2, ("none", 2), ("cpu", 3), ("nvme", 1))
    loads = placed(tmp_path, 2, ("nvme", 3), ("none", 1), ("cpu", 2))
    check(pools, tmp_path, name, saves, [[place] for place in loads])


MATRIX = {
    "mixture": (2, 2), "mixture in bf16": (2, 3), "mixture in fp16": (3, 2), "accumulation": (1, 2), "NAdam": (2, 3),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_every_placement_and_stage_into_others(pools: Pools, tmp_path: Path, name: str) -> None:
    """Each into three others, which are other ones for another recipe; together these are all."""
    every = [*itertools.product(PLACEMENTS, (1, 2, 3)), ("none", 0)]
    world, other = MATRIX[name]
    first = 3 * list(MATRIX).index(name) + other
    loads = [[every[(number + first + step) % len(every)] for step in range(3)] for number in range(len(every))]
    saves = placed(tmp_path, world, *every)
    check(pools, tmp_path, name, saves, [placed(tmp_path, other, *goals) for goals in loads])
