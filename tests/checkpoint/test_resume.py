"""A run that is saved and loaded goes on as if nothing had happened, at any stage and world size.

Each test saves a run at some stages, loads it at others into engines with other weights, and compares what was saved,
the next three losses, and everything after them. States are equal to the bit everywhere. What follows is equal to the
bit where the arithmetic is the same: at as many ranks and, with several micro-batches, at stages that sum alike.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.recipes import RECIPES, Recipe
from tests.checkpoint.runs import assert_equal, facts, keep, kept, make_engine, train
from tests.toolkit.compare import from_all_ranks
from tests.toolkit.memory import two_memories
from tests.toolkit.pool import Pools

SAVED, END = 3, 6  # steps
Ranks = list[dict[str, Any]]
Place = tuple[int, dict[str, Any]]  # number of ranks, and the stage and other settings


def engine_at(recipe: Recipe, stage: int, apart: bool = False, **more: Any) -> Any:
    """apart: host and device do not share their memory."""
    with two_memories() if apart else contextlib.nullcontext():
        return make_engine(recipe, stage, **more)


def save(directory: str, name: str, stage: int, **more: Any) -> None:
    """Train, save, go on. What was saved, and what came then, is kept."""
    recipe = RECIPES[name]
    engine = engine_at(recipe, stage, **more)
    train(engine, recipe, 0, SAVED * recipe.micros)
    assert os.path.isdir(engine.save_checkpoint(directory))
    keep(directory, stage=stage, ranks=from_all_ranks(rest_of_the_run(engine, recipe)))


def load(directory: str, name: str, stage: int, **more: Any) -> None:
    """An engine with other weights and random numbers loads, and goes on as the run did that was saved."""
    recipe = RECIPES[name]
    engine = engine_at(recipe, stage, seed=5, **more)
    for step in range(SAVED):  # what the user's program does before it resumes
        recipe.change(engine, step)
    path, client = engine.load_checkpoint(directory)
    assert client == {} and path is not None
    assert_goes_on(recipe, stage, kept(directory), from_all_ranks(rest_of_the_run(engine, recipe)), engine.rank)


def rest_of_the_run(engine: Any, recipe: Recipe) -> dict[str, Any]:
    saved = facts(engine, recipe.states)
    losses = train(engine, recipe, SAVED * recipe.micros, END * recipe.micros)
    return {"saved": saved, "losses": losses, "after": facts(engine, recipe.states)}


def assert_goes_on(recipe: Recipe, stage: int, wanted: dict[str, Any], found: Ranks, rank: int) -> None:
    saved: Ranks = wanted["ranks"]
    assert_equal(saved[0]["saved"], found[0]["saved"], "saved")
    # Stages 0 and 1 sum the micro-batches of a rank before the ranks', stages 2 and 3 after.
    same_sums = recipe.micros == 1 or (wanted["stage"] < 2) == (stage < 2)
    if len(saved) == len(found) and same_sums:
        assert_equal(saved[rank], found[rank], f"rank {rank}")
    elif recipe.same_everywhere or len(saved) == len(found):
        half = {"bf16", "fp16", "torch_autocast"} & recipe.config.keys()
        close: Any = {"rtol": 0.02, "atol": 2e-3} if half else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(mean_losses(found), mean_losses(saved), equal_nan=True, **close)
        one, other = saved[0]["after"], found[0]["after"]
        for part in ("masters", "buffers"):
            torch.testing.assert_close(other[part], one[part], equal_nan=True, **close)
        assert_equal({k: one[k] for k in ("counters", "groups")}, {k: other[k] for k in ("counters", "groups")})


def mean_losses(ranks: Ranks) -> Tensor:
    of_ranks = zip(*(rank["losses"] for rank in ranks), strict=True)
    return torch.tensor([sum(x * n for x, n in parts if n) / sum(n for _, n in parts) for parts in of_ranks])


def check(pools: Pools, directory: Path, name: str, saves: Sequence[Place], loads: Sequence[Sequence[Place]]) -> None:
    """Save a run of the recipe ``name`` at each of ``saves``, and load that at each of the corresponding ``loads``."""
    for number, (saved, goals) in enumerate(zip(saves, loads, strict=True)):
        for function, (world, settings) in ((save, saved), *((load, goal) for goal in goals)):
            arguments = {"directory": f"{directory}/{number}", "name": name, **settings}
            pools(world).run(function, arguments, timeout=120.0)


def at(world: int, *stages: int) -> list[Place]:
    return [(world, {"stage": stage}) for stage in stages]


@pytest.mark.fast("mixture")
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_goes_on_with_as_many_ranks(pools: Pools, tmp_path: Path, name: str) -> None:
    """The recipes take turns in the stages at which they are saved and loaded."""
    number, stages = list(RECIPES).index(name), RECIPES[name].stages
    saved, other = stages[number % len(stages)], stages[(number + 1 + number // 4 % 3) % len(stages)]
    loads = [other, saved] if RECIPES[name].micros > 1 else [other]
    check(pools, tmp_path, name, at(2, saved), [at(2, *loads)])


OTHER_RANKS: dict[str, tuple[list[Place], list[Place]]] = {
    "mixture": (at(3, 2), at(2, 3, 1)), "NAdam": (at(2, 0), at(2, 3)), "normed": (at(2, 3), at(3, 1)),
    "accumulation": (at(2, 1), at(3, 2, 1)), "Adafactor": (at(2, 0), at(3, 0)),
    "adapters in bf16": (at(2, 3), at(3, 2)), "moments in bf16": (at(3, 1), at(2, 3)),
}  # fmt: skip


@pytest.mark.fast("NAdam")
@pytest.mark.parametrize("name", OTHER_RANKS)
def test_a_run_goes_on_with_other_numbers_of_ranks(pools: Pools, tmp_path: Path, name: str) -> None:
    saves, loads = OTHER_RANKS[name]
    check(pools, tmp_path, name, saves, [loads])


EVERYWHERE = ("mixture", "mixture in bf16", "mixture in fp16", "accumulation with weights in fp16")


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYWHERE)
def test_every_stage_and_world_size_into_every_other(pools: Pools, tmp_path: Path, name: str) -> None:
    """Each recipe is saved at every world size, the four together at every stage of each, and each is loaded at every
    stage of every world size: every two of the four numbers (ranks and stage, saved and loaded) come together."""
    saves = [(world, (world + EVERYWHERE.index(name)) % 4) for world in (1, 2, 3, 4)]
    everywhere = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3)))
    loads = [[load for load in everywhere if (world + sum(load)) % 4 == 0] for world, _ in saves]
    check(pools, tmp_path, name, [at(*save)[0] for save in saves], [[at(*p)[0] for p in places] for places in loads])


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


# At how many ranks each recipe is saved and loaded.
PLACED = {
    "mixture": (2, 2), "mixture in bf16": (2, 3), "mixture in fp16": (3, 2), "accumulation": (1, 2), "NAdam": (2, 3),
    "woken": (2, 2), "autocast": (2, 2),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACED)
def test_every_placement_and_stage_into_others(pools: Pools, tmp_path: Path, name: str) -> None:
    """Checkpoints know nothing of placements. Together the recipes save and load at each placement and stage."""
    every = [*itertools.product(PLACEMENTS, (1, 2, 3)), ("none", 0)]
    (world, other), number = PLACED[name], list(PLACED).index(name)
    saves = [every[(number + 3 * k) % 10] for k in range(4)]
    loads = [every[(2 * number + 3 + 7 * k) % 10] for k in range(4)]
    check(
        pools, tmp_path, name, placed(tmp_path, world, *saves), [[place] for place in placed(tmp_path, other, *loads)]
    )
