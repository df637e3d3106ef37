"""Training through ``zerolite.initialize`` on grids of ranks: what the tests compare with plain PyTorch."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from zerolite.comm import record
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
        self.heads = HEADS
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.75))
        self.empty = nn.Parameter(torch.empty(0))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.requires_grad_(False)
        self.dropout, self.inner_dropout = nn.Dropout(dropout), nn.Dropout(dropout)

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


def loss_of(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = model(*batch)
    return loss


def micro_batches(step: int, count: int, data_rank: int, length: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    return (models.token_batch(step, micro, data_rank, length=length) for micro in range(count))


def on_grid(config: dict[str, Any], grid: Grid, sequence_parallel: bool = False, **pipeline: Any) -> dict[str, Any]:
    """``config`` with the blocks that make ``grid``."""
    pipe, _, tensor = grid
    more: dict[str, Any] = {"memory_check": "off"}
    if pipe > 1:
        chosen = {"split": [f"blocks.{LAYERS * part // pipe}" for part in range(1, pipe)]} if not pipeline else {}
        more["pipeline"] = {"stages": pipe, **chosen, **pipeline}
    if tensor > 1:
        more["tensor_parallel"] = {"size": tensor, "plan": PLAN, "sequence_parallel": sequence_parallel}
    return config | more


def rank_of_job() -> int:
    return torch.distributed.get_rank()


def make_engine(config: dict[str, Any], tied: bool = True, dropout: float = 0.0, **more: Any) -> Any:
    """Each rank's model is made of another seed: those of the job's first rank are to count."""
    model = models.build(Gpt, seed=7 + rank_of_job(), tied=tied, dropout=dropout)
    return zerolite.initialize(model, config, **more)


def train(config: dict[str, Any], grid: Grid, steps: int = 10, **model: Any) -> dict[str, Any]:
    """Train with ``train_batch``, and tell what a comparison may need."""
    engine = make_engine(config, **model)
    return train_engine(engine, steps)


def train_engine(engine: Any, steps: int, first: int = 0) -> dict[str, Any]:
    losses, norms = [], []
    for step in range(first, first + steps):
        batches = micro_batches(step, engine.gradient_accumulation_steps, engine.data_parallel_rank)
        losses.append(engine.train_batch(batches).item())
        norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms, **told(engine)}


def told(engine: Any) -> dict[str, Any]:
    return {
        "parameters": engine.full_state_dict(rank0_only=True, dtype=torch.float32),  # masters
        "held": held(engine),
        "place": engine.topology.place,
        "counters": (engine.global_steps, engine.skipped_steps, engine.loss_scale, tuple(engine.get_lr())),
    }


def held(engine: Any) -> dict[str, tuple[bool, str]]:
    """By name, of each parameter here: whether it is a part, and a hash of its bits."""
    with GatheredParameters(engine.module, check=False):
        return {
            name: (
                shard_spec_of(p) is not None,
                hashlib.sha1(p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
                if p.numel()
                else "",
            )
            for name, p in engine.module.named_parameters()
        }


def train_many(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: train(**run) for name, run in runs.items()}


def grids(world: int) -> list[Grid]:
    """All of ``world`` ranks with sizes that are powers of two."""
    sizes = [1, 2, 4]
    return [grid for grid in itertools.product(sizes, sizes, sizes) if grid[0] * grid[1] * grid[2] == world]


# -------------------------------------------------------------------- what travels, and what memory holds


def memory(config: dict[str, Any], tied: bool) -> tuple[tuple[int, int, int], dict[str, int]]:
    """This rank's place, and bytes by item behind two steps."""
    engine = make_engine(config, tied=tied)
    train_engine(engine, 2)
    items: dict[str, int] = engine.memory_report().items
    return engine.topology.place, {name: nbytes for name, nbytes in items.items() if nbytes}


def traffic(config: dict[str, Any], tied: bool = False) -> list[tuple[str, str, str, int, int]]:
    """The collectives and messages of the third step: op, tag, dimension, elements, bytes."""
    engine = make_engine(config, tied=tied)
    train_engine(engine, 2)
    with record() as recorder:
        engine.train_batch(micro_batches(2, engine.gradient_accumulation_steps, engine.data_parallel_rank))
    return [(call.op, call.tag, call.dimension, call.numel, call.nbytes) for call in recorder.calls]


def in_flight(config: dict[str, Any]) -> int:
    """The most micro-batches whose backward through this rank's first block had not come yet."""
    engine = make_engine(config)
    alive, most = [0], [0]

    def begins(module: nn.Module, args: Any, output: Tensor) -> None:
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        output.register_hook(ends)

    def ends(gradient: Tensor) -> None:
        alive[0] -= 1

    block = next(m for n, m in engine.module.named_modules() if isinstance(m, Block) and m.norm.weight is not None)
    block.register_forward_hook(begins)
    train_engine(engine, 2)
    assert alive[0] == 0
    return most[0]
