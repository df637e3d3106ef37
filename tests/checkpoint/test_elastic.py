"""A run goes on with another number of ranks and takes the same steps: the `elasticity` block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.cases.elastic import BATCH, SAVED, STEPS
from tests.toolkit.pool import Pools

CASES = "tests.checkpoint.cases.elastic"
SIZES = {1: (BATCH, 3, 8), 2: (BATCH, 3, 4), 3: (BATCH, 2, 4), 4: (BATCH, 3, 2)}


def steps_of(ranks: list[dict[str, Any]]) -> list[tuple[list[int], float]]:
    """The rows that all ranks together took in each step, in ascending order, and the mean loss over them."""
    together = zip(*(rank["steps"] for rank in ranks), strict=True)
    return [
        (sorted(row for rows, _ in parts for row in rows), sum(loss for _, loss in parts) / len(parts))
        for parts in together
    ]


def assert_same_steps(saved: list[dict[str, Any]], loaded: list[dict[str, Any]], world: int) -> None:
    assert loaded[0]["sizes"] == SIZES[world] and loaded[0]["lr"] == saved[0]["lr"]
    found, wanted = steps_of(loaded), steps_of(saved)[SAVED:]
    assert len(found) == STEPS - SAVED and all(len(set(rows)) == BATCH for rows, _ in found)
    assert [rows for rows, _ in found] == [rows for rows, _ in wanted], "the rows that no step had before"
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=1e-5)
    for name, value in saved[0]["parameters"].items():
        torch.testing.assert_close(loaded[0]["parameters"][name], value, rtol=1e-4, atol=1e-6)


def run(pools: Pools, world: int, directory: Path, stage: int, load: bool) -> list[dict[str, Any]]:
    return pools(world).run(f"{CASES}:run", {"directory": str(directory), "stage": stage, "load": load})


def check(pools: Pools, directory: Path, stage: int, saves: int, loads: list[int]) -> None:
    saved = run(pools, saves, directory, stage, load=False)
    assert saved[0]["sizes"] == SIZES[saves]
    for world in loads:
        assert_same_steps(saved, run(pools, world, directory, stage, load=True), world)


def test_a_run_goes_on_with_half_of_its_ranks(pools: Pools, tmp_path: Path) -> None:
    check(pools, tmp_path, stage=2, saves=4, loads=[2])
    first, second = pools(2).run(f"{CASES}:load_with_smaller_steps", {"directory": str(tmp_path)})
    (sentence,) = [text for text in first if "elasticity" in text]
    assert "a step takes 6 samples on 2 ranks, and took 24 on 4 when the checkpoint was saved" in sentence
    assert not [text for text in second if "elasticity" in text], "once"


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "saves"), [(0, 3), (1, 2), (2, 4), (3, 1), (3, 3)])
def test_a_run_goes_on_with_any_number_of_ranks(pools: Pools, tmp_path: Path, stage: int, saves: int) -> None:
    check(pools, tmp_path, stage, saves, [1, 2, 3, 4])


def test_what_cannot_go_on_says_why(pools: Pools) -> None:
    for said in pools(2).run(f"{CASES}:refusal"):
        assert said.startswith("ConfigError") and "elasticity: expected a number of ranks" in said
        assert "from 3 to 6" in said and "got 2 ranks" in said and "the nearest that do: 3" in said
