"""Situations in which an implementation that guesses from what one rank holds goes wrong."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerolite
from zerolite.comm import host_memory

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def everywhere_equal(module: nn.Module) -> None:
    """Every parameter has the same bits on all ranks."""
    for name, parameter in module.named_parameters():
        largest, smallest = parameter.detach().clone(), -parameter.detach()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(smallest, op=dist.ReduceOp.MAX)
        assert torch.equal(largest, -smallest), name


class Branches(nn.Module):
    """Two branches; which one a forward takes is the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.empty = nn.Parameter(torch.zeros(0))
        self.scalar = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        for name in way:
            x = {"l": self.left, "r": self.right}[name](x)
        return x * self.scalar + self.empty.sum()


def branches_on_one_rank(config: dict[str, Any], ways: list[list[str]]) -> dict[str, Any]:
    """``ways[rank]``: one way per micro-batch of a window; three windows. Gives parameters and norms."""
    torch.manual_seed(0)
    engine = zerolite.initialize(Branches(), config)
    generator = torch.Generator().manual_seed(engine.rank)
    norms = []
    for _ in range(3):
        for way in ways[engine.rank]:
            x = torch.randn(4, 6, generator=generator)
            engine.backward(engine(x, way).square().mean())
            engine.step()
        norms.append(engine.get_global_grad_norm())
    everywhere_equal(engine.module)
    return {"norms": norms, **{n: p.detach().float().clone() for n, p in engine.named_parameters()}}


class Chain(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@contextlib.contextmanager
def limited_memory(limit: int | None) -> Iterator[None]:
    """Limit /dev/shm to files of ``limit`` bytes; 0: the transport is off."""
    create = host_memory._create
    if limit is not None:
        host_memory._create = lambda path, size: size <= limit and create(path, size)
    os.environ["ZEROLITE_SHARED_MEMORY"] = "0" if limit == 0 else "1"
    try:
        yield
    finally:
        host_memory._create = create
        del os.environ["ZEROLITE_SHARED_MEMORY"]


def transports(config: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """A chain whose layers differ in size, so that buckets do; the communicator's kind and the final parameters."""
    with limited_memory(limit):
        torch.manual_seed(0)
        engine = zerolite.initialize(Chain([16, 64, 8, 128, 16, 200, 16]), config)
        generator = torch.Generator().manual_seed(engine.rank)
        for _ in range(6):
            engine.backward(engine(torch.randn(4, 16, generator=generator)).square().mean())
            engine.step()
    everywhere_equal(engine.module)
    large = getattr(engine._comm, "_large", None)
    exhausted = None if large is None else large.memory.exhausted
    left = [name for name in os.listdir("/dev/shm") if name.startswith(f"zerolite-{os.getpid()}-")]
    return {
        "kind": type(engine._comm).__name__,
        "exhausted": exhausted,
        "left": left,
        "parameters": {n: p.detach().clone() for n, p in engine.named_parameters()},
    }


def two_engines_in_one_graph(stage: int, precision: str, loop: str) -> dict[str, Any]:
    """A generator's loss through a discriminator of another engine, as in a GAN, and a plain module in front of and
    behind them. Gives the updates of the generator and the gradients of the plain modules."""
    optimizer = {"type": "SGD", "params": {"lr": 4.0}}  # so large that fp16's rounding of weights does not show
    config: dict[str, Any] = {"optimizer": optimizer, "zero_optimization": {"stage": stage}}
    other: dict[str, Any] = dict(config)
    if precision == "fp16":
        config = {**config, "fp16": {"enabled": True, "loss_scale": 64}}
        other = {**other, "fp16": {"enabled": True, "loss_scale": 16}}
    torch.manual_seed(0)
    front, back = nn.Linear(4, 4), nn.Linear(4, 4)
    generator = zerolite.initialize(Chain([4, 8, 4]), config)
    discriminator = zerolite.initialize(Chain([4, 8, 4]), other)
    before = {
        f"{name}.{n}": p.detach().float().clone()
        for name, engine in (("g", generator), ("d", discriminator))
        for n, p in engine.named_parameters()
    }
    loss = back(discriminator(generator(front(torch.linspace(-1, 1, 8).view(2, 4))))).square().sum()
    if loop == "engine":
        generator.backward(loss)
        generator.step()
        discriminator.step()
    else:
        loss.backward()
        generator.optimizer.step()
        discriminator.optimizer.step()
    updates = {
        f"{name}.{n}": p.detach().float() - before[f"{name}.{n}"]
        for name, engine in (("g", generator), ("d", discriminator))
        for n, p in engine.named_parameters()
    }
    assert front.weight.grad is not None and back.weight.grad is not None
    return {**updates, "front": front.weight.grad, "back": back.weight.grad}


def late_momentum(config: dict[str, Any]) -> list[torch.Tensor]:
    """A parameter that is used for the first time when its neighbours have momentum already."""
    torch.manual_seed(0)
    engine = zerolite.initialize(Branches(), config)
    for way in ("l", "l", "lr", "r", "lr"):
        engine.backward(engine(torch.ones(2, 6), way).square().mean())
        engine.step()
    return [p.detach().clone() for p in engine.parameters()]


def flush_and_boundaries(config: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = zerolite.initialize(nn.Linear(3, 1), config)
    answers: dict[str, Any] = {"empty": engine.step(flush=True), "steps": engine.global_steps}
    before = engine.module.weight.detach().clone()
    engine.backward(engine(torch.ones(2, 3)).sum())
    answers["boundary"] = engine.is_gradient_accumulation_boundary()
    answers["flushed"] = engine.step(flush=True)
    answers["update"] = (engine.module.weight.detach() - before).flatten().tolist()
    answers["after"] = engine.global_steps
    return answers


def values_loaded_into_the_module(stage: int) -> tuple[bool, bool]:
    """With fp32 masters beside bf16 parameters: what load_state_dict brings is what training goes on from; a copy's
    is not."""
    import copy

    torch.manual_seed(0)
    engine = zerolite.initialize(
        nn.Linear(3, 3),
        {
            "bf16": {"enabled": True},
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_optimization": {"stage": stage},
        },
    )

    def one_step() -> None:
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()

    masters = [m.clone() for m in engine._pipeline._buffer.master]
    twin = copy.deepcopy(engine.module)
    twin.load_state_dict({n: torch.full_like(v, 7.0) for n, v in twin.state_dict().items()})
    one_step()
    untouched = all(torch.equal(a, b) for a, b in zip(masters, engine._pipeline._buffer.master, strict=True))
    engine.module.load_state_dict({n: torch.full_like(v, 5.0) for n, v in engine.module.state_dict().items()})
    one_step()
    return untouched, all(bool((p == 5.0).all()) for p in engine.parameters())


def outdated_graph(stage: int) -> str:
    """Backward, step, and backward again through the same graph: torch refuses, and so must an engine."""
    torch.manual_seed(0)
    engine = zerolite.initialize(Chain([3, 3, 3]), {"optimizer": SGD, "zero_optimization": {"stage": stage}})
    loss = engine(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    engine.optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"
