"""A rank is killed at any point of a save, or its disk fails: the checkpoint before, or the new one, is there."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import faults
from tests.checkpoint.recipes import BF16, RECIPES, Recipe, scheduler
from tests.checkpoint.runs import differences, facts, make_engine, on_rank_0, train
from tests.toolkit import models
from tests.toolkit.compare import assert_same_on_ranks, from_all_ranks
from tests.toolkit.disks import small_disk
from tests.toolkit.pool import Pool, Pools, WorkerDied
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raised

STAGE = 3
RECIPE = replace(RECIPES["tied tokens"], config=BF16 | scheduler("WarmupLR", warmup_num_steps=10))


def engine_after(steps: int, stage: int = STAGE, recipe: Recipe = RECIPE) -> Any:
    engine = make_engine(recipe, stage)
    return go_on(engine, steps, recipe)


def go_on(engine: Any, steps: int = 1, recipe: Recipe = RECIPE) -> Any:
    train(engine, recipe, engine.micro_steps, engine.micro_steps + steps)
    return engine


def about_to_save(directory: Path, first: bool = False, stage: int = STAGE) -> Any:
    """An engine that has saved its first step and taken its second; ``first``: that has taken its first."""
    engine = engine_after(1, stage)
    if not first:
        engine.save_checkpoint(directory)
        go_on(engine)
    return engine


def save_and_die(directory: Path, who: int, at: int, background: bool, first: bool) -> None:
    """Save, while rank ``who`` is killed before its operation ``at``. The other one raises."""
    engine = about_to_save(directory, first)
    with faults.death(at) if engine.rank == who else contextlib.nullcontext():
        engine.save_checkpoint(directory, async_save=background)
        engine.wait_for_checkpoint()


def resume(directory: Path, first: bool) -> None:
    """A new engine finds a whole checkpoint, or none if the first save was killed; it goes on, saves and loads."""
    engine = engine_after(0)
    path, _ = engine.load_checkpoint(directory, missing_ok=True)
    step = engine.global_steps
    assert_same_on_ranks({"step": step})
    assert step in ((0, 1) if first else (1, 2)) and (path is None) == (step == 0)
    assert differences(facts(engine_after(step)), facts(engine)) == []
    after = facts(go_on(engine, 3))
    engine.save_checkpoint(directory)
    go_on(engine).load_checkpoint(directory)
    assert differences(after, facts(engine)) == [] and faults.hidden(directory) == []


def operations_of(directory: Path, first: bool) -> list[faults.Operation]:
    engine = about_to_save(directory, first)
    with faults.recorded() as done:
        engine.save_checkpoint(directory)
    return done


@pytest.mark.slow
@pytest.mark.parametrize(("who", "first", "background"), [(0, False, True), (1, False, False), (1, True, True)])
def test_a_rank_is_killed_at_every_point(pools: Pools, ram: Path, who: int, first: bool, background: bool) -> None:
    operations = pools(2).run(operations_of, {"directory": ram / "counted", "first": first})
    for at in range(len(operations[who])):
        arguments = {"directory": ram / str(at), "first": first}
        with Pool(2) as pool, pytest.raises(WorkerDied) as died:
            pool.run(save_and_die, {**arguments, "who": who, "at": at, "background": background})
        assert f"rank {who} died: killed by SIGKILL" in str(died.value)
        assert f"rank {1 - who} raised" in str(died.value) and "CheckpointError: " in str(died.value)  # at once
        pools(2).run(resume, arguments)


@on_ranks(2)
def test_disk_of_one_rank_fails_at_every_point(ram: Path) -> None:
    """All ranks say the same; what is loaded then is the checkpoint before, unless the new one is complete."""
    directory = ram / "saved"
    engine = about_to_save(directory)
    with faults.recorded() as operations:
        engine.save_checkpoint(directory, "counted")
    points = [(rank, what) for rank, done in enumerate(from_all_ranks(operations)) for what in enumerate(done)]
    assert {rank for rank, _ in points} == {0, 1}
    engine.save_checkpoint(directory, "before")
    before = facts(engine)
    go_on(engine)
    kinds = itertools.cycle((errno.ENOSPC, errno.EIO, errno.EDQUOT))
    for number, ((rank, (at, _)), kind) in enumerate(zip(points, kinds, strict=False)):

        def save(background: bool = number % 2 == 1) -> None:
            engine.save_checkpoint(directory, "failed", async_save=background)
            engine.wait_for_checkpoint()

        with faults.failing(at if engine.rank == rank else 10**6, kind) as done:
            said = raised(save)
        operation = from_all_ranks(done)[rank][at]
        assert_same_on_ranks({"said": said})
        assert f"rank {rank}" in said and os.strerror(kind) in said, said
        assert operation[1] in said or "'latest'" in said, (operation, said)
        engine.load_checkpoint(directory)
        committed = "is complete" in said or operation == ("fsync", "saved")
        assert committed or differences(before, facts(engine)) == [], (operation, said)
        on_rank_0(engine, lambda: shutil.rmtree(directory / "failed", ignore_errors=True))
        on_rank_0(engine, lambda: (directory / "latest").write_text("before\n"))
    engine.save_checkpoint(directory, "failed")
    assert faults.hidden(directory) == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "2m") as directory:
        yield directory


@pytest.mark.fast("2-sync")
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@on_ranks(2)
def test_a_full_disk_is_named_and_harms_nothing(disk: Path, background: bool) -> None:
    """A disk that has no room is named, what was there stays whole, and there is room again once one is removed."""
    recipe = replace(RECIPE, model=functools.partial(models.OddModel, width=32, hidden=500))
    directory = disk / "saved"
    engine = engine_after(1, 2, recipe)
    good, said, now = 0, "", facts(engine)

    def save() -> None:
        engine.save_checkpoint(directory, async_save=background)
        engine.wait_for_checkpoint()

    while not (said := raised(save)):
        good, before = good + 1, now
        now = facts(go_on(engine, 1, recipe))
    assert_same_on_ranks({"said": said})
    assert good >= 2 and "No space left on device" in said and ".safetensors" in said
    assert f"The newest complete checkpoint there is 'global_step{good}'" in said
    assert faults.hidden(directory) == []
    on_rank_0(engine, lambda: shutil.rmtree(directory / "global_step1"))
    engine.save_checkpoint(directory, "again")
    for tag, wanted in ((f"global_step{good}", before), (None, now)):
        engine.load_checkpoint(directory, tag)
        assert differences(wanted, facts(engine)) == []
