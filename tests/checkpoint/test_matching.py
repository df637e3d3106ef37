"""Checkpoints that are loaded into something else than what they were saved from, or in part; and what is refused."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.recipes import BF16, FP16, RECIPES, Recipe, adapted, by, mlp_with, scheduler, three_groups
from tests.checkpoint.runs import assert_equal, facts, into, loaded, saved_by, states, train, trained
from tests.toolkit import models
from tests.toolkit.configs import SGD
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import expect_words, raised
from zerolite.checkpoint.matching import match_groups
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.checkpoint.state import GroupState


def reversed_groups(model: nn.Module) -> dict[str, Any]:
    return {"model_parameters": [*reversed(three_groups(model)["model_parameters"])]}


DECAYING = by(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step))
WARMUP = scheduler("WarmupDecayLR", warmup_num_steps=3, total_num_steps=9)
SCHEDULES: dict[str, tuple[int, dict[str, Any], Callable[[nn.Module], Any]]] = {  # stage, of the config, of the engine
    "LambdaLR": (3, {}, DECAYING),
    "SequentialLR": (1, {}, RECIPES["SequentialLR"].engine),
    "WarmupDecayLR": (2, WARMUP, lambda model: {}),
}


@on_ranks(2)
@pytest.mark.fast("LambdaLR-*")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_param_groups_in_another_order(directory: str, schedule: str) -> None:
    """Their hyperparameters and schedule follow their parameters."""
    stage, config, extra = SCHEDULES[schedule]
    straight, turned = (
        Recipe(RECIPES["mixture"].model, config=config, engine=lambda model, of=of: {**of(model), **extra(model)})
        for of in (three_groups, reversed_groups)
    )
    source = trained(straight, stage)
    source.save_checkpoint(directory)
    target = loaded(directory, turned, stage)
    for _ in range(2):
        one, other = facts(source), facts(target)
        other["groups"].reverse()
        del one["lr_scheduler"], other["lr_scheduler"]
        assert_equal(one, other)
        losses = [train(engine, recipe, 2, 4) for engine, recipe in ((source, straight), (target, turned))]
        assert losses[0] == losses[1]


@on_ranks(2)
def test_param_groups_of_other_parameters(directory: str) -> None:
    """Groups of other parameters keep what they have; a schedule with values for each is refused, if asked for."""
    recipe, stage = Recipe(engine=three_groups), 1
    own = saved_by(directory, recipe, stage)
    one_group = replace(recipe, engine=lambda model: {}, optimizer=("AdamW", {"lr": 0.5}))
    engine = loaded(directory, one_group, stage)
    found = facts(engine)
    assert_equal(states(own), states(found))
    assert engine.get_lr() == [0.5]
    both = Recipe(engine=lambda model: {**three_groups(model), **DECAYING(model)})
    saved_by(directory, both, stage, tag="schedule")
    engine, said = into(directory, replace(both, engine=DECAYING), stage, tag="schedule")
    expect_words(said, "CheckpointError", "3 param groups", "load_lr_scheduler_states=False")
    assert raised(engine.load_checkpoint, directory, tag="schedule", load_lr_scheduler_states=False) == ""


def wrapped() -> nn.Module:
    """Wrapper with peft's names: ``base_model.model.…``."""
    return nn.Sequential(OrderedDict(base_model=nn.Sequential(OrderedDict(model=adapted()))))


PLAIN, ADAPTED, WRAPPED = Recipe(), Recipe(adapted), Recipe(wrapped)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", ["added", "dropped", "around everything"])
def test_an_adapter_is_added_or_dropped(directory: str, stage: int, how: str) -> None:
    """Refused if not asked for. What the adapter is put around is found by its name without it."""
    source, target, name, words = {
        "added": (PLAIN, ADAPTED, "{}.base_layer.{}", ["first.base_layer.weight", "first.weight"]),
        "dropped": (ADAPTED, PLAIN, "{}.{}", ["lora_A"]),
        "around everything": (PLAIN, WRAPPED, "base_model.model.{}.base_layer.{}", ["base_model.model.first"]),
    }[how]
    own = saved_by(directory, source, stage)["parameters"]
    engine, said = into(directory, target, stage)
    expect_words(said, "CheckpointError", "load_module_strict=False", "Nothing was loaded", *words)
    before = facts(engine)
    engine.load_checkpoint(directory, load_module_strict=False)
    after = facts(engine)
    for layer, kind in itertools.product(("first", "second"), ("weight", "bias")):
        there = f"{layer}.base_layer.{kind}" if how == "dropped" else f"{layer}.{kind}"
        assert_equal(own[there], after["parameters"][name.format(layer, kind)])
    lora = {name: tensor for name, tensor in before["masters"].items() if "lora" in name}
    assert bool(lora) == (how != "dropped")
    assert_equal(lora, {name: after["masters"][name] for name in lora})
    assert after["counters"]["global_steps"] == 2 and not after["exp_avg"]
    train(engine, target, 2, 4)


@on_ranks(2)
@pytest.mark.parametrize(("stage", "other"), [(3, 3), (1, 3)])
def test_frozen_parameters_are_left_out(directory: str, stage: int, other: int) -> None:
    """Only what trains is saved, and that goes into a model whose frozen part stays as it is."""
    recipe = RECIPES["adapters"]
    own = saved_by(directory, recipe, stage, exclude_frozen_parameters=True)
    reader = CheckpointReader(Path(directory) / "global_step2")
    assert reader.manifest.about.exclude_frozen_parameters
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
    ("AdamW", RECIPES["amsgrad"], {}, ["amsgrad=False", NEW_STATES]),
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


def test_groups_of_frozen_parameters_match_by_place() -> None:
    stored = [GroupState(names=names, values={}) for names in (["a"], ["frozen"], [])]
    assert match_groups([["a"], ["frozen"], []], stored, {"a": "a"}) == [0, 1, 2]
    assert match_groups([["frozen"], ["a"]], stored, {"a": "a"}) == [None, 0]
