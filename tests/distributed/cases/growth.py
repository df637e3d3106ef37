"""Runs in which parameters start to be trained midway."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

import zerolite
from tests import models
from tests.distributed.cases.training import snapshot

LR = 3e-3  # of an added group
WAKES, SLEEPS, WAKES_AGAIN = 2, 4, 5  # steps


class Frozen(nn.Module):
    """Some of it is frozen: a whole layer, a bias beside a trained weight, one with no dimension, one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.second = nn.Linear(9, 7)
        self.third = nn.Linear(7, 7)
        self.fourth = nn.Linear(7, 7)
        self.fourth.weight = self.third.weight
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.last = nn.Linear(7, 3)
        for parameter in self.sleepers():
            parameter.requires_grad_(False)

    def sleepers(self) -> list[nn.Parameter]:
        return [self.first.weight, self.first.bias, self.second.bias, self.third.weight, self.scale]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale
        return self.last(torch.tanh(self.fourth(torch.tanh(self.third(hidden)))))


def change(model: Frozen, step: int, optimizer: Any, how: str) -> None:
    """Make the user's change before ``step``; the same to a plain model and its optimizer."""
    if step == WAKES:
        for parameter in model.sleepers():
            parameter.requires_grad_(True)
        if how == "group":
            optimizer.add_param_group({"params": model.sleepers(), "lr": LR})
    if step == SLEEPS:
        model.last.bias.requires_grad_(False)
    if step == WAKES_AGAIN:
        model.last.bias.requires_grad_(True)


def train(config: dict[str, Any], how: str, steps: int, micros: int = 1, loop: str = "engine") -> dict[str, Any]:
    """how: "config" (woken parameters join the only group), "instance" (the user's optimizer has all of them from the
    start) or "group" (they are added). loop: "engine", or "module" for torch's own loop over ``engine.module``."""
    model = models.build(Frozen)
    more = {}
    if how == "instance":
        settings = config.pop("optimizer")
        more["optimizer"] = getattr(torch.optim, settings["type"])(model.parameters(), **settings["params"])
    engine = zerolite.initialize(model, config, **more)
    losses = []
    for step in range(steps):
        change(model, step, engine.optimizer, how)
        for micro in range(micros):
            batch = models.float_batch(step, micro, engine.rank)
            if loop == "engine":
                loss = models.square_loss(engine, batch)
                engine.backward(loss)
                engine.step()
            else:
                loss = models.square_loss(engine.module, batch)
                (loss / micros).backward()
            losses.append(float(loss.detach()))
        if loop == "module":
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    states = engine.optimizer.state_dict()["state"]
    counts = sorted(int(state["step"]) for state in states.values() if "step" in state)
    return {"losses": losses, "norm": engine.get_global_grad_norm(), "parameters": snapshot(engine), "steps": counts}


def train_plain(optimizer: tuple[str, dict[str, Any]], how: str, steps: int, world: int, micros: int = 1) -> Any:
    """The same in plain PyTorch on the joint batches."""
    model = models.build(Frozen)
    kind = getattr(torch.optim, optimizer[0])
    start = model.parameters() if how != "group" else [p for p in model.parameters() if p.requires_grad]
    torch_optimizer = kind(start, **optimizer[1])
    for step in range(steps):
        change(model, step, torch_optimizer, how)
        torch_optimizer.zero_grad()
        for micro in range(micros):
            for rank in range(world):
                loss = models.square_loss(model, models.float_batch(step, micro, rank))
                (loss / (world * micros)).backward()
        torch_optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def refused(stage: int) -> dict[str, str]:
    """The sentences for what cannot be."""
    model = models.build(Frozen)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    trained = [{"params": [model.second.weight]}, {"params": [model.last.weight], "lr": 0.2}]
    engine = zerolite.initialize(model, config, model_parameters=trained)
    messages = {}
    added = {
        "foreign": nn.Parameter(torch.zeros(2)),
        "trained": model.last.weight,
        "fine": model.scale,
    }
    for name, parameter in added.items():
        messages[name] = _message(engine.optimizer.add_param_group, {"params": [parameter]})
    model.first.bias.requires_grad_(True)
    batch = models.float_batch(0, 0, engine.rank)

    def step() -> None:
        engine.backward(models.square_loss(engine, batch))
        engine.step()

    messages["homeless"] = _message(step)
    model.first.bias.requires_grad_(False)
    engine.zero_grad()
    messages["afterwards"] = _message(step)
    return messages


def _message(function: Any, *args: Any) -> str:
    with contextlib.suppress(StopIteration):
        try:
            function(*args)
        except (ValueError, RuntimeError) as error:
            return str(error)
    return ""


def new_module(stage: int) -> dict[str, Any]:
    """A head that is added to the model after it was given to the engine."""
    model = models.build(Frozen)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    engine = zerolite.initialize(model, config)
    torch.manual_seed(100 + engine.rank)  # the ranks' values differ; rank 0's are everyone's
    model.last = nn.Sequential(model.last, nn.Linear(3, 3))
    message = _message(engine.optimizer.add_param_group, {"params": model.last[1].parameters()})
    if message:
        return {"message": message}
    before = snapshot(engine)["last.1.weight"]
    for step in range(2):
        engine.backward(models.square_loss(engine, models.float_batch(step, 0, engine.rank)))
        engine.step()
    after = snapshot(engine)
    return {"message": message, "before": before, "after": after["last.1.weight"], "parameters": after}
