"""A small model with every kind of parameter, ways to train it at stage 3, and comparisons of what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import zerolite
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.stage3_cases import left_gathered

WIDTH = 6


class Block(nn.Module):
    """``[B, WIDTH]`` -> the same. ``actions`` maps a place in the forward to a function of the tensor there."""

    def __init__(self, actions: dict[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.actions = actions
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.actions.get("block begins", _same)(x)
        hidden = self.up(self.norm(hidden))
        hidden = self.actions.get("inside the block", _same)(hidden)
        hidden = self.down(torch.tanh(hidden)) * self.scale
        return self.actions.get("block ends", _same)(x + hidden)


class Net(nn.Module):
    """``x [B, 5]`` -> ``[B, 3]``; the root owns a parameter, a weight is tied, a layer is frozen, one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: dict[str, Callable[[Tensor], Tensor]] = {}
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Block({}), Block(self.actions), Block({})])
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.again = nn.Linear(WIDTH, 7, bias=False)
        self.again.weight = self.blocks[0].up.weight
        self.head = nn.Linear(7, 3)
        self.register_buffer("offset", torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.actions.get("model begins", _same)(x)
        x = self.first(x)
        x = self.actions.get("after the first", _same)(x)
        for block in self.blocks:
            x = block(x)
        x = self.again(self.frozen(x) * self.gain)
        return self.actions.get("model ends", _same)(self.head(torch.tanh(x)) + self.offset)


def _same(x: Tensor) -> Tensor:
    return x


def build(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def settings(stage: int, setting: str = "moving") -> dict[str, Any]:
    """``setting`` matters at stage 3 only."""
    return at(f"{stage} {setting}", optimizer=ADAMW, clip=0.5)


def make_engine(stage: int, setting: str = "moving") -> Any:
    return zerolite.initialize(build(), settings(stage, setting))


def batch(step: int, micro: int = 0) -> Tensor:
    """This rank's ``[4, 5]``."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10_000 * step + 100 * micro + dist.get_rank()))


def loss_of(engine: Any, step: int, micro: int = 0) -> Tensor:
    return engine(batch(step, micro)).square().mean()


def no_grad(engine: Any, step: int) -> Tensor:
    with torch.no_grad():
        return engine(batch(step, 7))


def one_loss(engine: Any, step: int) -> Tensor:
    loss = loss_of(engine, step)
    engine.backward(loss)
    return loss


def detached(value: Any) -> Any:
    """A copy that can be compared and pickled."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def train(
    engine: Any,
    steps: int = 8,
    loop: Callable[[Any, int], Any] = one_loss,
    disturb: Callable[[Any, int], Any] | None = None,
    at: tuple[int, ...] = (0, 2, 6),
) -> dict[str, Any]:
    """``seen``: what the loop gave; ``disturbed``: what a call before some steps gave; ``followed``: which steps ran on
    a plan. Nothing is left gathered after any step."""
    seen, disturbed, norms, followed = [], [], [], []
    for step in range(steps):
        if disturb is not None and step in at:
            disturbed.append(detached(disturb(engine, step)))
        seen.append(detached(loop(engine, step)))
        followed.append(engine._parts.coordinator is not None and engine._parts.coordinator.schedule.following)
        engine.step()
        norms.append(engine.get_global_grad_norm())
        assert not left_gathered(engine), left_gathered(engine)
    state = engine.full_state_dict()
    return {"seen": seen, "disturbed": disturbed, "norms": norms, "state": state, "followed": followed}
