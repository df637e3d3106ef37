"""Checkpoints that are loaded into something else than what they were saved from."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.cases.recipes import RECIPES, Mixture, Recipe, adapted, by, scheduler, three_groups
from tests.checkpoint.cases.resume import (
    ADAM,
    assert_equal,
    expect_words,
    facts,
    into,
    make_engine,
    message,
    saved_by,
    train,
    trained,
)
from tests.toolkit import models
from tests.toolkit.ranks import on_ranks
from zerolite.checkpoint.reader import CheckpointReader

# -------------------------------------------------------------------- other shapes of the same run


def reversed_groups(model: nn.Module) -> dict[str, Any]:
    return {"model_parameters": [*reversed(three_groups(model)["model_parameters"])]}


SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupDecayLR": {"config": scheduler("WarmupDecayLR", warmup_num_steps=3, total_num_steps=9)},
    "LambdaLR": {"engine": by(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step))},
    "OneCycleLR": {
        "engine": by(lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=9))
    },
    "SequentialLR": {"engine": RECIPES["SequentialLR"].engine},
}


@on_ranks(2)
@pytest.mark.fast("LambdaLR-*")
@pytest.mark.parametrize(("schedule", "stage"), [("LambdaLR", 3), ("SequentialLR", 1), ("WarmupDecayLR", 2)])
def test_param_groups_in_another_order(directory: str, stage: int, schedule: str) -> None:
    """The param groups come in another order: their hyperparameters and schedule follow their parameters."""
    own = SCHEDULES[schedule]
    extra = own.get("engine", lambda model: {})

    def with_groups(groups: Callable[[nn.Module], Any]) -> Recipe:
        engine = lambda model: {**groups(model), **extra(model)}  # noqa: E731
        return Recipe(model=RECIPES["mixture"].model, config=own.get("config", {}), engine=engine)

    straight, turned = with_groups(three_groups), with_groups(reversed_groups)
    source = trained(straight, stage)
    source.save_checkpoint(directory)
    target, said = into(directory, turned, stage)
    assert said == ""
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
    stage = 1
    recipe = Recipe(engine=three_groups)
    own = saved_by(directory, recipe, stage)
    one_group = replace(recipe, engine=lambda model: {}, optimizer=("AdamW", {"lr": 0.5}))
    engine, said = into(directory, one_group, stage)
    assert said == ""
    found = facts(engine)
    assert_equal({k: own[k] for k in ("masters", *ADAM)}, {k: found[k] for k in ("masters", *ADAM)})
    assert engine.get_lr() == [0.5]
    del engine
    schedule = by(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step))
    both = Recipe(engine=lambda model: {**three_groups(model), **schedule(model)})
    saved_by(directory, both, stage, tag="schedule")
    fewer = replace(both, engine=schedule)
    engine, said = into(directory, fewer, stage, tag="schedule")
    expect_words(said, "CheckpointError", "3 param groups", "load_lr_scheduler_states=False")
    assert message(engine.load_checkpoint, directory, tag="schedule", load_lr_scheduler_states=False) == ""


# -------------------------------------------------------------------- adapters and wrappers


class Wrapped(nn.Module):
    """Wrapper with peft's names: ``base_model.model.…``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_model.model(x)


PLAIN, ADAPTED, WRAPPED = Recipe(), Recipe(adapted), Recipe(lambda: Wrapped(adapted()))


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
    engine = make_engine(recipe, other, seed=5)
    frozen = {n: p for n, p in facts(engine, ())["parameters"].items() if "base_layer" in n}
    engine.load_checkpoint(directory)
    after = facts(engine)
    assert_equal({k: own[k] for k in ("masters", *ADAM)}, {k: after[k] for k in ("masters", *ADAM)})
    assert_equal(frozen, {name: after["parameters"][name] for name in frozen})
    assert all("base_layer" in name for name in frozen) and frozen


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_modules_have_the_names_inside(directory: str, stage: int) -> None:
    """torch.compile puts a wrapper around a module, or the whole model: names are those inside."""

    def inside() -> nn.Module:
        model = models.build(models.PrimeMlp)
        model.hidden = torch.compile(model.hidden, backend="eager")
        return model

    plain = Recipe(lambda: models.build(models.PrimeMlp))
    variants = [inside, lambda: torch.compile(models.build(models.PrimeMlp), backend="eager")]
    own = saved_by(f"{directory}/plain", plain, stage)
    for number, make in enumerate(variants):
        engine, said = into(f"{directory}/plain", replace(plain, model=make), stage)
        assert said == ""
        assert_equal(own, facts(engine))
        engine.save_checkpoint(f"{directory}/{number}")
        del engine
        engine, said = into(f"{directory}/{number}", plain, stage)
        assert said == ""
        assert_equal(own, facts(engine))
        del engine
        gc.collect()


class Untied(Mixture):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.again.weight = nn.Parameter(torch.randn(13, 13))


@on_ranks(2)
def test_weights_that_are_tied_elsewhere(directory: str) -> None:
    """A tied weight goes into two that are not, and is found by any of its names."""
    stage = 3
    tied = RECIPES["mixture"]
    own = saved_by(directory, replace(tied, engine=lambda model: {}), stage)
    loose = replace(tied, model=lambda: models.build(Untied), engine=lambda model: {})
    engine, said = into(directory, loose, stage)
    assert said == ""
    after = facts(engine)
    for kind in ("masters", *ADAM):
        assert set(after[kind]) == set(own[kind]) | {"again.weight"}
        assert_equal(own[kind]["tied.weight"], after[kind]["again.weight"], kind)

    class Turned(nn.Module):
        """The other name comes first."""

        def __init__(self) -> None:
            super().__init__()
            inner = Mixture(0.0)
            self.again, self.tied = inner.again, inner.tied
            for name, child in inner.named_children():
                setattr(self, name, child)
            for name, parameter in inner.named_parameters(recurse=False):
                setattr(self, name, parameter)
            for name, buffer in inner.named_buffers(recurse=False):
                self.register_buffer(name, buffer, persistent=name != "scratch")

        forward = Mixture.forward

    turned = replace(loose, model=lambda: models.build(Turned))
    engine, said = into(directory, turned, stage)
    assert said == ""
    after = facts(engine)
    for kind in ("masters", *ADAM):
        assert_equal(own[kind].pop("tied.weight"), after[kind].pop("again.weight"), kind)
        assert_equal(own[kind], after[kind])
