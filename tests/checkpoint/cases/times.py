"""Saving and loading at which time, and with which parameters whole."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.cases.calls import reloaded
from tests.checkpoint.cases.matching import ADAM, expect, expect_words, message, trained
from tests.checkpoint.cases.recipes import BF16, RECIPES, Recipe, adapted
from tests.checkpoint.cases.resume import differences, facts, make_engine, own_seeds, train
from tests.toolkit import models
from tests.toolkit.faults import Warnings
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.zero import GatheredParameters, Init

MIXTURE = RECIPES["mixture"]


def the_same_tag(directory: str, stage: int) -> None:
    recipe = MIXTURE
    engine = trained(recipe, stage, 1)
    engine.save_checkpoint(directory, tag="last", client_state={"epoch": 1})
    train(engine, recipe, 1, 3)
    engine.save_checkpoint(directory, tag="last", client_state={"epoch": 2})
    own = facts(engine, recipe.states)
    expect(differences(own, reloaded(directory, recipe, 3 - stage)))
    assert engine.load_checkpoint(directory)[1] == {"epoch": 2}
    assert [entry for entry in os.listdir(directory) if entry != ".lock"] in (["last", "latest"], ["latest", "last"])


def between_update_and_publish(directory: str, stage: int) -> None:
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
    own = facts(engine, recipe.states)
    found = reloaded(directory, recipe, 3 - stage, tag="published")
    expect(differences(own, found))


def older_and_twice(directory: str, stage: int) -> None:
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
        expect(differences(first[1], again[1]))
        train(engine, recipe, 9, 10)


def in_gathered_parameters(directory: str, stage: int) -> None:
    """Frozen and trained parameters are whole at the time."""
    recipe = Recipe(adapted)
    engine = trained(recipe, stage, 2)
    own = facts(engine, ADAM)
    with GatheredParameters(engine.module, check=False):
        engine.save_checkpoint(directory)
    expect(differences(own, reloaded(directory, recipe, 3 - stage)))
    other = make_engine(recipe, stage, seed=5)
    with GatheredParameters(other.module, check=False):
        other.load_checkpoint(directory)
        found = {name: p.detach().clone() for name, p in other.module.named_parameters()}
    expect(differences(own["parameters"], found))
    expect(differences(own, facts(other, ADAM)))
    assert train(engine, recipe, 2, 4) == train(other, recipe, 2, 4)


def persistent_and_frozen(directory: str, stage: int) -> None:
    """Frozen parameters that are kept whole, and such that are not."""
    recipe = Recipe(adapted)
    for threshold in (0, 20, 100_000):
        engine = make_engine(recipe, stage, zero={"stage3_param_persistence_threshold": threshold})
        train(engine, recipe, 0, 2)
        engine.save_checkpoint(f"{directory}/{threshold}")
        own = facts(engine, ADAM)
        for other in (0, 20, 100_000):
            engine = make_engine(recipe, stage, seed=5, zero={"stage3_param_persistence_threshold": other})
            engine.load_checkpoint(f"{directory}/{threshold}")
            expect(differences(own, facts(engine, ADAM)))
            batch = models.float_batch(0, 0, 0)
            with torch.no_grad():
                output = engine(batch[0])
            expected = make_engine(recipe, 0)
            expected.load_checkpoint(f"{directory}/{threshold}")
            with torch.no_grad():
                expect(differences(expected(batch[0]), output))
            del engine, expected
            gc.collect()


def initialised_in_parts(directory: str, stage: int) -> None:
    """zero.Init partitions a model as it is made."""
    recipe = RECIPES["tied tokens"]
    engine = trained(recipe, stage, 2)
    engine.save_checkpoint(directory)
    own = facts(engine, ADAM)
    with Init():
        model = models.build(models.OddModel, seed=99)
    within = make_engine(Recipe(lambda: model, recipe.loss, recipe.batch), 3)
    within.load_checkpoint(directory)
    expect(differences(own, facts(within, ADAM)))
    assert train(within, recipe, 2, 4) == train(engine, recipe, 2, 4)
    within.save_checkpoint(directory)
    expect(differences(facts(within, ADAM), reloaded(directory, recipe, stage)))


def in_the_middle_of_an_accumulation(directory: str, stage: int) -> None:
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
        saved = facts(engine, ADAM)
        for one in (engine, other):
            own_seeds(one.rank)
        assert train(engine, recipe, 4, 6) == train(other, recipe, 4, 6)
        expect(differences(facts(engine, ADAM), facts(other, ADAM)))
        expect(differences(saved, reloaded(f"{directory}/{name}", recipe, 3 - stage)))
        for end in (lambda engine=engine: engine.step(flush=True), engine.zero_grad):
            train(engine, recipe, 0, 1)
            end()
            engine.save_checkpoint(f"{directory}/{name}", tag="now")
            own = facts(engine, ADAM)
            expect(differences(own, reloaded(f"{directory}/{name}", recipe, 3 - stage, tag="now")))
        del engine, other
        gc.collect()


def between_backward_and_step(directory: str, stage: int) -> None:
    """All gradients of a step are there, and the step has not come yet; or they have been dropped."""
    recipe = MIXTURE
    engine = trained(recipe, stage, 1)
    engine.backward(recipe.loss(engine, recipe.batch(2, 0)))
    for name in ("there", "dropped"):
        engine.save_checkpoint(f"{directory}/{name}")
        expect(differences(facts(engine, ADAM), reloaded(f"{directory}/{name}", recipe, 3 - stage)))
        for parameter in engine.module.parameters():
            parameter.grad = None


class Odd(models.Mlp):
    """Has something that cannot be saved, or not as it is."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        if what == "complex128":
            self.register_buffer("odd", torch.zeros(3, dtype=torch.complex128))
        if what == "expanded":
            self.register_buffer("odd", torch.arange(3.0)[:, None].expand(3, 4))

    def get_extra_state(self) -> Any:
        return {"thing": object()} if self.what == "extra" else {}

    def set_extra_state(self, state: Any) -> None:
        """Nothing is kept."""


