"""Saving and loading at which time, and with which parameters whole."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.cases.recipes import BF16, RECIPES, Recipe, adapted
from tests.checkpoint.cases.resume import (
    assert_equal,
    assert_reloads,
    expect_words,
    facts,
    make_engine,
    message,
    own_seeds,
    train,
    trained,
)
from tests.toolkit import models
from tests.toolkit.faults import Warnings
from tests.toolkit.ranks import on_ranks
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.zero import GatheredParameters

MIXTURE = RECIPES["mixture"]


@pytest.mark.slow
@on_ranks(2)
def test_the_same_tag(directory: str) -> None:
    stage = 1
    recipe = MIXTURE
    engine = trained(recipe, stage, 1)
    engine.save_checkpoint(directory, tag="last", client_state={"epoch": 1})
    train(engine, recipe, 1, 3)
    engine.save_checkpoint(directory, tag="last", client_state={"epoch": 2})
    own = facts(engine, recipe.states)
    assert_reloads(own, directory, recipe, stage)
    assert engine.load_checkpoint(directory)[1] == {"epoch": 2}
    assert [entry for entry in os.listdir(directory) if entry != ".lock"] in (["last", "latest"], ["latest", "last"])


@pytest.mark.slow
@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 3])
def test_between_update_and_publish(directory: str, stage: int) -> None:
    recipe = MIXTURE
    engine = trained(recipe, stage, 2)
    engine.save_checkpoint(directory, tag="before")
    engine.backward(recipe.loss(engine, recipe.batch(2, 0)))
    engine.update()
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        expect_words(message(call, directory), "between engine.update() and engine.publish()", "engine.publish()")
    engine.publish()
    expect_words(message(engine.load_checkpoint, directory, tag="gone"), "'gone'")
    engine.save_checkpoint(directory, tag="published")  # gradients are used up already
    engine.zero_grad()
    assert_reloads(facts(engine, recipe.states), directory, recipe, stage, tag="published")


@pytest.mark.slow
@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_goes_back(directory: str, stage: int) -> None:
    """An engine goes back to where it was, from a later step and from the middle of one; and twice."""
    recipe = RECIPES["accumulation"]
    engine = make_engine(recipe, stage)
    own_seeds(engine.rank)
    train(engine, recipe, 0, 3)
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


@pytest.mark.slow
@on_ranks(2)
def test_in_gathered_parameters(directory: str) -> None:
    """Frozen and trained parameters are whole at the time."""
    stage = 3
    recipe = Recipe(adapted)
    engine = trained(recipe, stage, 2)
    own = facts(engine)
    with GatheredParameters(engine.module, check=False):
        engine.save_checkpoint(directory)
    assert_reloads(own, directory, recipe, stage)
    other = make_engine(recipe, stage, seed=5)
    with GatheredParameters(other.module, check=False):
        other.load_checkpoint(directory)
        found = {name: p.detach().clone() for name, p in other.module.named_parameters()}
    assert_equal(own["parameters"], found)
    assert_equal(own, facts(other))
    assert train(engine, recipe, 2, 4) == train(other, recipe, 2, 4)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_the_middle_of_an_accumulation(directory: str, stage: int) -> None:
    """A save is refused and changes nothing; it says how a loop that must end now can save."""
    for name in ("accumulation", "accumulation in the plain loop"):
        recipe = RECIPES[name]
        engine, other = make_engine(recipe, stage), make_engine(recipe, stage)
        for one in (engine, other):
            own_seeds(one.rank)
            train(one, recipe, 0, 4)
        for tag in ("first", "second"):
            with Warnings() as warnings:
                engine.save_checkpoint(f"{directory}/{name}", tag=tag, async_save=True)
            assert len(warnings.messages) == (engine.rank == 0), warnings.messages
            for said in warnings.messages:
                expect_words(said, "in the middle of a gradient accumulation", "holds no gradients", "returned True")
        engine.wait_for_checkpoint()
        saved = facts(engine)
        for one in (engine, other):
            own_seeds(one.rank)
        assert train(engine, recipe, 4, 6) == train(other, recipe, 4, 6)
        assert_equal(facts(engine), facts(other))
        assert_reloads(saved, f"{directory}/{name}", recipe, stage)
        for end in (lambda engine=engine: engine.step(flush=True), engine.zero_grad):
            train(engine, recipe, 0, 1)
            end()
            engine.save_checkpoint(f"{directory}/{name}", tag="now")
            own = facts(engine)
            assert_reloads(own, f"{directory}/{name}", recipe, stage, tag="now")
        del engine, other
        gc.collect()


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_between_backward_and_step(directory: str, stage: int) -> None:
    """All gradients of a step are there, and the step has not come yet; or they have been dropped."""
    recipe = MIXTURE
    engine = trained(recipe, stage, 1)
    engine.backward(recipe.loss(engine, recipe.batch(2, 0)))
    for name in ("there", "dropped"):
        engine.save_checkpoint(f"{directory}/{name}")
        assert_reloads(facts(engine), f"{directory}/{name}", recipe, stage)
        for parameter in engine.module.parameters():
            parameter.grad = None


class Odd(models.Mlp):
    """Has something that cannot be saved, or not as it is."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        if what == "complex128":
            self.register_buffer("odd", torch.zeros(3, dtype=torch.complex128))

    def get_extra_state(self) -> Any:
        return {"thing": object()} if self.what == "extra" else {}

    def set_extra_state(self, state: Any) -> None:
        """Nothing is kept."""


