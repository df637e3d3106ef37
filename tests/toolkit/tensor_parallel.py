"""Models whose layers are sharded, beside the same models whole in the same process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerolite.comm import Communicator, create_communicator, record
from zerolite.tensor_parallel import parallelize_module
from zerolite.tensor_parallel.shard_spec import is_partial, shard_spec_of

CPU = torch.device("cpu")
# fp32: a sum in parts rounds differently; a few units in the last place (6e-8), which backward carries on.
LOSS = 1e-6
GRADIENTS = 2e-6


def communicator() -> Communicator:
    return create_communicator(CPU)


def settings(ranks: int, plan: Any = "auto", **others: Any) -> Any:
    """The section ``tensor_parallel`` of a config."""
    return SimpleNamespace(ranks=ranks, plan=plan, **{"sequence_parallel": False, "divide": "auto", **others})


def relative(one: Tensor, other: Tensor, least: float = 0.0) -> float:
    """The largest difference against the largest value, or ``least`` if that is larger."""
    scale = max(float(other.detach().abs().max()) if other.numel() else 0.0, least) or 1.0
    return float((one.detach() - other.detach()).abs().max()) / scale if one.numel() else 0.0


def own_part(parameter: Tensor, full: Tensor) -> Tensor:
    cut = shard_spec_of(parameter)
    return full if cut is None else cut.of(full)


def compare(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], **others: Any) -> dict[str, Any]:
    """Loss and gradients, cut and whole: the largest relative differences, and the collectives of both passes."""
    comm = communicator()
    whole = copy.deepcopy(model)
    expected = loss_of(whole)
    expected.backward()
    parallelize_module(model, settings(comm.world_size, **others), comm, CPU)
    with record() as forward:
        loss = loss_of(model)
    with record() as backward:
        loss.backward()
    # Some gradients are sums that cancel, that of a key's bias for one: nothing is left of them but rounding.
    least = 0.1 * max(float(full.grad.abs().max()) for full in whole.parameters() if full.grad is not None)
    gradients = {}
    for (name, parameter), full in zip(model.named_parameters(), whole.parameters(), strict=True):
        gradient = parameter.grad
        if gradient is not None and is_partial(parameter):
            gradient = comm.all_reduce(gradient.clone().view(-1), "tensor").wait().view(parameter.shape)
        assert (gradient is None) == (full.grad is None), name
        if gradient is not None:
            gradients[name] = relative(gradient, own_part(parameter, full.grad), least)
    return {
        "loss": relative(loss, expected),
        "value": float(loss.detach()),
        "gradients": gradients,
        "forward": forward.summary(),
        "backward": backward.summary(),
        "cut": sorted(name for name, parameter in model.named_parameters() if shard_spec_of(parameter) is not None),
    }


def tokens(batch: int = 2, length: int = 12, vocabulary: int = 64, seed: int = 3) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


class Shapes(nn.Module):
    """One block of attention and a gated feed-forward layer, in one of several ways of writing them."""

    def __init__(self, kind: str, width: int = 32, heads: int = 4, kv_heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.heads, self.kv_heads, self.head_dim = kind, heads, kv_heads, width // heads
        kv = kv_heads * self.head_dim
        self.norm = nn.LayerNorm(width)
        if kind == "fused":
            self.qkv = nn.Linear(width, width + 2 * kv)
        else:
            self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, kv), nn.Linear(width, kv)
        if kind == "norms":
            self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.o = nn.Linear(width, width)
        self.gate_up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        hidden = self.norm(x)
        if self.kind == "fused":
            parts = self.qkv(hidden).split([n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        else:
            parts = self.q(hidden), self.k(hidden), self.v(hidden)
        q, k, v = (part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in parts)
        if self.kind == "norms":
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed = self.dropout(mixed)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(self.dropout(F.silu(gate) * up))


class Nano(nn.Module):
    """The attention of nanoGPT, which asks its input for the width."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Stack(nn.Module):
    _tp_plan = {
        **{f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "qkv", "c_attn", "gate_up", "up")},
        **{f"blocks.*.{name}": "rowwise" for name in ("o", "down", "c_proj")},
        "head": "colwise_rep",
    }

    def __init__(self, blocks: list[nn.Module], width: int = 32, vocabulary: int = 37, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=3)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
