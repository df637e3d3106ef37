"""The GPT that every competitor trains. Kept apart from the examples, so that old and new figures stay comparable."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelSize:
    """The shape of the model; the defaults have 17.2 M parameters."""

    layers: int = 7
    width: int = 448
    heads: int = 7
    vocab: int = 256
    context: int = 128


class Block(nn.Module):
    """Pre-norm attention and MLP: `(batch, time, width)` in and out. `heads` are those of this rank, where ranks share
    them."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads, self.head_width = size.heads, size.width // size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, self.head_width))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """`forward(tokens, targets)`, both int64 `(batch, time)`, gives the mean cross-entropy as a scalar."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(size.vocab, size.width)
        self.position_embedding = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        self.apply(_init_weights)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), targets)

    def embed(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token_embedding(tokens) + self.position_embedding(positions)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of `(batch, time, vocab)` logits."""
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build_model(size: ModelSize, seed: int = 0) -> GPT:
    """The same weights on every rank and for every competitor."""
    torch.manual_seed(seed)
    return GPT(size)


def make_batches(size: ModelSize, micro_batch: int, rank: int, count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """`count` pairs of (tokens, targets) on the CPU, different on each rank, the same for every competitor.

    The tokens walk through the vocabulary with a little noise: something can be learnt, and a wrong update shows in the
    loss.
    """
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = (micro_batch, size.context + 1)
    batches = []
    for _ in range(count):
        start = torch.randint(size.vocab, (micro_batch, 1), generator=generator)
        noise = torch.randint(3, shape, generator=generator)
        walk = (start + torch.arange(size.context + 1) + noise) % size.vocab
        batches.append((walk[:, :-1].contiguous(), walk[:, 1:].contiguous()))
    return batches
