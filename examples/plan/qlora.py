"""QLoRA of a model of Llama-2-70B's shapes, to be planned: frozen weights of 4 bits, and trained adapters.

zerolite plan --model qlora:build_70b --config qlora.json --world-size 2 \
    --input-spec "tokens:int64[B,1024] labels:int64[B,1024]" --device-memory 24GB
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, GROUP, RANK = 32000, 64, 16


def unpacked(packed: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """The weight in bf16: two values of 4 bits in a byte, and a scale for each 64 of them."""
    values = torch.empty(packed.numel(), 2, dtype=torch.bfloat16, device=packed.device)
    values[:, 0], values[:, 1] = packed.view(-1) & 15, packed.view(-1) >> 4
    return values.view(-1, GROUP).sub_(8).mul_(scales.unsqueeze(1) / 4096).view(shape)


class PackedProduct(torch.autograd.Function):
    """x @ weight.T that keeps the packed weight for the backward, and unpacks it again, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.shape = shape
        return F.linear(x, unpacked(packed, scales, shape))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient @ unpacked(*ctx.saved_tensors, ctx.shape), None, None, None


class Linear(nn.Module):
    """Frozen weight in 4 bits and an adapter. The scales are in 8 bits and whole on each rank: bitsandbytes keeps them
    in an attribute of the weight, which no stage divides."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.shape = (outside, inside)
        self.packed = nn.Parameter(torch.zeros(inside * outside // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("scales", torch.ones(inside * outside // GROUP, dtype=torch.uint8))
        self.down, self.up = nn.Linear(inside, RANK, bias=False), nn.Linear(RANK, outside, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return PackedProduct.apply(x, self.packed, self.scales, self.shape) + self.up(self.down(x))


class Block(nn.Module):
    """Attention with fewer heads for keys and values, and a gated MLP."""

    def __init__(self, width: int, inner: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.project = Linear(width, width), Linear(width, width)
        self.key, self.value = Linear(width, kv_heads * self.size), Linear(width, kv_heads * self.size)
        self.gate, self.expand, self.contract = Linear(width, inner), Linear(width, inner), Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        inputs = self.norm_1(x)
        query, key, value = (
            part(inputs).view(batch, length, -1, self.size).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        inputs = self.norm_2(x)
        return x + self.contract(F.silu(self.gate(inputs)) * self.expand(inputs))


class Model(nn.Module):
    """From tokens and labels, both int64 of [batch, length], to the loss. Blocks are computed again in backward."""

    def __init__(self, layers: int, width: int, inner: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Block(width, inner, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        for module in (self.tokens, self.head, self.norm, *(n for b in self.layers for n in (b.norm_1, b.norm_2))):
            module.requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build_small() -> Model:
    """Three million parameters, for `--check` on any machine."""
    return Model(2, 256, 512, 4, 2)


def build_70b() -> Model:
    """69 billion parameters, of which 0.2 billion are trained."""
    return Model(80, 8192, 28672, 64, 8)
