"""Runs whose first backward is the one to look at: it reduces before anybody knows which gradients it will bring."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolite
from tests import models
from tests.distributed.cases.memory import events_in_order, mark, memory_profile
from tests.distributed.cases.training import make_engine, snapshot
from zerolite.comm import record

STEPS = 3
BRANCHES = ("left", "right", "none", "left")


class Fragile(torch.autograd.Function):
    """The identity, whose backward raises while ``broken``."""

    broken = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Fragile.broken:
            raise ZeroDivisionError("a backward that ends on its way")
        return gradient


class Late(nn.Module):
    """Four layers; ``shared``: one weight in three reentrantly checkpointed segments, whose gradient comes in three
    parts, the last long after the first; ``small``: weights without dimensions, each used after every layer;
    ``branches``: two layers of which a rank uses one, or none."""

    def __init__(self, shared: bool = True, small: bool = True, branches: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(4))
        self.shared = nn.Linear(13, 13) if shared else None
        self.small = nn.ParameterList(nn.Parameter(torch.tensor(0.9 + i / 100)) for i in range(8 if small else 0))
        self.branches = nn.ModuleDict({name: nn.Linear(13, 13) for name in ("left", "right") if branches})
        self.last = nn.Linear(13, 3)

    def forward(self, x: Tensor, branch: str = "none") -> Tensor:
        hidden = self.first(x)
        for index, layer in enumerate(self.layers):
            hidden = torch.tanh(layer(hidden))
            if self.shared is not None and index != 2:
                hidden = checkpoint(self._segment, hidden, use_reentrant=True)
            for factor in self.small:
                hidden = hidden * factor
            if index == 1:
                hidden = Fragile.apply(hidden)
        if branch in self.branches:
            hidden = hidden + self.branches[branch](hidden)
        return self.last(hidden)

    def _segment(self, hidden: Tensor) -> Tensor:
        assert self.shared is not None
        return torch.tanh(self.shared(hidden))


def _loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
    x, y = models.float_batch(step, micro, rank)
    return models.square_loss(model, (x, BRANCHES[(rank + step) % 4], y))


def _weight(step: int, micro: int, rank: int) -> float:
    return float(1 + (micro + 2 * rank + step) % 3)


def _takes_part(how: str, step: int, rank: int, world: int) -> bool:
    """The last rank of several has no batch: in the first step ("absent"), or at all ("join")."""
    lacks = {"absent": step == 0, "join": True}.get(how, False)
    return not (lacks and rank == world - 1 and world > 1)


def plain(how: str, world: int, micros: int, model: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Tensor]:
    """Train one process in plain PyTorch, to be compared with :func:`train`."""
    torch.set_num_threads(1)
    module = models.build(Late, **model)
    torch_optimizer = torch.optim.SGD(module.parameters(), **optimizer)
    places = [(micro, rank) for micro in range(micros) for rank in range(world)]
    for step in range(STEPS):
        torch_optimizer.zero_grad()
        total = sum(_weight(step, *place) for place in places)
        for micro, rank in places:
            if _takes_part(how, step, rank, world):
                share = _weight(step, micro, rank) / total if how == "weights" else 1 / len(places)
                (_loss(module, step, micro, rank) * share * (2 if how == "twice" else 1)).backward()
        torch_optimizer.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train(config: dict[str, Any], how: str = "engine", model: dict[str, Any] | None = None) -> dict[str, Any]:
    """``how``: "engine" or "plain" loop, "no_sync", "weights", "twice" (a second backward through the graph), "broken"
    (on rank 0 the very first backward raises on its way, and all ranks drop it), "absent", "join"."""
    engine = zerolite.initialize(models.build(Late, **(model or {})), config)
    micros = engine.gradient_accumulation_steps
    if how == "broken":
        _break_down(engine)
    collectives = []
    with engine.join() if how == "join" else contextlib.nullcontext():
        for step in range(STEPS):
            if how == "join" and not _takes_part(how, step, engine.rank, engine.world_size):
                break
            with record() as recorder:
                for micro in range(micros):
                    _micro_batch(engine, how, step, micro, micros)
                if how in ("plain", "absent"):
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
            collectives.append([(call.op, call.tag) for call in recorder.calls])
    return {"parameters": snapshot(engine), "steps": engine.global_steps, "collectives": collectives}


def _micro_batch(engine: Any, how: str, step: int, micro: int, micros: int) -> None:
    if not _takes_part(how, step, engine.rank, engine.world_size):
        return
    with engine.no_sync() if how == "no_sync" and micro < micros - 1 else contextlib.nullcontext():
        loss = _loss(engine, step, micro, engine.rank)
        if how in ("plain", "absent"):
            (loss / micros).backward()
            return
        if how == "twice":
            engine.backward(loss, retain_graph=True)
        engine.backward(loss, weight=_weight(step, micro, engine.rank) if how == "weights" else None)
    engine.step()


def _break_down(engine: Any) -> None:
    Fragile.broken = engine.rank == 0
    with contextlib.suppress(ZeroDivisionError):
        engine.backward(_loss(engine, 9, 0, engine.rank))
    Fragile.broken = False
    engine.zero_grad()


def train_many(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: train(**run) for name, run in runs.items()}


class Sleeping(nn.Module):
    """Model whose layers ``shared``, in two reentrantly checkpointed segments, are frozen at first, and ``first``
    always."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13).requires_grad_(False)
        self.shared = nn.Linear(13, 13).requires_grad_(False)
        self.last = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).requires_grad_()
        for _ in range(2):
            hidden = checkpoint(lambda h: torch.tanh(self.shared(h)), hidden, use_reentrant=True)
        return self.last(hidden)


def wake(config: dict[str, Any] | None, optimizer: dict[str, Any], world: int = 1) -> dict[str, Tensor]:
    """``shared`` is trained from the second step on; without a config in plain PyTorch, over the batches of ``world``
    ranks."""
    module = models.build(Sleeping)
    engine = zerolite.initialize(module, config) if config is not None else None
    torch_optimizer = torch.optim.SGD(module.parameters(), **optimizer)
    for step in range(STEPS):
        module.shared.requires_grad_(step > 0)
        if engine is not None:
            engine.backward(models.square_loss(engine, models.float_batch(step, 0, engine.rank)))
            engine.step()
            continue
        torch_optimizer.zero_grad()
        for rank in range(world):
            (models.square_loss(module, models.float_batch(step, 0, rank)) / world).backward()
        torch_optimizer.step()
    return snapshot(engine) if engine is not None else {n: p.detach().clone() for n, p in module.named_parameters()}


def backward_bytes(config: dict[str, Any], depth: int, width: int, steps: int) -> list[float]:
    """The most bytes per parameter that a backward takes, beyond what is there when it begins; for each step. Between
    ranks go messages: shared memory is there from the first backward on."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = "0"
    with memory_profile() as profiler:
        engine = make_engine(config, "Chain", {"depth": depth, "width": width})
        x = torch.randn(2, width)
        for _ in range(steps):
            loss = engine(x).square().mean()
            mark("begin")
            engine.backward(loss)
            mark("end")
            engine.step()
    most: list[float] = []
    held, before, inside = 0, 0, False
    for _, nbytes, name in events_in_order(profiler):
        held += nbytes
        if name == "begin":
            inside, before = True, held
            most.append(0)
        elif name == "end":
            inside = False
        if inside:
            most[-1] = max(most[-1], held - before)
    return [nbytes / (depth * width**2) for nbytes in most]
