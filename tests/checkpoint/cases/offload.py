"""Runs whose optimizer is offloaded, saved and loaded."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from tests.checkpoint.cases import resume
from tests.checkpoint.cases.recipes import RECIPES
from tests.checkpoint.cases.resume import differences, facts, make_engine, own_seeds, train
from tests.checkpoint.test_background import held_back
from tests.toolkit.memory import two_memories


def several(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run :func:`resume.several`; runs may be ``apart``."""
    results = []
    for run in runs:
        with two_memories() if run.pop("apart", False) else contextlib.nullcontext():
            results += resume.several([run])
    return results


def in_the_background(directory: str, name: str, stage: int, zero: dict[str, Any]) -> list[str]:
    """A save that writes nothing before training has gone on. Returns how what is loaded differs from the state at the
    call, and what comes then from what came in the run itself."""
    recipe = RECIPES[name]
    engine = make_engine(recipe, stage, zero=zero)
    own_seeds(engine.rank)
    at, end = resume.positions(recipe)
    train(engine, recipe, 0, at)
    at_the_call = facts(engine, recipe.states)
    with held_back() as event:
        path = engine.save_checkpoint(directory, async_save=True)
        losses = train(engine, recipe, at, end)
        after = facts(engine, recipe.states)
        assert not os.path.exists(path)
        event.set()
        engine.wait_for_checkpoint()
    del engine
    other = make_engine(recipe, stage, seed=5, zero=zero)
    other.load_checkpoint(directory)
    found = differences(at_the_call, facts(other, recipe.states))
    found += differences(losses, train(other, recipe, at, end))
    return found + differences(after, facts(other, recipe.states))


def not_in_the_background(directory: str, zero: dict[str, Any]) -> dict[str, Any]:
    """Two saves that are asked for in the background: whether they are there when the call returns; the bytes that were
    copied for them; and what was said."""
    recipe = RECIPES["mixture in bf16"]
    engine = make_engine(recipe, 2, zero=zero)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zerolite")
    logger.addHandler(handler)
    complete = []
    try:
        for step in range(2):
            train(engine, recipe, step, step + 1)
            complete.append(os.path.isdir(engine.save_checkpoint(directory, async_save=True)))
    finally:
        logger.removeHandler(handler)
    return {
        "complete": complete,
        "copied": engine.checkpointer._saver._staging.numel(),
        "warnings": [text for text in warnings if "async_save" in text],
    }


def models_of(directory: str, name: str, zeros: dict[str, dict[str, Any]], stage: int) -> dict[str, Any]:
    """With each of ``zeros``: the whole state dict, and what save_16bit_model writes."""
    recipe = RECIPES[name]
    results: dict[str, Any] = {}
    for key, zero in zeros.items():
        engine = make_engine(recipe, stage, zero=zero)
        train(engine, recipe, 0, 2)
        engine.save_checkpoint(os.path.join(directory, key, "checkpoints"))
        engine.save_16bit_model(os.path.join(directory, key, "model"))
        results[key] = engine.full_state_dict()
    return results