def odd_things(directory: str, stage: int) -> None:
    """Objects that a checkpoint cannot hold are named, on all ranks."""
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


def expanded_buffer(directory: str, stage: int) -> None:
    recipe = Recipe(lambda: Odd("expanded"))
    engine = trained(recipe, stage, 1)
    engine.save_checkpoint(directory)
    other = make_engine(recipe, stage)
    own = facts(engine, ADAM)
    before = facts(other, ADAM)
    said = message(other.load_checkpoint, directory)
    expect(differences(before if said else own, facts(other, ADAM)))
    if said:
        expect_words(said, "CheckpointError", "'odd'", "Nothing was loaded")


def written_before(directory: str, stage: int) -> None:
    """Values that the user has put into the parameters are saved; those put there before a load are gone."""
    recipe = replace(MIXTURE, config=BF16)
    engine = trained(recipe, stage, 1)
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
        engine.module.last.weight.fill_(0.5)
    engine.load_full_state_dict({"gain": torch.tensor(3.0)}, strict=False)
    path = engine.save_checkpoint(directory)
    own = facts(engine, ADAM)
    expect(differences(own["masters"]["last.weight"], torch.full((3, 13), 0.5)))
    expect(differences(own["masters"]["gain"], torch.tensor(3.0)))
    expect(differences(CheckpointReader(Path(path)).read("parameters/last.weight"), torch.full((3, 13), 0.5)))
    expect(differences(own, reloaded(directory, recipe, 3 - stage)))
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
        engine.module.last.weight.fill_(7.0)
    engine.load_full_state_dict({"gain": torch.tensor(9.0)}, strict=False)
    engine.load_checkpoint(directory)
    expect(differences(own, facts(engine, ADAM)))
    train(engine, recipe, 1, 2)
    other = make_engine(recipe, stage, seed=5)
    other.load_checkpoint(directory)
    train(other, recipe, 1, 2)
    expect(differences(facts(other, ADAM), facts(engine, ADAM)))


def in_inference_mode(directory: str, stage: int) -> None:
    """Called from within an evaluation."""
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
        expect(differences(own, facts(other, recipe.states)))
        assert train(other, recipe, 1, 2) == losses
        expect(differences(facts(engine, recipe.states), facts(other, recipe.states)))


def another_default_device(directory: str, stage: int) -> None:
    """Saving works where the user lets torch make tensors elsewhere by default."""
    recipe = MIXTURE
    engine = trained(recipe, stage, 1)
    client = {"tensor": torch.arange(3), "scalar": torch.tensor(1.5)}
    with torch.device("meta"):
        engine.save_checkpoint(directory, client_state=client)
    own = facts(engine, ADAM)
    other = make_engine(recipe, 3 - stage, seed=5)
    with torch.device("meta"):
        _, found = other.load_checkpoint(directory)
    expect(differences(client, found))
    expect(differences(own, facts(other, ADAM)))
