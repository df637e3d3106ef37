"""A run that is saved and loaded goes on as if nothing had happened, at any stage and world size.

Each test saves a run at some stages, loads it at others into engines with other weights, and compares what was saved,
the next three losses, and everything after them. States are equal to the bit everywhere. What follows is equal to the
bit where the arithmetic is the same: at as many ranks and, with several micro-batches, at stages that sum alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.cases.recipes import RECIPES
from tests.checkpoint.cases.resume import differences
from tests.toolkit.pool import Pools

CASES = "tests.checkpoint.cases.resume"
STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 3, 4)
Ranks = list[dict[str, Any]]


def run(pools: Pools, world: int, runs: list[dict[str, Any]], timeout: float = 120.0) -> list[Ranks]:
    """Results by run, then by rank."""
    ranks = pools(world).run(f"{CASES}:several", {"runs": runs}, timeout=timeout)
    return [list(of_ranks) for of_ranks in zip(*ranks, strict=True)]


def mean_losses(ranks: Ranks) -> torch.Tensor:
    """Return the losses of the joint batches."""
    of_ranks = [rank["losses"] for rank in ranks]
    return torch.tensor(
        [
            sum(loss * rows for loss, rows in parts if rows) / sum(rows for _, rows in parts)
            for parts in zip(*of_ranks, strict=True)
        ]
    )


def assert_goes_on(saved: Ranks, loaded: Ranks, name: str, same_sums: bool, where: str) -> None:
    """``same_sums``: a gradient is summed in the same order on both sides."""
    assert differences(saved[0]["saved"], loaded[0]["saved"]) == [], where
    exact = len(saved) == len(loaded) and same_sums
    if exact:
        for rank, (one, other) in enumerate(zip(saved, loaded, strict=True)):
            assert differences(one, other) == [], f"{where}, rank {rank}"
    elif RECIPES[name].same_everywhere or len(saved) == len(loaded):
        half = {"bf16", "fp16", "torch_autocast"} & RECIPES[name].config.keys()
        close = {"rtol": 0.02, "atol": 2e-3} if half else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(
            mean_losses(loaded), mean_losses(saved), equal_nan=True, **close, msg=lambda m: f"{where}: {m}"
        )
        for part in ("masters", "buffers"):
            torch.testing.assert_close(
                loaded[0]["after"][part],
                saved[0]["after"][part],
                equal_nan=True,
                **close,
                msg=lambda m: f"{where}: {m}",
            )
        assert differences(saved[0]["after"]["counters"], loaded[0]["after"]["counters"]) == [], where
        assert differences(saved[0]["after"]["groups"], loaded[0]["after"]["groups"]) == [], where


def same_sums(name: str, saved: int, loaded: int) -> bool:
    """Stages 0 and 1 sum the micro-batches of a rank before the ranks', stages 2 and 3 after."""
    return RECIPES[name].micros == 1 or (saved < 2) == (loaded < 2)


def check(pools: Pools, directory: Path, name: str, saves: dict[int, list[int]], loads: dict[int, list[int]]) -> None:
    """Save at each world size and stage of ``saves``, load each of them at each of ``loads``."""
    saved: dict[tuple[int, int], Ranks] = {}
    for world, stages in saves.items():
        runs = [
            {"how": "save", "directory": str(directory / f"{world}-{stage}"), "name": name, "stage": stage}
            for stage in stages
        ]
        saved |= zip([(world, stage) for stage in stages], run(pools, world, runs), strict=True)
    for world, stages in loads.items():
        pairs = [(source, stage) for source in saved for stage in stages]
        runs = [
            {"how": "load", "directory": str(directory / f"{a}-{b}"), "name": name, "stage": stage}
            for (a, b), stage in pairs
        ]
        for ((a, b), stage), loaded in zip(pairs, run(pools, world, runs, 600.0), strict=True):
            where = f"'{name}', {a} ranks at stage {b} to {world} at stage {stage}"
            assert_goes_on(saved[a, b], loaded, name, same_sums(name, b, stage), where)


def rotated() -> Iterator[Any]:
    """Every recipe with the stages at which it is saved and loaded."""
    for number, name in enumerate(RECIPES):
        stages = RECIPES[name].stages
        saved, loaded = stages[number % len(stages)], stages[(number + 1 + number // 4 % 3) % len(stages)]
        yield pytest.param(name, saved, [loaded, saved] if RECIPES[name].micros > 1 else [loaded], id=name)


@pytest.mark.fast("mixture", "Lion")
@pytest.mark.parametrize(("name", "saved", "loaded"), list(rotated()))
def test_as_many_ranks(pools: Pools, tmp_path: Path, name: str, saved: int, loaded: list[int]) -> None:
    check(pools, tmp_path, name, {2: [saved]}, {2: loaded})


SAMPLE: list[Any] = [
    ("mixture", {2: [3, 1]}, {3: [0, 3]}),
    ("mixture", {3: [2]}, {2: [3, 1]}),
    ("NAdam", {2: [0]}, {2: [3]}),
    ("mixture in bf16", {2: [1]}, {3: [3]}),
    ("normed", {2: [3]}, {3: [1]}),
    ("accumulation", {2: [1]}, {3: [2, 1]}),
    ("Adafactor", {2: [0]}, {3: [0]}),
    ("adapters in bf16", {2: [3]}, {3: [2]}),
    ("moments in bf16", {3: [1]}, {2: [3]}),
]


@pytest.mark.fast("mixture-saves1-loads1", "NAdam-saves2-loads2")
@pytest.mark.parametrize(("name", "saves", "loads"), SAMPLE)
def test_other_numbers_of_ranks(
    pools: Pools, tmp_path: Path, name: str, saves: dict[int, list[int]], loads: dict[int, list[int]]
) -> None:
    check(pools, tmp_path, name, saves, loads)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture", "mixture in fp16", "accumulation with weights in fp16"])
def test_every_stage_and_world_size_into_every_other(pools: Pools, tmp_path: Path, name: str) -> None:
    check(pools, tmp_path, name, {world: list(STAGES) for world in WORLDS}, {world: list(STAGES) for world in WORLDS})
