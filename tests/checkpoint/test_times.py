"""Saving and loading at which time, with which parameters whole, and in the background: training goes on at once, what
is saved is the state at the call, failures come to light."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint import faults
from tests.checkpoint.recipes import BF16, RECIPES, Recipe, adapted, mlp_with
from tests.checkpoint.runs import assert_equal, assert_reloads, facts, loaded, make_engine, tags_in, train, trained
from tests.toolkit import models
from tests.toolkit.faults import Warnings
from tests.toolkit.pool import ROOT
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import expect_words, raised
from zerolite.checkpoint import saving
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.zero import GatheredParameters

MIXTURE = RECIPES["mixture"]


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_between_backward_and_step(directory: str, stage: int) -> None:
    recipe, engine = MIXTURE, trained(MIXTURE, stage, 2)
    engine.backward(recipe.loss(engine, recipe.batch(2, 0)))
    engine.save_checkpoint(directory, tag="before")  # all gradients of the step are there
    assert_reloads(facts(engine, recipe.states), directory, recipe, stage, tag="before")
    engine.step()
    expect_words(raised(engine.load_checkpoint, directory, tag="gone"), "'gone'")


@pytest.mark.slow
@on_ranks(3)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_goes_back(directory: str, stage: int) -> None:
    """From a later step and from the middle of one; and twice."""
    recipe = RECIPES["accumulation"]
    engine = trained(recipe, stage, 1)
    engine.save_checkpoint(directory, tag="early")
    train(engine, recipe, 3, 6)
    engine.save_checkpoint(directory, tag="late")
    first = train(engine, recipe, 6, 9), facts(engine, recipe.states)
    train(engine, recipe, 9, 11)  # gradients are pending
    for tag, start in (("late", 6), ("early", 3), ("late", 6), ("late", 6)):
        engine.load_checkpoint(directory, tag=tag)
        again = train(engine, recipe, start, 9), facts(engine, recipe.states)
        assert again[0][-3:] == first[0]
        assert_equal(first[1], again[1])
        train(engine, recipe, 9, 10)


WITHIN: dict[str, tuple[Recipe, int, Callable[[nn.Module], Any]]] = {
    "gathered parameters": (Recipe(adapted), 3, lambda model: GatheredParameters(model, check=False)),
    "an evaluation": (MIXTURE, 2, lambda model: torch.inference_mode()),
    "an evaluation, with torch's update": (RECIPES["NAdam"], 2, lambda model: torch.inference_mode()),
}


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("what", WITHIN)
def test_a_save_or_load_within(directory: str, what: str) -> None:
    recipe, stage, context = WITHIN[what]
    engine, other = trained(recipe, stage, 1), make_engine(recipe, stage, seed=5)
    with context(engine.module):
        engine.save_checkpoint(directory, async_save=True)
    own = facts(engine, recipe.states)
    losses = train(engine, recipe, 1, 2)
    engine.save_checkpoint(directory, tag="later", async_save=True)
    engine.wait_for_checkpoint()
    with context(other.module):
        other.load_checkpoint(directory, tag="global_step1")
        found = {name: p.detach().clone() for name, p in other.module.named_parameters()}
    assert_equal(own["parameters"], found)
    assert_equal(own, facts(other, recipe.states))
    assert train(other, recipe, 1, 2) == losses
    assert_equal(facts(engine, recipe.states), facts(other, recipe.states))


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_in_the_middle_of_an_accumulation(directory: str, stage: int) -> None:
    """A save says that it holds no gradients, and changes nothing: training goes on as if it had not been."""
    for name in ("accumulation", "accumulation in the plain loop"):
        recipe = RECIPES[name]
        engine, other = make_engine(recipe, stage), make_engine(recipe, stage)
        for one in (engine, other):
            train(one, recipe, 0, 4)
        for tag in ("first", "second"):
            with Warnings() as warnings:
                engine.save_checkpoint(f"{directory}/{name}", tag=tag, async_save=True)
            assert len(warnings.messages) == (engine.rank == 0), warnings.messages
            for said in warnings.messages:
                expect_words(said, "in the middle of a gradient accumulation", "holds no gradients", "returned True")
        engine.wait_for_checkpoint()
        saved = facts(engine)
        assert train(engine, recipe, 4, 6) == train(other, recipe, 4, 6)
        assert_equal(facts(engine), facts(other))
        assert_reloads(saved, f"{directory}/{name}", recipe, stage)
        for end in (lambda engine=engine: engine.step(flush=True), engine.zero_grad):
            train(engine, recipe, 0, 1)
            end()
            engine.save_checkpoint(f"{directory}/{name}", tag="now")
            assert_reloads(facts(engine), f"{directory}/{name}", recipe, stage, tag="now")


class Extra(models.Mlp):
    def get_extra_state(self) -> Any:
        return {"thing": object()}


@on_ranks(2)
def test_what_cannot_be_saved_is_named(directory: str) -> None:
    odd = lambda: mlp_with(odd=torch.zeros(3, dtype=torch.complex128))  # noqa: E731
    buffer, extra, group = (make_engine(Recipe(model), 3) for model in (odd, Extra, models.Mlp))
    group.optimizer.param_groups[0]["rule"] = lambda: 0
    for engine, words in ((buffer, "odd complex128"), (extra, "thing object"), (group, "groups function")):
        expect_words(raised(engine.save_checkpoint, directory), *words.split())
        train(engine, Recipe(), 0, 1)


@on_ranks(2)
def test_buffers_that_share_memory_with_each_other(directory: str) -> None:
    """Each has its values, and they still share them."""

    def overlapping() -> nn.Module:
        values = torch.zeros(6)
        return mlp_with(all=values, middle=values[2:4], turned=values.view(2, 3).t())

    recipe = Recipe(overlapping)
    engine = trained(recipe, 2, 1)
    engine.module.all.copy_(torch.arange(6.0))
    engine.save_checkpoint(directory, async_save=True)
    engine.wait_for_checkpoint()
    own = facts(engine)
    assert own["buffers"]["middle"].tolist() == [2, 3] and own["buffers"]["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    other = loaded(directory, recipe, 1)
    assert_equal(own, facts(other))
    other.module.all.fill_(7)
    assert other.module.middle.tolist() == [7, 7] and other.module.turned.unique().tolist() == [7]


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_values_that_the_user_has_written(directory: str, stage: int) -> None:
    """Values that the user has put into the parameters are saved; those put there before a load are gone."""
    recipe = replace(MIXTURE, config=BF16)
    engine = trained(recipe, stage, 1)

    def write(weight: float, gain: float) -> None:
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
            engine.module.last.weight.fill_(weight)
        engine.load_full_state_dict({"gain": torch.tensor(gain)}, strict=False)

    write(0.5, 3.0)
    path = engine.save_checkpoint(directory)
    own = facts(engine)
    assert_equal(own["masters"]["last.weight"], torch.full((3, 13), 0.5))
    assert_equal(own["masters"]["gain"], torch.tensor(3.0))
    assert_equal(CheckpointReader(Path(path)).read("parameters/last.weight"), torch.full((3, 13), 0.5))
    assert_reloads(own, directory, recipe, stage)
    write(7.0, 9.0)
    engine.load_checkpoint(directory)
    assert_equal(own, facts(engine))
    train(engine, recipe, 1, 2)
    other = loaded(directory, recipe, stage)
    train(other, recipe, 1, 2)
    assert_equal(facts(other), facts(engine))


# -------------------------------------------------------------------- in the background


HELD_BACK = [
    ("normed", 3, False), ("accumulation", 1, False), ("mixture in fp16", 0, False), ("mixture in bf16", 2, True),
    ("NAdam", 3, True),
]  # fmt: skip


@on_ranks(2)
@pytest.mark.fast("normed-*")
@pytest.mark.parametrize(("name", "stage", "offload"), HELD_BACK)
def test_training_goes_on_at_once(directory: str, stage: int, name: str, offload: bool) -> None:
    """The saved state is that of the call, whatever comes then."""
    recipe = RECIPES[name]
    zero = {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 100} if offload else {}
    engine = make_engine(recipe, stage, zero=zero)
    start, end = 2 * recipe.micros, 4 * recipe.micros
    train(engine, recipe, 0, start)
    client = {"tensor": torch.arange(3), "list": [1]}
    at_the_call = facts(engine, recipe.states)
    event = threading.Event()
    with faults.hooked(lambda operation, path: event.wait(30)):
        path = engine.save_checkpoint(directory, client_state=client, async_save=True)
        client["tensor"].zero_()
        client["list"].append(2)
        losses = train(engine, recipe, start, end)
        after = facts(engine, recipe.states)
        with torch.no_grad():
            for buffer in engine.module.buffers():
                buffer.zero_()
        assert not os.path.exists(path)  # nothing is written until the event is set
        event.set()
        engine.wait_for_checkpoint()
    assert os.path.exists(path)
    other = make_engine(recipe, 3 - stage if recipe.micros == 1 else stage, seed=5, zero=zero if stage < 3 else {})
    _, found = other.load_checkpoint(directory)
    assert_equal({"tensor": torch.arange(3), "list": [1]}, found)
    assert_equal(at_the_call, facts(other, recipe.states))
    assert train(other, recipe, start, end) == losses
    assert_equal(after, facts(other, recipe.states))


@on_ranks(2)
def test_what_is_on_disk_is_not_copied_to_the_host_for_a_save(directory: str, tmp_path: Path) -> None:
    """Such a save is complete when the call returns."""
    recipe = RECIPES["mixture in bf16"]
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "sub_group_size": 100}
    engine = make_engine(recipe, 2, zero=nvme)
    train(engine, recipe, 0, 1)
    assert os.path.isdir(engine.save_checkpoint(directory, async_save=True))
    assert engine._saver._staging.numel() == 0


@pytest.mark.slow
@on_ranks(2)
def test_saves_and_a_load_wait_for_the_save_before(directory: str) -> None:
    recipe, stage = MIXTURE, 3
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


FOLLOWING = [("wait", 0, 3), ("load", 1, 1), ("save", 1, 2), ("async", 0, 0)]


@on_ranks(2)
@pytest.mark.fast("wait-*")
@pytest.mark.parametrize(("following", "failing", "stage"), FOLLOWING)
def test_the_next_call_says_what_has_failed(directory: str, stage: int, failing: int, following: str) -> None:
    """An error in the background is raised by the next call, on all ranks, once."""
    recipe, engine = MIXTURE, trained(MIXTURE, stage, 1)
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
        said = raised(calls[following])
    expect_words(said, "CheckpointError", "'global_step2'", f"rank {failing}:", "No space left", "'global_step1'")
    assert_equal(before, facts(engine, recipe.states))
    engine.wait_for_checkpoint()
    assert tags_in(directory) == ["global_step1"]
    assert_reloads(own, directory, recipe, stage)
    engine.save_checkpoint(directory, async_save=True)
    engine.wait_for_checkpoint()
    assert tags_in(directory) == ["global_step1", "global_step3"]
    assert_reloads(before, directory, recipe, stage)


@pytest.mark.slow
@on_ranks(2)
def test_an_engine_that_is_gone(directory: str) -> None:
    """The engine goes out of scope while its checkpoint is being written; what is waited for is the checkpoint."""
    recipe, stage = MIXTURE, 3
    engine = trained(recipe, stage, 1)
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
def test_two_engines_save_at_the_same_time(directory: str) -> None:
    recipe, stage = MIXTURE, 2
    engines = [make_engine(recipe, stage), make_engine(recipe, stage, seed=5)]
    slow = threading.Event()

    def wait(operation: str, path: Path) -> None:  # the ranks are at different places
        slow.wait(0.005 * (engines[0].rank + 1))

    with faults.hooked(wait):
        for round_ in range(3):
            for number, engine in enumerate(engines):
                train(engine, recipe, round_, round_ + 1)
                engine.save_checkpoint(f"{directory}/{number}", tag="last", async_save=True)
        for engine in engines:
            engine.wait_for_checkpoint()
    for number, engine in enumerate(engines):
        assert_reloads(facts(engine, recipe.states), f"{directory}/{number}", recipe, stage)


PROGRAM = """
import sys, time, torch, zerolite
from zerolite.checkpoint import filesystem
from zerolite.checkpoint.errors import CheckpointError

fails = True

def slow(operation, path):
    time.sleep(0.02)
    if fails and operation == "rename":
        raise OSError(28, "No space left on device", str(path))

def save(directory):
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine = zerolite.initialize(torch.nn.Linear(3, 3), config)
    engine.save_checkpoint(directory, async_save=True)

filesystem.before_operation = slow
save(sys.argv[1])
try:
    zerolite.destroy()
except CheckpointError as error:
    print("said", error)
fails = False
save(sys.argv[2])
"""


@pytest.mark.slow
def test_destroy_and_the_end_of_the_program_wait_for_a_save(tmp_path: Path) -> None:
    """The first save fails, which destroy says; the second one is complete though nothing waits for it."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "failed"), str(tmp_path / "saved")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "said" in done.stdout and "No space left" in done.stdout
    assert not (tmp_path / "failed" / "latest").exists()
    assert (tmp_path / "saved" / "latest").read_text().strip() == "global_step0"
    assert (tmp_path / "saved" / "global_step0" / "manifest.json").exists()
