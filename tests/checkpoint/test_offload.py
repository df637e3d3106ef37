"""Checkpoints know nothing of placements: what is saved at one goes on at any other, as if nothing had happened."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.cases.resume import differences
from tests.checkpoint.test_resume import assert_goes_on, same_sums
from tests.toolkit.pool import Pools
from zerolite.checkpoint import export

CASES = "tests.checkpoint.cases.offload"
TIERS = ("none", "cpu", "nvme")
Saved = tuple[str, int]  # placement and stage


def zero(placement: str, directory: Path) -> dict[str, Any]:
    if placement == "none":
        return {}
    path = {"nvme_path": str(directory)} if placement == "nvme" else {}
    return {"offload_optimizer": {"device": placement, **path}, "sub_group_size": 100}


def run(pools: Pools, world: int, runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Results by run, then by rank."""
    ranks = pools(world).run(f"{CASES}:several", {"runs": runs}, timeout=600.0)
    return [list(of_ranks) for of_ranks in zip(*ranks, strict=True)]


def check(
    pools: Pools, directory: Path, name: str, worlds: tuple[int, int], saves: list[Saved], loads: list[list[Saved]]
) -> None:
    """Save at each of ``saves``, and load that at the corresponding ones of ``loads``."""
    apart = {"apart": True}
    runs = [
        {"how": "save", "directory": str(directory / f"{placement}-{stage}"), "name": name, "stage": stage}
        | {"zero": zero(placement, directory), **apart}
        for placement, stage in saves
    ]
    saved = dict(zip(saves, run(pools, worlds[0], runs), strict=True))
    pairs = [(source, goal) for source, goals in zip(saves, loads, strict=True) for goal in goals]
    runs = [
        {"how": "load", "directory": str(directory / f"{source[0]}-{source[1]}"), "name": name, "stage": stage}
        | {"zero": zero(placement, directory), **apart}
        for source, (placement, stage) in pairs
    ]
    for (source, goal), loaded in zip(pairs, run(pools, worlds[1], runs), strict=True):
        where = f"'{name}', {worlds[0]} ranks at {source} to {worlds[1]} at {goal}"
        assert_goes_on(saved[source], loaded, name, same_sums(name, source[1], goal[1]), where)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture in bf16", "NAdam", "woken", "autocast"])
def test_every_tier_goes_on_at_another(pools: Pools, tmp_path: Path, name: str) -> None:
    saves = [("none", 2), ("cpu", 3), ("nvme", 1)]
    check(pools, tmp_path, name, (2, 2), saves, [[("nvme", 3)], [("none", 1)], [("cpu", 2)]])


MATRIX = ("mixture", "mixture in bf16", "mixture in fp16", "accumulation", "NAdam")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "worlds"), list(zip(MATRIX, [(2, 2), (2, 3), (3, 2), (1, 2), (2, 3)], strict=True)), ids=MATRIX
)
def test_every_tier_and_stage_into_others(pools: Pools, tmp_path: Path, name: str, worlds: tuple[int, int]) -> None:
    """Each into three others, which are other ones for another recipe; together these are all."""
    saves = [*itertools.product(TIERS, (1, 2, 3)), ("none", 0)]
    first = 3 * MATRIX.index(name) + worlds[1]
    loads = [[saves[(number + first + step) % len(saves)] for step in range(3)] for number in range(len(saves))]
    check(pools, tmp_path, name, worlds, saves, loads)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), [("mixture in bf16", 2), ("NAdam", 3)])
def test_a_save_in_the_background(pools: Pools, tmp_path: Path, name: str, stage: int) -> None:
    kwargs = {"directory": str(tmp_path / "saved"), "name": name, "stage": stage, "zero": zero("cpu", tmp_path)}
    for found in pools(2).run(f"{CASES}:in_the_background", kwargs):
        assert found == []


def test_what_is_on_disk_is_not_copied_to_the_host_for_a_save(pools: Pools, tmp_path: Path) -> None:
    kwargs = {"directory": str(tmp_path / "saved"), "zero": zero("nvme", tmp_path)}
    for rank, result in enumerate(pools(2).run(f"{CASES}:not_in_the_background", kwargs)):
        assert result["complete"] == [True, True]
        assert result["copied"] == 0
        assert len(result["warnings"]) == (rank == 0)
        assert all("complete when the call returns" in warning for warning in result["warnings"])


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_models_are_the_same(pools: Pools, tmp_path: Path, stage: int) -> None:
    """full_state_dict, save_16bit_model, and what ``zerolite export`` makes of the checkpoint."""
    zeros = {placement: zero(placement, tmp_path) for placement in TIERS}
    kwargs = {"directory": str(tmp_path), "name": "mixture in bf16", "zeros": zeros, "stage": stage}
    results = pools(2).run(f"{CASES}:models_of", kwargs)[0]
    files = {}
    for placement in TIERS:
        export.main([str(tmp_path / placement / "checkpoints"), str(tmp_path / placement / "exported")])
        files[placement] = {
            str(path.relative_to(tmp_path / placement)): path.read_bytes()
            for part in ("model", "exported")
            for path in sorted((tmp_path / placement / part).iterdir())
            if path.suffix == ".safetensors"
        }
    assert len(files["none"]) == 2
    assert any(isinstance(value, torch.Tensor) and value.numel() > 100 for value in results["none"].values())
    for placement in TIERS[1:]:
        assert differences(results["none"], results[placement]) == []
        assert files["none"] == files[placement]