@on_ranks(2)
def test_what_cannot_be_saved_is_named(directory: str) -> None:
    """Objects that a checkpoint cannot hold are named, on all ranks."""
    stage = 3
    for what, words in (
        ("complex128", ["CheckpointError", "odd", "complex128"]),
        ("extra", ["thing", "object"]),
        ("group", ["groups", "function"]),
    ):
        engine = make_engine(Recipe(lambda what=what: Odd(what)), stage)
        if what == "group":
            engine.optimizer.param_groups[0]["rule"] = lambda: 0
        expect_words(message(engine.save_checkpoint, f"{directory}/{what}"), *words)
        train(engine, Recipe(), 0, 1)
        del engine
        gc.collect()


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_values_that_the_user_has_written(directory: str, stage: int) -> None:
    """Values that the user has put into the parameters are saved; those put there before a load are gone."""
    recipe = replace(MIXTURE, config=BF16)
    engine = trained(recipe, stage, 1)
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
        engine.module.last.weight.fill_(0.5)
    engine.load_full_state_dict({"gain": torch.tensor(3.0)}, strict=False)
    path = engine.save_checkpoint(directory)
    own = facts(engine)
    assert_equal(own["masters"]["last.weight"], torch.full((3, 13), 0.5))
    assert_equal(own["masters"]["gain"], torch.tensor(3.0))
    assert_equal(CheckpointReader(Path(path)).read("parameters/last.weight"), torch.full((3, 13), 0.5))
    assert_reloads(own, directory, recipe, stage)
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
        engine.module.last.weight.fill_(7.0)
    engine.load_full_state_dict({"gain": torch.tensor(9.0)}, strict=False)
    engine.load_checkpoint(directory)
    assert_equal(own, facts(engine))
    train(engine, recipe, 1, 2)
    other = make_engine(recipe, stage, seed=5)
    other.load_checkpoint(directory)
    train(other, recipe, 1, 2)
    assert_equal(facts(other), facts(engine))


@pytest.mark.slow
@on_ranks(2)
def test_in_inference_mode(directory: str) -> None:
    """Called from within an evaluation."""
    stage = 2
    for name in ("mixture", "NAdam"):
        recipe = RECIPES[name]
        engine = trained(recipe, stage, 1)
        with torch.inference_mode():
            engine.save_checkpoint(f"{directory}/{name}", async_save=True)
        own = facts(engine, recipe.states)
        losses = train(engine, recipe, 1, 2)
        engine.save_checkpoint(f"{directory}/{name}", tag="later", async_save=True)
        engine.wait_for_checkpoint()
        other = make_engine(recipe, 3 - stage, seed=5)
        with torch.inference_mode():
            other.load_checkpoint(f"{directory}/{name}", tag="global_step1")
        assert_equal(own, facts(other, recipe.states))
        assert train(other, recipe, 1, 2) == losses
        assert_equal(facts(engine, recipe.states), facts(other, recipe.states))
