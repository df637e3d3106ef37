"""A model cut over a grid of pipeline, data-parallel and tensor-parallel ranks, and its training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import from_all_ranks
from zerolite.tensor_parallel.shard_spec import shard_spec_of
from zerolite.zero import GatheredParameters

Grid = tuple[int, int, int]  # pipe, data, tensor
WIDTH, HEADS, HIDDEN, LAYERS = 12, 4, 20, 4
PLAN = {
    "blocks.*.qkv": {"style": "column", "parts": 3},
    "blocks.*.proj": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "embed": "vocab",
    "head": "vocab",
    "blocks.*.gain": "whole",
    "blocks.*.empty": "whole",
    "blocks.*.unused": "whole",
}


class Block(nn.Module):
    """``[B, T, 12]`` to ``[B, T, 12]``: attention and a feed-forward layer, and parameters that are easily forgotten: a
    0-dim one, an empty one, a frozen layer, one that is never used."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.75))
        self.empty = nn.Parameter(torch.empty(0))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.heads, self.dropout, self.inner_dropout = HEADS, nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.dropout(self.proj(mixed.transpose(1, 2).reshape(batch, length, -1)))
        hidden = self.inner_dropout(F.gelu(self.up(self.second_norm(self.frozen(x) + x))))
        return x + self.gain * self.dropout(self.down(hidden)) + self.empty.sum()


class Gpt(nn.Module):
    """Tokens and targets, ``[B, T]`` each, to the loss."""

    def __init__(self, tied: bool = True, dropout: float = 0.0, vocabulary: int = models.VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(8, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def micro_batches(step: int, count: int, data_rank: int, **sample: int) -> Iterator[tuple[Tensor, Tensor]]:
    return (models.token_batch(step, micro, data_rank, **{"length": 8, **sample}) for micro in range(count))


def own_batches(engine: Any, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The micro-batches of this rank."""
    return micro_batches(step, engine.gradient_accumulation_steps, engine.data_parallel_rank)


def on_grid(config: dict[str, Any], grid: Grid, sequence_parallel: bool = False, **pipeline: Any) -> dict[str, Any]:
    """``config`` with the blocks that make ``grid``."""
    pipe, _, tensor = grid
    more: dict[str, Any] = {}
    if pipe > 1:
        chosen = {"split": [f"blocks.{LAYERS * part // pipe}" for part in range(1, pipe)]} if not pipeline else {}
        more["pipeline"] = {"stages": pipe, **chosen, **pipeline}
    if tensor > 1:
        more["tensor_parallel"] = {"size": tensor, "plan": PLAN, "sequence_parallel": sequence_parallel}
    return config | more


def make_engine(config: dict[str, Any], **model: Any) -> Any:
    """Each rank's model is made of another seed: those of the job's first rank are to count."""
    return zerolite.initialize(models.build(Gpt, seed=7 + dist.get_rank(), **model), config)


def train(engine: Any, steps: int, first: int = 0) -> tuple[list[float], list[float]]:
    """The losses and the norms of training with ``train_batch``."""
    losses, norms = [], []
    for step in range(first, first + steps):
        losses.append(engine.train_batch(own_batches(engine, step)).item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def held(engine: Any) -> dict[str, tuple[bool, str]]:
    """Return by name, of each local parameter, True if it is a part, and a hash of its bits."""
    found = {}
    with GatheredParameters(engine.module, check=False):
        for name, p in engine.module.named_parameters():
            data = p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if p.numel() else b""
            found[name] = (shard_spec_of(p) is not None, hashlib.sha1(data).hexdigest())
    return found


def assert_ranks_agree(engine: Any, *told: Any) -> None:
    """All ranks say the same of the whole (counts, and ``told``); values that several of them hold have the same bits.
    Called on all ranks."""
    counts = (engine.global_steps, engine.skipped_steps, engine.loss_scale, tuple(engine.get_lr()))
    rows = from_all_ranks((engine.topology.coordinates, held(engine), (counts, repr(told))))
    known: dict[Any, str] = {}
    for place, values, of_all in rows:
        assert of_all == rows[0][2], f"{place}: {of_all}, and the first rank: {rows[0][2]}"
        for name, (cut, value) in values.items():
            key = (place[0], name, place[2] if cut else None)
            assert known.setdefault(key, value) == value, f"{name} of {place} has other bits"


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference and where it is."""
    return max((float((one[n].float() - v.detach()).abs().max()), n) for n, v in other.items() if v.numel())
