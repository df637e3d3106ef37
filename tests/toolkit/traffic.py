"""The collectives of training, and models whose units at stage 3 are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.toolkit import models


def plain_calls(recorder: Any) -> list[tuple[str, int, str, int, str]]:
    return [(call.op, call.numel, str(call.dtype), call.nbytes, call.tag) for call in recorder.calls]


def mean_of_ranks(x: Tensor) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


class MeanOfRanks(torch.autograd.Function):
    """The mean over ranks, and over the ranks' gradients in backward, on torch's default group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_too: bool) -> Tensor:
        return mean_of_ranks(x) if forward_too else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return mean_of_ranks(gradient), None


class Tower(nn.Module):
    """``x [B, 7]`` -> ``[B, 3]``. No two layers are equally large, so a number of elements tells which one moved."""

    def __init__(self, sizes: Sequence[int] = (7, 13, 11, 5, 3), layer: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(a, b) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Adapted(nn.Module):
    """A linear layer that is frozen, with a trained product of two thin ones beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Tied(nn.Module):
    """A token model whose head has the embedding's weight, by being tied or by calling it (``functional``)."""

    def __init__(self, width: int = 5, functional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, width)
        self.middle = nn.Linear(width, width, bias=False)
        self.head = None if functional else nn.Linear(width, models.VOCABULARY, bias=False)
        if self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(self.embed(tokens)))
        return F.linear(hidden, self.embed.weight) if self.head is None else self.head(hidden)


class Checkpointed(Tower):
    """A tower in which each layer but the first is recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Conditioned(Tower):
    """A tower that conditions its input on a first prediction of its layers, which has no graph."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = super().forward(x)
        return super().forward(x + first.mean())
