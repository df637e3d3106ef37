"""Asynchronous saves: training goes on at once, what is saved is the state at the call, failures come to light."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoint.cases.recipes import RECIPES
from tests.checkpoint.cases.resume import (
    differences,
    expect,
    expect_words,
    facts,
    make_engine,
    message,
    own_seeds,
    reloaded,
    scatter_seeds,
    train,
)
from tests.toolkit.pool import ROOT
from tests.toolkit.ranks import on_ranks
from zerolite.checkpoint import filesystem, saving


@contextlib.contextmanager
def before_operations(action: Callable[[str, Path], None]) -> Iterator[None]:
    """``action`` is called before each operation of a save."""
    filesystem.before_operation = action
    try:
        yield
    finally:
        filesystem.before_operation = filesystem._nothing


@contextlib.contextmanager
def held_back() -> Iterator[threading.Event]:
    """No save writes anything until the event is set."""
    event = threading.Event()

    def wait(operation: str, path: Path) -> None:
        assert event.wait(30), "the save was not let go on"

    with before_operations(wait):
        try:
            yield event
        finally:
            event.set()


@contextlib.contextmanager
def full_disk(rank: int, failing: int, operation: str = "write") -> Iterator[None]:
    def fail(kind: str, path: Path) -> None:
        if kind == operation and rank == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with before_operations(fail):
        yield


OTHERS = [("mixture", 2), ("accumulation", 1), ("mixture in fp16", 0), ("NAdam", 1)]


def tags_in(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name not in (".lock", "latest"))


@on_ranks(2, 3)
@pytest.mark.fast("normed-3-2")
@pytest.mark.parametrize(
    ("name", "stage"),
    [("normed", 3), *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)],
)
def test_training_goes_on_at_once(directory: str, stage: int, name: str) -> None:
    """The saved state is that of the call, whatever comes then."""
    recipe = RECIPES[name]
    engine = make_engine(recipe, stage)
    own_seeds(engine.rank)
    start, end = 2 * recipe.micros, 4 * recipe.micros
    train(engine, recipe, 0, start)
    client = {"tensor": torch.arange(3), "list": [1]}
    at_the_call = facts(engine, recipe.states)
    with held_back() as event:
        path = engine.save_checkpoint(directory, client_state=client, async_save=True)
        client["tensor"].zero_()
        client["list"].append(2)
        losses = train(engine, recipe, start, end)
        after = facts(engine, recipe.states)
        with torch.no_grad():
            for buffer in engine.module.buffers():
                buffer.zero_()
        assert not os.path.exists(path)
        event.set()
        engine.wait_for_checkpoint()
    assert os.path.exists(path)
    other = make_engine(recipe, 3 - stage if recipe.micros == 1 else stage, seed=5)
    scatter_seeds(other.rank)
    _, found = other.load_checkpoint(directory)
    expect(differences({"tensor": torch.arange(3), "list": [1]}, found))
    expect(differences(at_the_call, facts(other, recipe.states)))
    assert train(other, recipe, start, end) == losses
    expect(differences(after, facts(other, recipe.states)))


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_two_in_a_row(directory: str, stage: int) -> None:
    recipe = RECIPES["mixture"]
    engine = make_engine(recipe, stage)
    own = {}
    for step in range(3):
        train(engine, recipe, step, step + 1)
        own[step + 1] = facts(engine, recipe.states)
        engine.save_checkpoint(directory, async_save=step != 1)
    engine.wait_for_checkpoint()
    engine.wait_for_checkpoint()
    assert tags_in(directory) == ["global_step1", "global_step2", "global_step3"]
    for step, expected in own.items():
        expect(differences(expected, reloaded(directory, recipe, 3 - stage, tag=f"global_step{step}")))


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [2])
def test_a_load_waits(directory: str, stage: int) -> None:
    """A load waits for the save before it."""
    recipe = RECIPES["mixture"]
    engine = make_engine(recipe, stage)
    train(engine, recipe, 0, 2)
    own = facts(engine, recipe.states)
    engine.save_checkpoint(directory, async_save=True)
    train(engine, recipe, 2, 3)
    engine.load_checkpoint(directory)
    expect(differences(own, facts(engine, recipe.states)))


@on_ranks(2)
@pytest.mark.fast("wait-*")
@pytest.mark.parametrize(
    ("following", "failing", "stage"), [("wait", 0, 3), ("load", 1, 1), ("save", 1, 2), ("async", 0, 0)]
)
def test_the_next_call_says_what_has_failed(directory: str, stage: int, failing: int, following: str) -> None:
    """An error in the background is raised by the next call, on all ranks, once."""
    recipe = RECIPES["mixture"]
    engine = make_engine(recipe, stage)
    train(engine, recipe, 0, 1)
    engine.save_checkpoint(directory)
    own = facts(engine, recipe.states)
    with full_disk(engine.rank, failing):
        train(engine, recipe, 1, 2)
        engine.save_checkpoint(directory, async_save=True)
        train(engine, recipe, 2, 3)
        calls = {
            "wait": engine.wait_for_checkpoint,
            "load": lambda: engine.load_checkpoint(directory),
            "save": lambda: engine.save_checkpoint(directory),
            "async": lambda: engine.save_checkpoint(directory, async_save=True),
        }
        before = facts(engine, recipe.states)
        said = message(calls[following])
    expect_words(said, "CheckpointError", "'global_step2'", f"rank {failing}:", "No space left", "'global_step1'")
    expect(differences(before, facts(engine, recipe.states)))
    engine.wait_for_checkpoint()
    assert tags_in(directory) == ["global_step1"]
    expect(differences(own, reloaded(directory, recipe, 3 - stage)))
    engine.save_checkpoint(directory, async_save=True)
    engine.wait_for_checkpoint()
    assert tags_in(directory) == ["global_step1", "global_step3"]
    expect(differences(before, reloaded(directory, recipe, 3 - stage)))


@on_ranks(2)
@pytest.mark.parametrize("stage", [1])
def test_refused_at_once(directory: str, stage: int) -> None:
    """An error that can be known at the call is raised there."""
    engine = make_engine(RECIPES["mixture"], stage)
    said = message(engine.save_checkpoint, directory, client_state={"f": print}, async_save=True)
    expect_words(said, "TypeError", "client_state['f']")
    said = message(engine.save_checkpoint, directory, tag="a/b", async_save=True)
    expect_words(said, "ValueError", "'a/b'")
    engine.wait_for_checkpoint()
    assert not os.path.exists(directory)


@on_ranks(2)
@pytest.mark.parametrize("stage", [3])
def test_ranks_that_have_finished_save_too(directory: str, stage: int) -> None:
    """Ranks that have finished save in the background too."""
    recipe = RECIPES["groups"]
    engine = make_engine(recipe, stage)
    with engine.join():
        train(engine, recipe, 0, 1)
        if engine.rank == 0:
            engine.save_checkpoint(directory, async_save=True)
            engine.save_checkpoint(directory, tag="second", async_save=True)
    own = facts(engine, recipe.states)
    engine.wait_for_checkpoint()
    expect(differences(own, reloaded(directory, recipe, 3 - stage)))


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_that_is_gone(directory: str, stage: int) -> None:
    """The engine goes out of scope while its checkpoint is being written; what is waited for is the checkpoint."""
    recipe = RECIPES["mixture"]
    engine = make_engine(recipe, stage)
    train(engine, recipe, 0, 1)
    own = facts(engine, recipe.states)
    engine.save_checkpoint(directory, async_save=True)
    del engine
    gc.collect()
    for saver in list(saving._unfinished):
        saver.close()
    expect(differences(own, reloaded(directory, recipe, 3 - stage)))
    assert not saving._unfinished and gc.isenabled(), "it is off within the calls"


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [2])
def test_two_engines(directory: str, stage: int) -> None:
    """Each has its own saves, which may be under way at the same time."""
    recipe = RECIPES["mixture"]
    engines = [make_engine(recipe, stage), make_engine(recipe, stage, seed=5)]
    slow = threading.Event()

    def wait(operation: str, path: Path) -> None:  # the ranks are at different places
        slow.wait(0.005 * (engines[0].rank + 1))

    own = []
    with before_operations(wait):
        for round_ in range(3):
            for number, engine in enumerate(engines):
                train(engine, recipe, round_, round_ + 1)
                engine.save_checkpoint(f"{directory}/{number}", tag="last", async_save=True)
        for engine in engines:
            own.append(facts(engine, recipe.states))
            engine.wait_for_checkpoint()
    for number, expected in enumerate(own):
        expect(differences(expected, reloaded(f"{directory}/{number}", recipe, 3 - stage)))


PROGRAM = """
import sys, time, torch, zerolite
from zerolite.checkpoint import filesystem
from zerolite.checkpoint.errors import CheckpointError

directory, how = sys.argv[1:]

def slow(operation, path):
    time.sleep(0.05)
    if how == "fails" and operation == "rename":
        raise OSError(28, "No space left on device", str(path))

filesystem.before_operation = slow
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
engine = zerolite.initialize(torch.nn.Linear(3, 3), config)
engine.save_checkpoint(directory, async_save=True)
if how == "fails":
    try:
        zerolite.destroy()
    except CheckpointError as error:
        print("said", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end of the program", "fails"])
def test_the_end_waits(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "saved"), how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if how == "fails":
        assert "said" in done.stdout and "No space left" in done.stdout
        assert not (tmp_path / "saved" / "latest").exists()
    else:
        assert (tmp_path / "saved" / "latest").read_text().strip() == "global_step0"
        assert (tmp_path / "saved" / "global_step0" / "manifest.json").exists()
