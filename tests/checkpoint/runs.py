"""Engines of the recipes: how they train, all that a checkpoint must bring back, and what is said."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zerolite
from tests.checkpoint.recipes import ZERO, Recipe, share
from tests.toolkit import models
from tests.toolkit.training import raised
from zerolite.checkpoint.state import clean
from zerolite.zero import GatheredParameters

ADAM = ("exp_avg", "exp_avg_sq", "step")


def make_engine(recipe: Recipe, stage: int, seed: int | None = None, **more: Any) -> Any:
    """Make an engine, and seed this rank. seed: of other weights and random numbers than the recipe's; None keeps
    those."""
    model = models.build(recipe.model)
    if seed is not None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.copy_(torch.randn(tensor.shape) if tensor.is_floating_point() else torch.tensor(seed))
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": recipe.micros}
    zero = {"stage": stage, **ZERO, **more.pop("zero", {})}
    config = {**sizes, "zero_optimization": zero, "steps_per_print": 1_000_000, **recipe.config, **more}
    if recipe.optimizer is not None:
        config["optimizer"] = {"type": recipe.optimizer[0], "params": recipe.optimizer[1]}
    engine = zerolite.initialize(model, config, **recipe.engine(model))
    own_seeds(engine.rank, 0 if seed is None else 1000)
    return engine


def train(engine: Any, recipe: Recipe, start: int, end: int) -> list[tuple[float, int]]:
    """The micro-batches from ``start`` up to ``end``, counted from the beginning of the run. Returns loss and rows of
    each, of this rank's share."""
    result = []
    for position in range(start, end):
        step, micro = divmod(position, recipe.micros)
        if not micro:
            recipe.change(engine, step)
        batch = share(recipe.batch(step, micro), engine.rank, engine.world_size)
        loss = recipe.loss(engine, batch)
        if recipe.plain_loop:
            (loss / recipe.micros).backward()
            if micro == recipe.micros - 1:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
        else:
            engine.backward(loss, **({"weight": len(batch[0])} if recipe.weighted else {}))
            engine.step()
        result.append((float(loss.detach()), len(batch[0])))
    return result


def facts(engine: Any, states: tuple[str, ...] = ADAM) -> dict[str, Any]:
    """Everything of an engine that a checkpoint must bring back, whole. Called on all ranks."""
    trained = engine._access.positions()
    named = {clean(name): p for name, p in engine.module.named_parameters() if id(p) in trained}
    parameters = list(named.values())
    result: dict[str, Any] = {"masters": dict(zip(named, zerolite.get_full_master(parameters), strict=True))}
    for state in states:
        result[state] = {}
        for dtype in {p.dtype for p in parameters}:
            names = [name for name, p in named.items() if p.dtype == dtype]
            values = zerolite.get_full_optimizer_state([named[name] for name in names], state)
            result[state] |= {name: value for name, value in zip(names, values, strict=True) if value is not None}
    with GatheredParameters(engine.module, check=False):
        result["parameters"] = {clean(n): p.detach().clone() for n, p in engine.module.named_parameters()}
    result["buffers"] = {clean(n): b.clone() for n, b in engine.module.named_buffers() if n != "scratch"}
    result["extra"] = [module.counts for module in engine.module.modules() if hasattr(module, "counts")]
    scheduler = engine.lr_scheduler
    plain = None if scheduler is None else scheduler.state_dict()
    result["lr_scheduler"] = repr(plain and {k: v for k, v in plain.items() if k != "_schedulers"})
    counters = ("global_steps", "skipped_steps", "micro_steps", "loss_scale")
    result["counters"] = {name: getattr(engine, name) for name in counters}
    result["groups"] = [
        {key: value for key, value in group.items() if key not in ("params", "foreach", "fused")}
        for group in engine.optimizer.param_groups
    ]
    return result


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return where two results of :func:`facts` differ: in bits, dtypes or keys."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = [f"{where}/{key}: only one has it" for key in one.keys() ^ other.keys()]
        return found + [
            text for key in one.keys() & other.keys() for text in differences(one[key], other[key], f"{where}/{key}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [t for i, pair in enumerate(zip(one, other, strict=True)) for t in differences(*pair, f"{where}/{i}")]
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    else:
        same = repr(one) == repr(other)  # of numbers: NaN is NaN
    return [] if same else [f"{where}: {one!r:.200} and {other!r:.200}"]


def own_seeds(rank: int, first: int = 0) -> None:
    import numpy

    torch.manual_seed(first + rank)
    random.seed(first + 10 + rank)
    numpy.random.seed(first + 20 + rank)


def keep(directory: str | Path, **wanted: Any) -> None:
    """Write what a load of the checkpoint in ``directory`` is compared with."""
    if dist.get_rank() == 0:
        torch.save(wanted, f"{directory}.wanted")
    dist.barrier()


def kept(directory: str | Path) -> dict[str, Any]:
    return torch.load(f"{directory}.wanted", weights_only=False)


def tags_in(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name not in (".lock", "latest"))


def on_rank_0(engine: Any, action: Callable[[], Any]) -> None:
    """All ranks wait before it and after it."""
    engine.reduce(0)
    if engine.rank == 0:
        action()
    engine.reduce(0)


def trained(recipe: Recipe, stage: int, steps: int = 2, **more: Any) -> Any:
    engine = make_engine(recipe, stage, **more)
    train(engine, recipe, 0, steps * recipe.micros)
    return engine


def saved_by(directory: str, recipe: Recipe, stage: int, **arguments: Any) -> dict[str, Any]:
    """Save a trained engine, and tell what it is."""
    engine = trained(recipe, stage)
    engine.save_checkpoint(directory, **arguments)
    return facts(engine, recipe.states)


def into(directory: str, recipe: Recipe, stage: int, **arguments: Any) -> tuple[Any, str]:
    """Load into an engine of other weights. Returns it, and what was raised."""
    engine = make_engine(recipe, stage, seed=5)
    return engine, raised(engine.load_checkpoint, directory, **arguments)


def loaded(directory: str, recipe: Recipe, stage: int, **arguments: Any) -> Any:
    """An engine of other weights, which has loaded."""
    engine, said = into(directory, recipe, stage, **arguments)
    assert said == "", said
    return engine


def states(found: dict[str, Any]) -> dict[str, Any]:
    return {kind: found[kind] for kind in ("masters", *ADAM)}


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    found = differences(one, other, where)
    assert found == [], found


def assert_reloads(wanted: dict[str, Any], directory: str, recipe: Recipe, stage: int, **arguments: Any) -> None:
    """An engine of other weights, at another stage than the one that has saved at ``stage``, loads what is wanted."""
    assert_equal(wanted, facts(loaded(directory, recipe, 3 - stage, **arguments), recipe.states))
