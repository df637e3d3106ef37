"""Models with the sizes of well-known ones, in plain PyTorch: what counts is their parameters and their blocks.

Sizes: Touvron et al., 2023, "Llama 2"; Qwen team, 2025, "Qwen3 Technical Report" (Qwen3-30B-A3B). Tokens go to the
experts in turn, and not where the router says, so that shapes follow from sizes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """experts: 0 for a dense MLP of `inner`; otherwise so many of `inner` each, `active` of them for a token."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    inner: int
    experts: int = 0
    active: int = 0

    def thinner(self, divisor: int) -> Shape:
        """As many layers and parameters, each `divisor` times narrower in its width, its heads, its MLP and its
        vocabulary."""
        return Shape(
            self.vocabulary // divisor,
            self.width // divisor,
            self.layers,
            self.heads,
            self.key_heads,
            max(1, self.head_width // divisor),
            self.inner // divisor,
            self.experts,
            self.active,
        )


SHAPES = {
    "llama-2-7b": Shape(32_000, 4096, 32, 32, 32, 128, 11_008),
    "qwen3-30b-a3b": Shape(151_936, 2048, 48, 32, 4, 128, 768, experts=128, active=8),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        own, shared = shape.heads * shape.head_width, shape.key_heads * shape.head_width
        self.q_proj = nn.Linear(shape.width, own, bias=False)
        self.k_proj = nn.Linear(shape.width, shared, bias=False)
        self.v_proj = nn.Linear(shape.width, shared, bias=False)
        self.o_proj = nn.Linear(own, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for p in projections)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape != k.shape)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Dense(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.active = shape.active
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(shape.experts, shape.width, 2 * shape.inner) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(shape.experts, shape.inner, shape.width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        experts = self.gate_up_proj.shape[0]
        weights = self.router(tokens).softmax(-1).mean(-1, keepdim=True) * self.active
        each = (tokens * weights).repeat(self.active, 1).view(experts, -1, tokens.shape[-1])
        gate, up = torch.bmm(each, self.gate_up_proj).chunk(2, -1)
        mixed = torch.bmm(F.silu(gate) * up, self.down_proj)
        return mixed.view(self.active, *x.shape).sum(0)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width)
        self.mlp = Experts(shape) if shape.experts else Dense(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """`(batch, positions)` tokens in, the loss out. `blocks` is what FSDP2's users wrap."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def parameters_of(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(shape).parameters())
