"""Other precisions, parts of a checkpoint, and what is refused."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.cases.recipes import BF16, FP16, RECIPES, Recipe, by, three_groups
from tests.checkpoint.cases.resume import (
    ADAM,
    assert_equal,
    expect_words,
    facts,
    into,
    make_engine,
    message,
    own_seeds,
    saved_by,
    scatter_seeds,
    train,
    trained,
)
from tests.toolkit import models
from tests.toolkit.configs import SGD
from tests.toolkit.ranks import on_ranks

# -------------------------------------------------------------------- other precisions

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "fp16": FP16,
    "fp32 modules": {**BF16, "fp32_modules": ["tied", "again", "last"]},
}


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize(
    ("source", "target", "stage"),
    [("bf16", "fp32", 0), ("fp32", "bf16", 3), ("fp16", "bf16", 1), ("bf16", "fp16", 2), ("fp32 modules", "bf16", 3)],
)
def test_other_precisions(directory: str, stage: int, source: str, target: str) -> None:
    """Master weights and states are equal to the bit; what computes is rounded from them."""
    recipe = replace(RECIPES["mixture"], config=PRECISIONS[source])
    own = saved_by(directory, recipe, stage)
    engine, said = into(directory, replace(recipe, config=PRECISIONS[target]), 3 - stage)
    assert said == ""
    after = facts(engine)
    for kind in ("masters", *ADAM):
        assert_equal(own[kind], after[kind], kind)
    for name, master in after["masters"].items():
        computes = after["parameters"][name]
        assert_equal(master.to(computes.dtype), computes, name)
    for name, buffer in after["buffers"].items():
        torch.testing.assert_close(buffer.float(), own["buffers"][name].float(), rtol=0.01, atol=0.01)
    counts = {name: value for name, value in own["counters"].items() if name != "loss_scale"}
    assert_equal(counts, {name: after["counters"][name] for name in counts})
    expected_scale = {"fp16": own["counters"]["loss_scale"] if source == "fp16" else 256.0}.get(target, 1.0)
    assert after["counters"]["loss_scale"] == expected_scale
    train(engine, replace(recipe, config=PRECISIONS[target]), 2, 4)


# -------------------------------------------------------------------- parts


HALVING = by(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step))


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_parts_that_are_not_asked_for(directory: str, stage: int) -> None:
    """Parts that are not asked for are left out."""
    engine = lambda model: {**three_groups(model), **HALVING(model)}  # noqa: E731
    recipe = replace(RECIPES["mixture"], config={}, engine=engine)
    own = saved_by(directory, recipe, stage)
    here = replace(recipe, optimizer=("AdamW", {"lr": 1e-3, "betas": [0.5, 0.6], "weight_decay": 0.3}))
    model = ("masters", "parameters", "buffers")
    for arguments, loaded in (
        ({}, (*model, *ADAM, "groups", "lr_scheduler", "counters")),
        ({"load_optimizer_states": False}, (*model, "lr_scheduler", "counters")),
        ({"load_lr_scheduler_states": False}, (*model, *ADAM, "groups", "counters")),
        ({"load_optimizer_states": False, "load_lr_scheduler_states": False}, (*model, "counters")),
        ({"load_module_only": True}, model),
    ):
        engine = trained(here, stage, 1, seed=5)
        before = facts(engine)
        scatter_seeds(engine.rank)
        state = torch.get_rng_state()
        engine.load_checkpoint(directory, **arguments)
        assert torch.equal(state, torch.get_rng_state()) == bool(arguments.get("load_module_only"))
        after = facts(engine)
        for key in own:
            expected = own[key] if key in loaded else before[key]
            if key == "groups":
                scheduled = ("lr", "initial_lr", "betas")  # a schedule that begins anew keeps what it sets
                source, names = (before, scheduled) if "lr_scheduler" not in loaded else (own, ("lr", "initial_lr"))
                groups = zip(expected, source[key], strict=True)
                expected = [{**group, **{name: other[name] for name in names}} for group, other in groups]
            assert_equal(expected, after[key], f"{arguments} {key}")
        del engine
        gc.collect()


# -------------------------------------------------------------------- refusals


class Wider(models.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 15), nn.Linear(15, 3)


class Deeper(models.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(3, 3)


class Counting(models.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counted", torch.zeros(2))


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_does_not_fit_is_refused(directory: str, stage: int) -> None:
    """A checkpoint that does not fit is refused on all ranks, and nothing is changed."""
    saved_by(f"{directory}/mlp", Recipe(), stage)
    saved_by(f"{directory}/deeper", Recipe(lambda: models.build(Deeper)), stage)
    saved_by(f"{directory}/counting", Recipe(lambda: models.build(Counting)), stage)
    saved_by(f"{directory}/amsgrad", RECIPES["amsgrad"], stage)
    saved_by(f"{directory}/nadam", RECIPES["NAdam"], stage)
    saved_by(f"{directory}/lambda", RECIPES["LambdaLR"], stage)
    cases: list[tuple[str, Recipe, dict[str, Any], list[str]]] = [
        (
            "mlp",
            Recipe(lambda: models.build(Wider)),
            {},
            ["another model", "'first.weight' is (15, 7) here and (13, 7)"],
        ),
        (
            "mlp",
            Recipe(lambda: models.build(Wider)),
            {"load_module_strict": False},
            ["is (15, 7) here and (13, 7) there"],
        ),
        ("mlp", Recipe(lambda: models.build(Wider)), {"load_module_only": True}, ["is (15, 7) here and (13, 7) there"]),
        ("mlp", Recipe(lambda: models.build(Deeper)), {}, ["no parameter third.weight, third.bias", "strict=False"]),
        ("mlp", Recipe(lambda: models.build(Counting)), {}, ["it has no buffer counted", "strict=False"]),
        ("counting", Recipe(), {}, ["the model has no buffer counted", "strict=False"]),
        ("deeper", Recipe(), {}, ["model has no parameter third.weight, third.bias", "strict=False"]),
        ("mlp", Recipe(optimizer=SGD, states=()), {}, ["of AdamW", "SGD", "load_optimizer_states=False"]),
        ("amsgrad", Recipe(), {}, ["max_exp_avg_sq", "of AdamW", "load_optimizer_states=False"]),
        ("nadam", RECIPES["RMSprop"], {}, ["of NAdam", "RMSprop", "load_optimizer_states=False"]),
        (
            "lambda",
            RECIPES["CosineAnnealingLR"],
            {},
            ["LambdaLR", "CosineAnnealingLR", "load_lr_scheduler_states=False"],
        ),
    ]
    for name, recipe, arguments, words in cases:
        states = tuple(state for state in recipe.states if state != "momentum_buffer")
        engine = trained(recipe, stage, 1, seed=5)
        before = copy.deepcopy(facts(engine, states))
        random = torch.get_rng_state()
        said = message(engine.load_checkpoint, f"{directory}/{name}", **arguments)
        expect_words(said, "CheckpointError", "Nothing was loaded", *words)
        assert_equal(before, facts(engine, states), f"{name} {arguments}")
        assert torch.equal(random, torch.get_rng_state())
        train(engine, recipe, 1, 2)
        del engine
        gc.collect()


@on_ranks(2)
def test_amsgrad_needs_a_state_of_its_own(directory: str) -> None:
    """amsgrad needs a state that other runs do not have."""
    stage = 1
    saved_by(directory, RECIPES["groups"], stage)
    _, said = into(directory, RECIPES["amsgrad"], stage)
    expect_words(said, "CheckpointError", "amsgrad=False", "Nothing was loaded", "load_optimizer_states=False")


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_entries_that_both_have(directory: str, stage: int) -> None:
    """Entries that both models have are loaded, the rest stays."""
    own = saved_by(f"{directory}/mlp", Recipe(), stage)
    engine = trained(Recipe(lambda: models.build(Deeper)), stage, 1, seed=5)
    before = facts(engine)
    engine.load_checkpoint(f"{directory}/mlp", load_module_strict=False)
    after = facts(engine)
    new = {name for name in after["masters"] if name.startswith("third")}
    for key in ("masters", "parameters"):
        assert_equal({n: before[key][n] for n in new}, {n: after[key].pop(n) for n in new}, key)
        assert_equal(own[key], after[key], key)
    assert_equal(before["buffers"], after["buffers"])
    assert_equal(own["exp_avg"], after["exp_avg"])
    engine.save_checkpoint(f"{directory}/deeper")
    engine, said = into(f"{directory}/deeper", Recipe(), 3 - stage, load_module_strict=False)
    assert said == ""
    after = facts(engine)
    assert_equal({k: own[k] for k in ("masters", *ADAM)}, {k: after[k] for k in ("masters", *ADAM)})


@on_ranks(2)
@pytest.mark.fast("3-2")
@pytest.mark.parametrize("stage", [3, 1])
def test_a_checkpoint_without_states(directory: str, stage: int) -> None:
    """A checkpoint without states makes an engine as if it had never been updated."""
    recipe = RECIPES["mixture"]
    engine = make_engine(recipe, stage)
    own_seeds(engine.rank)
    engine.save_checkpoint(directory)
    first = facts(engine)
    losses = train(engine, recipe, 0, 3)
    last = facts(engine)
    other = trained(recipe, 3 - stage, 2, seed=5)
    assert facts(other)["exp_avg"]
    other.load_checkpoint(directory)
    assert_equal(first, facts(other))
    assert train(other, recipe, 0, 3) == losses
    assert_equal(last, facts(other))


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_another_implementation(directory: str, stage: int) -> None:
    """Our kernels' states go into torch's own implementations, and back."""
    names = ("AdamW", "AdamW, foreach", "AdamW, fused")
    recipes = {
        "AdamW": Recipe(),
        "AdamW, foreach": Recipe(optimizer=("AdamW", {"lr": 1e-3, "foreach": True, "weight_decay": 0.1})),
        "AdamW, fused": Recipe(optimizer=("AdamW", {"lr": 1e-3, "fused": True, "weight_decay": 0.1})),
    }
    for source in names:
        engine = trained(recipes[source], stage)
        engine.save_checkpoint(f"{directory}/{source}")
        own = facts(engine)
        for target in names:
            other, said = into(f"{directory}/{source}", recipes[target], 3 - stage)
            assert said == "", said
            found = facts(other)
            assert_equal({k: own[k] for k in ("masters", *ADAM)}, {k: found[k] for k in ("masters", *ADAM)})
            train(other, recipes[target], 2, 4)
            count = facts(other)["step"]["first.weight"]
            assert count == 4, (source, target, count)
            other.save_checkpoint(f"{directory}/again")
            del other
            gc.collect()
