"""Ranks that part while they train, and updates that make weights non-finite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import zerolite
from tests import models
from tests.distributed.cases.lockstep import skipping_on_device
from tests.distributed.cases.skips import Warnings
from tests.distributed.cases.training import BATCHES, LOSSES, make_engine


def unread(function: str, **arguments: Any) -> Any:
    """``function`` of this module where the host does not wait for statistics, as on CUDA."""
    with skipping_on_device(True):
        return globals()[function](**arguments)


def train(engine: Any, steps: int = 1, first: int = 0) -> None:
    for step in range(first, first + steps):
        engine.backward(LOSSES["OddModel"](engine, BATCHES["OddModel"](step, 0, dist.get_rank())))
        engine.step()


def said(action: Callable[[], Any]) -> str:
    """The error of ``action``, "" if there is none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _lr(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 0.5


def _lr_in_a_tensor(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"].mul_(0.5)


def _betas(engine: Any) -> None:
    engine.optimizer.param_groups[0]["betas"] = (0.5, 0.95)


def _weight_decay(engine: Any) -> None:
    engine.optimizer.param_groups[0]["weight_decay"] = 0.25


def _plateau(engine: Any) -> None:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, factor=0.1, patience=0)
    for loss in (1.0, 2.0, 3.0):
        schedule.step(loss)


def _clip(engine: Any) -> None:
    engine._pipeline._max_norm = 0.25


def _steps(engine: Any) -> None:
    engine._pipeline.outcomes.counters.global_steps += 1


NUMBERS = {
    "lr": _lr,
    "tensor": _lr_in_a_tensor,
    "betas": _betas,
    "decay": _weight_decay,
    "plateau": _plateau,
    "clip": _clip,
    "steps": _steps,
}


def other_numbers(config: dict[str, Any], changes: list[str], save_dir: str | None = None) -> dict[str, list[str]]:
    """By change, which the last rank makes after two steps: the errors of the next steps up to the first, or of a save
    instead, and of a step after the change of a group has been taken back."""
    found = {}
    for change in changes:
        engine = make_engine(config)
        if change == "tensor":
            engine.optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
        train(engine, 2)
        before = [dict(group) for group in engine.optimizer.param_groups]
        before[0]["lr"] = float(before[0]["lr"])
        if dist.get_rank() == dist.get_world_size() - 1:
            NUMBERS[change](engine)
        if save_dir is not None:
            found[change] = [said(functools.partial(engine.save_checkpoint, f"{save_dir}/{change}"))]
            continue
        errors: list[str] = []
        while len(errors) < 3 and not (errors and errors[-1]):
            errors.append(said(functools.partial(train, engine, 1, 2 + len(errors))))
        for group, old in zip(engine.optimizer.param_groups, before, strict=True):
            group.update(old)
        if change not in ("clip", "steps"):
            errors.append(said(functools.partial(train, engine, 1, 5)))
        found[change] = errors
    return found


def alike(config: dict[str, Any], steps: int = 4) -> tuple[int, list[str]]:
    """Values that change alike on all ranks, also between clipping and the update, and on a loss that all share."""
    engine = make_engine(config)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, factor=0.5, patience=0)
    with Warnings() as warnings:
        for step in range(steps):
            engine.backward(LOSSES["OddModel"](engine, BATCHES["OddModel"](step, 0, dist.get_rank())))
            engine.clip_gradients(100.0)
            engine.optimizer.param_groups[0]["weight_decay"] = 0.01 * step
            engine.step()
            schedule.step(engine.reduce(float(dist.get_rank() + step)))
    return engine.global_steps, warnings.messages


def other_gathers(config: dict[str, Any]) -> list[str]:
    """The errors of five steps. In the third the last rank gathers another parameter than the rest, which a backend
    that compares nothing lets pass."""
    engine = make_engine(config)
    errors = []
    for step in range(5):
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            engine.coordinator.schedule.note_gather(1, 1)
        errors.append(said(functools.partial(train, engine, 1, step)))
    return errors


def between_clipping_and_update(config: dict[str, Any]) -> list[str]:
    """One rank changes its learning rate where the statistics have been exchanged already."""
    engine = make_engine(config)
    errors = []
    for step in range(3):
        engine.backward(LOSSES["OddModel"](engine, BATCHES["OddModel"](step, 0, dist.get_rank())))
        engine.clip_gradients(100.0)
        if step == 1 and dist.get_rank() == 1:
            _lr(engine)
        errors.append(said(engine.step))
    return errors


