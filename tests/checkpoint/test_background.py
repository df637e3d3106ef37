"""Asynchronous saves: training goes on at once, what is saved is the state at the call, failures come to light."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoint import faults
from tests.checkpoint.cases.recipes import RECIPES
from tests.checkpoint.cases.resume import (
    assert_equal,
    assert_reloads,
    expect_words,
    facts,
    make_engine,
    message,
    own_seeds,
    scatter_seeds,
    tags_in,
    train,
)
from tests.toolkit.faults import Warnings
from tests.toolkit.pool import ROOT
from tests.toolkit.ranks import on_ranks
from zerolite.checkpoint import saving


@contextlib.contextmanager
def held_back() -> Iterator[threading.Event]:
    """No save writes anything until the event is set."""
    event = threading.Event()

    def wait(operation: str, path: Path) -> None:
        assert event.wait(30), "the save was not let go on"

    with faults.hooked(wait):
        try:
            yield event
        finally:
            event.set()


OTHERS = [
    ("mixture", 2, False), ("accumulation", 1, False), ("mixture in fp16", 0, False), ("NAdam", 1, False),
    ("mixture in bf16", 2, True), ("NAdam", 3, True),
]  # fmt: skip


@on_ranks(2, 3)
@pytest.mark.fast("normed-3-False-2")
@pytest.mark.parametrize(("name", "stage", "offload"), [("normed", 3, False), *OTHERS])
def test_training_goes_on_at_once(directory: str, stage: int, name: str, offload: bool) -> None:
    """The saved state is that of the call, whatever comes then."""
    recipe = RECIPES[name]
    zero = {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 100} if offload else {}
    engine = make_engine(recipe, stage, zero=zero)
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
    other = make_engine(recipe, 3 - stage if recipe.micros == 1 else stage, seed=5, zero=zero if stage < 3 else {})
    scatter_seeds(other.rank)
    _, found = other.load_checkpoint(directory)
    assert_equal({"tensor": torch.arange(3), "list": [1]}, found)
    assert_equal(at_the_call, facts(other, recipe.states))
    assert train(other, recipe, start, end) == losses
    assert_equal(after, facts(other, recipe.states))


@on_ranks(2)
def test_what_is_on_disk_is_not_copied_to_the_host_for_a_save(directory: str, tmp_path: Path) -> None:
    """Such a save is complete when the call returns, which is said once."""
    recipe = RECIPES["mixture in bf16"]
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "sub_group_size": 100}
    engine = make_engine(recipe, 2, zero=nvme)
    with Warnings() as warnings:
        for step in range(2):
            train(engine, recipe, step, step + 1)
            assert os.path.isdir(engine.save_checkpoint(directory, async_save=True))
    assert engine.checkpointer._saver._staging.numel() == 0
    told = [text for text in warnings.messages if "async_save" in text]
    assert len(told) == (engine.rank == 0)
    assert all("complete when the call returns" in text for text in told)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_saves_and_a_load_wait_for_the_save_before(directory: str, stage: int) -> None:
    recipe = RECIPES["mixture"]
    engine = make_engine(recipe, stage)
    own = {}
    for step in range(3):
        train(engine, recipe, step, step + 1)
        own[step + 1] = facts(engine, recipe.states)
        engine.save_checkpoint(directory, async_save=step != 1)
    train(engine, recipe, 3, 4)
    engine.load_checkpoint(directory)
    assert_equal(own[3], facts(engine, recipe.states))
    engine.wait_for_checkpoint()
    assert tags_in(directory) == ["global_step1", "global_step2", "global_step3"]
    for step, expected in own.items():
        assert_reloads(expected, directory, recipe, stage, tag=f"global_step{step}")


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
    with faults.failing(0 if engine.rank == failing else 10**6, errno.ENOSPC, always=True, only="write"):
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
    assert_equal(before, facts(engine, recipe.states))
    engine.wait_for_checkpoint()
    assert tags_in(directory) == ["global_step1"]
    assert_reloads(own, directory, recipe, stage)
    engine.save_checkpoint(directory, async_save=True)
    engine.wait_for_checkpoint()
    assert tags_in(directory) == ["global_step1", "global_step3"]
    assert_reloads(before, directory, recipe, stage)


@on_ranks(2)
def test_refused_at_once(directory: str) -> None:
    """An error that can be known at the call is raised there."""
    stage = 1
    engine = make_engine(RECIPES["mixture"], stage)
    said = message(engine.save_checkpoint, directory, client_state={"f": print}, async_save=True)
    expect_words(said, "TypeError", "client_state['f']")
    said = message(engine.save_checkpoint, directory, tag="a/b", async_save=True)
    expect_words(said, "ValueError", "'a/b'")
    engine.wait_for_checkpoint()
    assert not os.path.exists(directory)


@on_ranks(2)
def test_ranks_that_have_finished_save_too(directory: str) -> None:
    """Ranks that have finished save in the background too."""
    stage = 3
    recipe = RECIPES["groups"]
    engine = make_engine(recipe, stage)
    with engine.join():
        train(engine, recipe, 0, 1)
        if engine.rank == 0:
            engine.save_checkpoint(directory, async_save=True)
            engine.save_checkpoint(directory, tag="second", async_save=True)
    own = facts(engine, recipe.states)
    engine.wait_for_checkpoint()
    assert_reloads(own, directory, recipe, stage)


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
    assert_reloads(own, directory, recipe, stage)
    assert not saving._unfinished and gc.isenabled(), "it is off within the calls"


@pytest.mark.slow
@on_ranks(2)
def test_two_engines(directory: str) -> None:
    """Each has its own saves, which may be under way at the same time."""
    stage = 2
    recipe = RECIPES["mixture"]
    engines = [make_engine(recipe, stage), make_engine(recipe, stage, seed=5)]
    slow = threading.Event()

    def wait(operation: str, path: Path) -> None:  # the ranks are at different places
        slow.wait(0.005 * (engines[0].rank + 1))

    own = []
    with faults.hooked(wait):
        for round_ in range(3):
            for number, engine in enumerate(engines):
                train(engine, recipe, round_, round_ + 1)
                engine.save_checkpoint(f"{directory}/{number}", tag="last", async_save=True)
        for engine in engines:
            own.append(facts(engine, recipe.states))
            engine.wait_for_checkpoint()
    for number, expected in enumerate(own):
        assert_reloads(expected, f"{directory}/{number}", recipe, stage)


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
