"""Runs the models of stage3_models.py, stage3_graphs.py and stage3_library.py: small enough to compare bit by bit.

A case is a :class:`Case`, registered by name with ``@case`` or ``@cases``; :func:`train_all` trains it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from zerolite.zero import ZeroParamStatus

WIDTH = 6
HIDDEN = 11
LENGTH = 5


class Case(nn.Module):
    """A model to compare. ``stable``: every step does the same, so the plan is followed in the end; None: not told.
    ``zero``: more keys for its config at stage 3."""

    stable: bool | None = True
    zero: dict[str, Any] = {}
    steps = 7

    def __init__(self) -> None:
        super().__init__()
        self.evaluations: list[float] = []  # losses that need not have the same bits

    def prepare(self, step: int) -> None:
        """Called before each step."""

    @staticmethod
    def step(engine: Any, step: int) -> Tensor:
        """The loss of a micro-batch."""
        return loss_of(engine(batch(step)))


BUILDERS: dict[str, Callable[[], Case]] = {}
CLASSES: dict[str, type[Case]] = {}


def case(cls: type[Case]) -> type[Case]:
    """Register a case under its class's name."""
    BUILDERS[cls.__name__], CLASSES[cls.__name__] = cls, cls
    return cls


def cases(**variants: Any) -> Callable[[type[Case]], type[Case]]:
    """One case per keyword, whose value is the class's only argument."""

    def register(cls: type[Case]) -> type[Case]:
        for name, value in variants.items():
            BUILDERS[f"{cls.__name__}-{name}"], CLASSES[f"{cls.__name__}-{name}"] = partial(cls, value), cls
        return cls

    return register


def batch(step: int, *shape: int) -> Tensor:
    """This rank's input of a step: [2, LENGTH, WIDTH], or ``shape``."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(shape or (2, LENGTH, WIDTH), generator=generator)


def tokens(step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(13, shape or (2, LENGTH), generator=generator)


def loss_of(value: Tensor) -> Tensor:
    return (value - 0.3).square().mean()


def train(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Train a case. Gives, per step, losses, the gathers, the elements reduced and whether a plan was followed; whole
    parameters and buffers; which names share memory; the trained parameters, and this rank's elements of master
    weights and of optimizer states; and what was left gathered after any step."""
    torch.manual_seed(0)
    engine = zerolite.initialize(BUILDERS[name](), config)
    coordinator = engine.coordinator
    losses, gathers, reduced, following, left = [], [], [], [], []
    for step in range(CLASSES[name].steps):
        engine.module.prepare(step)
        torch.manual_seed(100 * step + engine.rank)
        with zerolite.comm.record() as record:
            for _ in range(engine.gradient_accumulation_steps):
                loss = CLASSES[name].step(engine, step)
                engine.backward(loss)
                following.append(coordinator is not None and coordinator.schedule.following)
                engine.step()
                losses.append(loss.item())
        gathers.append(record.count("all_gather", "parameters"))
        reduced.append(record.numel("reduce_scatter", "gradients"))
        left += [f"after step {step}: {what}" for what in left_gathered(engine)]
    state = engine.full_state_dict()
    buffer, moments = engine._pipeline._buffer, engine.optimizer.state_dict()["state"].values()
    return {
        "losses": losses,
        "evaluations": engine.module.evaluations,
        "gathers": gathers,
        "reduced": reduced,
        "following": following,
        "left": left,
        "state": state,
        "tied": {a: [b for b in state if state[a].data_ptr() == state[b].data_ptr() != 0] for a in state},
        "trained": {slot.name: slot.numel for slot in buffer.layout.slots},
        "masters": sum(master.numel() for master in buffer.master),
        "states": sum(v.numel() for state in moments for v in state.values() if isinstance(v, Tensor) and v.dim()),
        "units": [] if coordinator is None else [unit.name for unit in coordinator.units],
    }


def train_all(name: str, configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """:func:`train` with each of several configs."""
    for module in ("stage3_models", "stage3_graphs", "stage3_library"):
        importlib.import_module(f"tests.distributed.cases.{module}")
    return {key: train(name, config) for key, config in configs.items()}


def left_gathered(engine: Any) -> list[str]:
    """Return the parameters that stage 3 should have released, and has not."""
    if engine.coordinator is None:
        return []
    wrong = []
    for handle in engine.coordinator.handles:
        wanted = ZeroParamStatus.AVAILABLE if handle.persistent else ZeroParamStatus.NOT_AVAILABLE
        memory = 0 if handle.storage is None else handle.storage.nbytes()
        if handle.status is not wanted or handle.held or (memory and not handle.persistent):
            wrong.append(f"{handle.name} is {handle.status.name}, held {handle.held} times, {memory} bytes")
        elif not handle.persistent and not models.has_no_values(handle.parameter):
            wrong.append(f"{handle.name} has memory or, to torch itself, a shape")
    return wrong


class Block(nn.Module):
    """A residual block with a parameter of its own; ``inplace``: it overwrites what its first layer gave."""

    def __init__(self, width: int = WIDTH, inplace: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, HIDDEN)
        self.act = nn.ReLU(inplace)
        self.down = nn.Linear(HIDDEN, width)
        self.gain = nn.Parameter(torch.full((width,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(self.act(self.up(self.norm(x))))