def written(config: dict[str, Any], name: str, steps: int = 5, save_dir: str | None = None) -> list[str]:
    """The last rank writes into one element of a parameter after the first step; the errors of the steps after it, or
    of a save."""
    engine = make_engine(config)
    train(engine)
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter = dict(engine.module.named_parameters())[name]
        with torch.no_grad():
            parameter.view(-1)[parameter.numel() // 2] += 1.0
    if save_dir is not None:
        return [said(lambda: engine.save_checkpoint(save_dir))]
    errors: list[str] = []
    while len(errors) < steps and not (errors and errors[-1]):
        errors.append(said(lambda: train(engine, 1, 1 + len(errors))))
    return errors


def written_frozen(config: dict[str, Any]) -> str:
    """The same with a parameter that is not trained."""
    model = models.build(models.OddModel)
    name, parameter = next(iter(model.named_parameters()))
    parameter.requires_grad_(False)
    engine = zerolite.initialize(model, config)
    if dist.get_rank() == 0:
        with torch.no_grad():
            parameter.view(-1)[0] = 7.0
    return f"{name}: {said(lambda: train(engine, 3))}"


def spoiling_update(config: dict[str, Any], change: dict[str, Any], steps: int = 5) -> dict[str, Any]:
    """After two steps a param group takes ``change``; the errors and warnings of the steps after it."""
    engine = make_engine(config)
    train(engine, 2)
    engine.optimizer.param_groups[-1].update(change)
    errors = []
    with Warnings() as warnings:
        while len(errors) < steps and not (errors and errors[-1]):
            errors.append(said(lambda: train(engine, 1, 2 + len(errors))))
    return {"errors": errors, "warnings": warnings.messages}


def new_values_after(config: dict[str, Any], change: dict[str, Any]) -> list[str]:
    """The errors of four steps; values are loaded after the second, which tells that the first has spoilt them."""
    engine = make_engine(config)
    train(engine)
    good, groups = engine.full_state_dict(), [dict(group) for group in engine.optimizer.param_groups]
    engine.optimizer.param_groups[-1].update(change)
    errors = [said(functools.partial(train, engine, 1, step)) for step in (1, 2)]
    for group, old in zip(engine.optimizer.param_groups, groups, strict=True):
        group.update(old)
    engine.load_full_state_dict(good)
    return errors + [said(functools.partial(train, engine, 1, step)) for step in (3, 4)]


def spoilt_save(config: dict[str, Any], change: dict[str, Any], save_dir: str) -> str:
    engine = make_engine(config)
    train(engine, 2)
    engine.optimizer.param_groups[-1].update(change)
    train(engine)
    return said(lambda: engine.save_checkpoint(save_dir))


def infinite_from_the_start(config: dict[str, Any]) -> list[str]:
    """Weights that are -inf by design, which plain PyTorch trains around: elements without a gradient."""
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        model.bias[0] = -torch.inf
    engine = zerolite.initialize(model, {**config, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    errors = []
    for _ in range(3):
        x = torch.ones(2, 4)
        errors.append(said(lambda x=x: (engine.backward(engine(x)[:, 1:].sum()), engine.step())))
    return errors


def bad_loss(config: dict[str, Any], steps: int = 3) -> tuple[int, list[str]]:
    """A loss that is NaN on rank 1 while its gradients are finite; steps taken, and warnings."""
    engine = make_engine(config)
    with Warnings() as warnings:
        for step in range(steps):
            loss = LOSSES["OddModel"](engine, BATCHES["OddModel"](step, 0, dist.get_rank()))
            engine.backward(loss + (torch.nan if dist.get_rank() == 1 else 0.0))
            engine.step()
    return engine.global_steps - engine.skipped_steps, warnings.messages


def spoiling_from_the_start() -> dict[str, str]:
    """By what is wrong: the first error of three steps of a layer whose second input is always 0."""
    found = {}
    for what, more in {
        "eps": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "eps": 0.0}}},
        "scale": {
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "fp16": {"enabled": True, "loss_scale": 1e-45},
        },
    }.items():
        engine = zerolite.initialize(torch.nn.Linear(2, 3), {"train_micro_batch_size_per_gpu": 2, **more})
        errors = []
        for _ in range(3):
            x = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
            errors.append(said(lambda x=x, engine=engine: (engine.backward(engine(x).sum()), engine.step())))
        found[what] = next(filter(None, errors), "")
    return found


def refused(config: dict[str, Any]) -> str:
    return said(lambda: make_engine(config))


def parts_of_a_layer(stage: int) -> dict[str, list[str]]:
    """Two layers on two tensor-parallel ranks each. By what the last rank does after a step: the errors of the next."""
    found = {}
    for what in ("lr", "weight", "update"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
            "tensor_parallel": {"size": 2, "plan": {"0": "column", "2": "row"}},
            "consistency_check_interval": 1,
        }
        engine = zerolite.initialize(model, config)
        x = torch.ones(2, 4) * (1 + engine.data_parallel_rank)

        def step(engine: Any = engine, x: torch.Tensor = x) -> None:
            engine.backward(engine(x).square().sum())
            engine.step()

        step()
        if dist.get_rank() == dist.get_world_size() - 1:
            if what == "lr":
                _lr(engine)
            elif what == "weight":
                with torch.no_grad():
                    engine.module[0].weight.view(-1)[0] += 1.0
            else:
                engine.optimizer.param_groups[0]["lr"] = torch.inf
        elif what == "update":
            engine.optimizer.param_groups[0]["lr"] = torch.inf
        found[what] = [said(step), said(step)]
    return found
