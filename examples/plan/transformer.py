"""Transformers of the sizes that the ZeRO paper speaks of, to be planned: nothing of their size is ever allocated.

zerolite plan --model transformer:build_7b5 --config zero3.json --world-size 64
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CONTEXT, VOCABULARY = 1024, 51200


class Block(nn.Module):
    """Causal self-attention and an MLP, both behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(F.gelu(self.expand(self.norm_2(x))))


class Transformer(nn.Module):
    """From tokens and labels, both int64 of [batch, length], to the loss."""

    def __init__(self, layers: int, width: int, heads: int, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build_small() -> Transformer:
    """15 million parameters, for `--check` on any machine."""
    return Transformer(2, 256, 4)


def build_7b5() -> Transformer:
    """7.5 billion parameters."""
    return Transformer(36, 4096, 32)


def build_7b5_checkpointed() -> Transformer:
    """The same, whose layers keep their inputs alone and compute the rest again in backward."""
    return Transformer(36, 4096, 32, checkpointing=True)


def build_1t() -> Transformer:
    """A trillion parameters."""
    return Transformer(128, 25600, 160)
