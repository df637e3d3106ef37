"""Checkpoints that are loaded into something else than what they were saved from, or in part; and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.recipes import BF16, FP16, RECIPES, Recipe, by, mlp_with, three_groups
from tests.checkpoint.runs import assert_equal, facts, loaded, saved_by, states, train, trained
from tests.toolkit import models
from tests.toolkit.configs import SGD
from tests.toolkit.faults import Warnings
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import expect_words, raised
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.matching import check_groups
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.checkpoint.state import GroupState


def reversed_groups(model: nn.Module) -> dict[str, Any]:
    return {"model_parameters": [*reversed(three_groups(model)["model_parameters"])]}


DECAYING = by(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step))


OTHER_GROUPS: dict[str, Callable[[nn.Module], Any]] = {"order": reversed_groups, "number": lambda model: {}}

PLACES = {"order": "first.weight (group 0 there, 2 here)", "number": "first.bias (group 1 there, 0 here)"}


@on_ranks(2)
@pytest.mark.parametrize("other", OTHER_GROUPS)
def test_other_param_groups_are_refused(directory: str, other: str) -> None:
    """Values and schedules belong to groups by their place, so they are loaded into the same groups alone."""
    make = lambda of: Recipe(engine=lambda model: {**of(model), **DECAYING(model)}, optimizer=ADAM)  # noqa: E731
    own = saved_by(directory, make(three_groups), 1)
    engine = trained(make(OTHER_GROUPS[other]), 1, 1, seed=5)
    before = copy.deepcopy(facts(engine))
    for arguments in ({}, {"load_optimizer_states": False}, {"load_lr_scheduler_states": False}):
        said = raised(engine.load_checkpoint, directory, **arguments)
        expect_words(said, "CheckpointError", "expected the 3 param groups", PLACES[other])
        expect_words(said, "Nothing was loaded", NEW_STATES, NEW_SCHEDULE)
        assert_equal(before, facts(engine), f"{arguments}")
    engine.load_checkpoint(directory, load_optimizer_states=False, load_lr_scheduler_states=False)
    found = facts(engine)
    assert_equal(own["masters"], found["masters"])
    assert_equal(before["groups"], found["groups"])


ADAM = ("AdamW", {"lr": 1e-3})
PLAIN = Recipe()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("turned", [False, True], ids=["added", "dropped"])
def test_what_both_have_is_loaded_on_request(directory: str, stage: int, turned: bool) -> None:
    """The rest keeps its values and has no states; the log names it."""
    source, target = (DEEPER, PLAIN) if turned else (PLAIN, DEEPER)
    own = saved_by(directory, source, stage)
    engine = trained(target, stage, 1, seed=5)
    before = facts(engine)
    with Warnings() as warnings:
        engine.load_checkpoint(directory, load_module_strict=False)
    after = facts(engine)
    for kind in states(own):
        for name, value in after[kind].items():
            assert_equal(own[kind][name] if name in own[kind] else before[kind][name], value, f"{kind} {name}")
    assert [(lost in said) for said in warnings.messages for lost in ("third.weight",)] == [True] * (engine.rank == 0)
    assert after["counters"]["global_steps"] == 2 and set(after["exp_avg"]) == set(own["masters"]) & set(
        after["masters"]
    )
    train(engine, target, 2, 4)


@on_ranks(2)
@pytest.mark.parametrize(("stage", "other"), [(3, 3), (1, 3)])
def test_frozen_parameters_are_left_out(directory: str, stage: int, other: int) -> None:
    """Only what trains is saved, and that goes into a model whose frozen part stays as it is."""
    recipe = RECIPES["adapters"]
    own = saved_by(directory, recipe, stage, exclude_frozen_parameters=True)
    reader = CheckpointReader(Path(directory) / "global_step2")
    assert reader.manifest.exclude_frozen_parameters
    kept = {key for key in reader.tensors if key.startswith("parameters/")}
    assert kept == {f"parameters/{name}" for name in own["masters"]}, kept
    engine = trained(recipe, other, 0, seed=5)
    frozen = {n: p for n, p in facts(engine, ())["parameters"].items() if "base_layer" in n}
    engine.load_checkpoint(directory)
    after = facts(engine)
    assert_equal(states(own), states(after))
    assert_equal(frozen, {name: after["parameters"][name] for name in frozen})
    assert all("base_layer" in name for name in frozen) and frozen


@pytest.mark.slow
@on_ranks(2)
def test_compiled_modules_have_the_names_inside(directory: str) -> None:
    """torch.compile puts a wrapper around a module, or the whole model: names are those inside."""
    stage = 3

    def inside() -> nn.Module:
        model = models.build(models.PrimeMlp)
        model.hidden = torch.compile(model.hidden, backend="eager")
        return model

    plain = Recipe(models.PrimeMlp)
    variants = [inside, lambda: torch.compile(models.build(models.PrimeMlp), backend="eager")]
    own = saved_by(f"{directory}/plain", plain, stage)
    for number, make in enumerate(variants):
        engine = loaded(f"{directory}/plain", replace(plain, model=make), stage)
        assert_equal(own, facts(engine))
        engine.save_checkpoint(f"{directory}/{number}")
        assert_equal(own, facts(loaded(f"{directory}/{number}", plain, stage)))


def untied() -> nn.Module:
    model = RECIPES["mixture"].model()
    model.again.weight = nn.Parameter(torch.randn(13, 13))
    return model


def turned() -> nn.Module:
    """The other name of the tied weight comes first."""
    model = RECIPES["mixture"].model()
    model._modules = {"again": model.again, **model._modules}
    return model


@on_ranks(2)
def test_weights_that_are_tied_elsewhere(directory: str) -> None:
    """A tied weight goes into two that are not, and is found by any of its names."""
    tied = replace(RECIPES["mixture"], engine=lambda model: {})
    own = saved_by(directory, tied, 3)
    after = facts(loaded(directory, replace(tied, model=untied), 3))
    for kind in states(own):
        assert set(after[kind]) == set(own[kind]) | {"again.weight"}
        assert_equal(own[kind]["tied.weight"], after[kind]["again.weight"], kind)
    after = facts(loaded(directory, replace(tied, model=turned), 3))
    for kind in states(own):
        assert_equal(own[kind].pop("tied.weight"), after[kind].pop("again.weight"), kind)
        assert_equal(own[kind], after[kind])


MODULES = {**BF16, "fp32_modules": ["tied", "again", "last"]}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": BF16, "fp16": FP16, "fp32 modules": MODULES}


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize(
    ("source", "target", "stage"),
    [("bf16", "fp32", 0), ("fp32", "bf16", 3), ("fp16", "bf16", 1), ("bf16", "fp16", 2), ("fp32 modules", "bf16", 3)],
)
def test_masters_and_states_go_into_other_precisions(directory: str, stage: int, source: str, target: str) -> None:
    """Master weights and states are equal to the bit; what computes is rounded from them."""
    recipe = replace(RECIPES["mixture"], config=PRECISIONS[source])
    own = saved_by(directory, recipe, stage)
    engine = loaded(directory, replace(recipe, config=PRECISIONS[target]), 3 - stage)
    after = facts(engine)
    assert_equal(states(own), states(after))
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


@pytest.mark.slow
@on_ranks(2)
def test_parts_that_are_not_asked_for(directory: str) -> None:
    stage = 3
    engine = lambda model: {**three_groups(model), **DECAYING(model)}  # noqa: E731
    recipe = replace(RECIPES["mixture"], config={}, engine=engine)
    own = saved_by(directory, recipe, stage)
    here = replace(recipe, optimizer=("AdamW", {"lr": 1e-3, "betas": [0.5, 0.6], "weight_decay": 0.3}))
    model = ("masters", "parameters", "buffers")
    for arguments, parts in (
        ({}, (*model, *recipe.states, "groups", "lr_scheduler", "counters")),
        ({"load_optimizer_states": False}, (*model, "lr_scheduler", "counters")),
        ({"load_lr_scheduler_states": False}, (*model, *recipe.states, "groups", "counters")),
        ({"load_optimizer_states": False, "load_lr_scheduler_states": False}, (*model, "counters")),
        ({"load_module_only": True}, model),
    ):
        engine = trained(here, stage, 1, seed=5)
        before = facts(engine)
        state = torch.get_rng_state()
        engine.load_checkpoint(directory, **arguments)
        assert torch.equal(state, torch.get_rng_state()) == bool(arguments.get("load_module_only"))
        after = facts(engine)
        for key in own:
            expected = own[key] if key in parts else before[key]
            if key == "groups":
                scheduled = ("lr", "initial_lr", "betas")  # a schedule that begins anew keeps what it sets
                source, names = (before, scheduled) if "lr_scheduler" not in parts else (own, ("lr", "initial_lr"))
                groups = zip(expected, source[key], strict=True)
                expected = [{**group, **{name: other[name] for name in names}} for group, other in groups]
            assert_equal(expected, after[key], f"{arguments} {key}")


WIDER = Recipe(lambda: mlp_with(first=nn.Linear(7, 15), second=nn.Linear(15, 3)))
DEEPER, COUNTING = Recipe(lambda: mlp_with(third=nn.Linear(3, 3))), Recipe(lambda: mlp_with(counted=torch.zeros(2)))
SOURCES = {
    "mlp": PLAIN, "deeper": DEEPER, "counting": COUNTING, "AdamW": RECIPES["groups"],
    **{name: RECIPES[name] for name in ("amsgrad", "NAdam", "LambdaLR")},
}  # fmt: skip
WIDTHS = "'first.weight' is (15, 7) here and (13, 7) there"
NEW_STATES, NEW_SCHEDULE = "load_optimizer_states=False", "load_lr_scheduler_states=False"
MISFITS: list[tuple[str, Recipe, dict[str, Any], list[str]]] = [
    ("mlp", WIDER, {}, ["another model", WIDTHS]),
    ("mlp", WIDER, {"load_module_strict": False}, [WIDTHS]),
    ("mlp", WIDER, {"load_module_only": True}, [WIDTHS]),
    ("mlp", DEEPER, {}, ["no parameter third.weight, third.bias", "strict=False"]),
    ("mlp", COUNTING, {}, ["it has no buffer counted", "strict=False"]),
    ("counting", PLAIN, {}, ["the model has no buffer counted", "strict=False"]),
    ("deeper", PLAIN, {}, ["model has no parameter third.weight, third.bias", "strict=False"]),
    ("mlp", Recipe(optimizer=SGD, states=()), {}, ["of AdamW", "SGD", NEW_STATES]),
    ("amsgrad", PLAIN, {}, ["max_exp_avg_sq", "of AdamW", NEW_STATES]),
    ("AdamW", RECIPES["amsgrad"], {}, ["expected the 3 param groups", NEW_STATES]),
    ("NAdam", RECIPES["RMSprop"], {}, ["of NAdam", "RMSprop", NEW_STATES]),
    ("LambdaLR", RECIPES["CosineAnnealingLR"], {}, ["LambdaLR", "CosineAnnealingLR", NEW_SCHEDULE]),
]


@on_ranks(2)
@pytest.mark.fast("AdamW-2")
@pytest.mark.parametrize("source", SOURCES)
def test_what_does_not_fit_is_refused(directory: str, source: str) -> None:
    """All ranks raise, and nothing is changed."""
    stage = 1
    saved_by(directory, SOURCES[source], stage)
    for recipe, arguments, words in (case for name, *case in MISFITS if name == source):
        names = tuple(state for state in recipe.states if state != "momentum_buffer")
        engine = trained(recipe, stage, 1, seed=5)
        before, random = copy.deepcopy(facts(engine, names)), torch.get_rng_state()
        said = raised(engine.load_checkpoint, directory, **arguments)
        expect_words(said, "CheckpointError", "Nothing was loaded", *words)
        assert_equal(before, facts(engine, names), f"{arguments}")
        assert torch.equal(random, torch.get_rng_state())
        train(engine, recipe, 1, 2)


@on_ranks(2)
def test_a_buffer_whose_elements_share_memory_is_refused(directory: str) -> None:
    """Before anything is loaded: a copy into it would raise in the middle."""
    saved_by(directory, COUNTING, 1)
    engine = trained(COUNTING, 1, 1, seed=5)
    engine.module.counted = torch.zeros(1).expand(2)
    before = copy.deepcopy(facts(engine))
    said = raised(engine.load_checkpoint, directory)
    expect_words(said, "CheckpointError", "buffer 'counted': expected memory for each element", "a contiguous copy")
    assert_equal(before, facts(engine))
    engine.module.counted = torch.zeros(2)
    engine.load_checkpoint(directory)


@on_ranks(2)
@pytest.mark.fast("3-2")
@pytest.mark.parametrize("stage", [3, 1])
def test_a_checkpoint_without_states(directory: str, stage: int) -> None:
    """The engine is as if it had never been updated."""
    recipe = RECIPES["mixture"]
    engine = trained(recipe, stage, 0)
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
def test_states_go_into_another_implementation_and_back(directory: str) -> None:
    stage = 3
    recipes = [Recipe(optimizer=("AdamW", {"lr": 1e-3, "weight_decay": 0.1, **own})) for own in IMPLEMENTATIONS]
    for number, source in enumerate(recipes):
        own = saved_by(f"{directory}/{number}", source, stage)
        for target in recipes:
            other = loaded(f"{directory}/{number}", target, 3 - stage)
            assert_equal(states(own), states(facts(other)))
            train(other, target, 2, 4)
            assert facts(other)["step"]["first.weight"] == 4
            other.save_checkpoint(f"{directory}/again")


IMPLEMENTATIONS: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}]


def test_groups_are_compared_by_what_both_train() -> None:
    stored = [GroupState(names=names, values={}) for names in (["a"], ["frozen"], [])]
    check_groups([["a"], ["frozen"], []], stored, {"a": "a"})
    check_groups([["b"], [], ["frozen"]], stored, {"b": "a"})
    for other in ([["frozen"], ["a"], []], [["a"], ["frozen"]]):
        with pytest.raises(CheckpointError, match="expected the 3 param groups"):
            check_groups(other, stored, {"a": "a"})
