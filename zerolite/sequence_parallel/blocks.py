"""Attention of a block of queries to a block of keys, with the log-sum-exp by which blocks are merged.

torch's own kernels compute a block. They take equally many heads of query, key and value (a loop over the heads of a
group repeats none), no dropout whose random numbers could be drawn again, and on CUDA no mask; :class:`Plain` takes
all of it, in fp32 for 16 bits.

All tensors are [batch, heads, tokens, width]. The log-sum-exp is [batch, heads, tokens], -inf where a query sees
nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from zerolite.utils.dtypes import HALF

aten = torch.ops.aten


class Block(NamedTuple):
    """Settings of the attention of queries to keys.

    Attributes:
        causal: each query sees the keys up to its own place in the block.
        mask: bool, or a bias to add, [batch or 1, heads or 1, queries, keys]; None: without.
        scale: factor of the products.
        dropout: probability.
        seed: of the random numbers for dropout.
    """

    causal: bool
    mask: Tensor | None
    scale: float
    dropout: float = 0.0
    seed: int = 0


class Output(NamedTuple):
    """Output of a block, its log-sum-exp, and what the kernel's backward wants to have beside them."""

    out: Tensor
    lse: Tensor
    state: tuple[Tensor, ...] = ()


Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which blocks of this dtype are added."""
    return torch.float32 if dtype in HALF else dtype


def kernel_of(query: Tensor, value: Tensor, masked: bool, dropout: float) -> type[Plain]:
    """Return the kernel for a block."""
    width, device = query.shape[-1], query.device
    if dropout or value.shape[-1] != width:
        return Plain
    if device.type == "cpu":
        return _OnCpu
    if device.type != "cuda" or masked:
        return Plain
    modern = torch.cuda.get_device_capability(device) >= (8, 0) and torch.backends.cuda.is_flash_attention_available()
    if modern and query.dtype in HALF and width % 8 == 0 and width <= 256:
        return _Flash
    if query.dtype != torch.float64 and width * query.element_size() % 16 == 0:
        return _Efficient
    return Plain


class Plain:
    """Products, softmax and products again."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Output:
        scores, value = _scores(query, key, block), value.to(exact_dtype(query.dtype))
        highest = scores.amax(-1, keepdim=True)
        highest.masked_fill_(highest == -math.inf, 0.0)
        weights = scores.sub_(highest).exp_()
        sums = weights.sum(-1, keepdim=True)
        lse = (sums.log() + highest).squeeze(-1)
        weights /= sums.masked_fill(sums == 0, 1.0)
        if block.dropout:
            weights *= _kept(weights, block)
        out = _grouped(weights, value) @ value
        return Output(out.reshape(*query.shape[:-1], value.shape[-1]), lse)

    @staticmethod
    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Output, block: Block
    ) -> Gradients:
        exact = exact_dtype(query.dtype)
        gradient, key, value = (tensor.to(exact) for tensor in (gradient, key, value))
        weights = _scores(query, key, block).sub_(output.lse.unsqueeze(-1)).exp_()
        of_weights = (_grouped(gradient, value) @ value.mT).view_as(weights)
        kept = weights
        if block.dropout:
            factor = _kept(weights, block)
            kept, of_weights = weights * factor, of_weights * factor
        of_value = _grouped(kept, value).mT @ _grouped(gradient, value)
        of_weights -= (gradient * output.out).sum(-1, keepdim=True)
        of_scores = of_weights.mul_(weights).mul_(block.scale)
        of_query = (_grouped(of_scores, key) @ key).view_as(query)
        of_key = _grouped(of_scores, key).mT @ _grouped(query.to(exact), key)
        return of_query, of_key, of_value


def _grouped(tensor: Tensor, shared: Tensor) -> Tensor:
    """Return ``tensor`` with the heads that share one of ``shared`` behind each other: [batch, shared heads, heads of a
    group × tokens, ...]."""
    heads = shared.shape[1]
    return tensor.reshape(tensor.shape[0], heads, tensor.shape[1] // heads * tensor.shape[2], tensor.shape[3])


def _scores(query: Tensor, key: Tensor, block: Block) -> Tensor:
    exact = exact_dtype(query.dtype)
    scores = _grouped(query.to(exact) * block.scale, key) @ key.to(exact).mT
    scores = scores.view(*query.shape[:-1], key.shape[2])
    mask = block.mask
    if mask is None:
        return scores
    return scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)


def _kept(weights: Tensor, block: Block) -> Tensor:
    """Return the factors of dropout: 0, or 1 / (1 - probability)."""
    generator = torch.Generator(weights.device).manual_seed(block.seed)
    drawn = torch.rand(weights.shape, generator=generator, device=weights.device)
    return (drawn >= block.dropout).to(weights.dtype) / (1.0 - block.dropout)


class _OfEqualHeads(Plain):
    """A kernel that takes as many heads of key and value as of query."""

    @classmethod
    def forward(cls, query: Tensor, key: Tensor, value: Tensor, block: Block) -> Output:
        heads = key.shape[1]
        if query.shape[1] == heads:
            return cls.forward_of_heads(query, key, value, block)
        parts = [
            cls.forward_of_heads(own, key, value, block._replace(mask=_mask_of(block.mask, heads, place)))
            for place, own in enumerate(query.unflatten(1, (heads, -1)).unbind(2))
        ]
        out, lse = (torch.stack(tensors, 2).flatten(1, 2) for tensors in list(zip(*parts, strict=True))[:2])
        return Output(out, lse, parts[0].state)

    @classmethod
    def backward(
        cls, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Output, block: Block
    ) -> Gradients:
        heads = key.shape[1]
        if query.shape[1] == heads:
            return cls.backward_of_heads(gradient, query, key, value, output, block)
        of_query: list[Tensor] = []
        sums: list[Tensor] = []
        divided = (tensor.unflatten(1, (heads, -1)).unbind(2) for tensor in (gradient, query, output.out, output.lse))
        for place, (of_out, own, out, lse) in enumerate(zip(*divided, strict=True)):
            masked = block._replace(mask=_mask_of(block.mask, heads, place))
            first, *shared = cls.backward_of_heads(of_out, own, key, value, Output(out, lse, output.state), masked)
            of_query.append(first)
            shared = [tensor.to(exact_dtype(tensor.dtype)) for tensor in shared]
            sums = [total.add_(tensor) for total, tensor in zip(sums, shared, strict=True)] if sums else shared
        return torch.stack(of_query, 2).flatten(1, 2), sums[0], sums[1]

    @staticmethod
    def forward_of_heads(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Output:
        raise NotImplementedError

    @staticmethod
    def backward_of_heads(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Output, block: Block
    ) -> Gradients:
        raise NotImplementedError


def _mask_of(mask: Tensor | None, heads: int, place: int) -> Tensor | None:
    """Return the mask of the query heads with number ``place`` in their groups."""
    return mask if mask is None or mask.shape[1] == 1 else mask.unflatten(1, (heads, -1))[:, :, place]


class _OnCpu(_OfEqualHeads):
    """torch's flash attention for the CPU."""

    @staticmethod
    def forward_of_heads(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Output:
        bias = _bias(query, block.mask)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, block.causal, attn_mask=bias, scale=block.scale
        )
        if bias is not None:  # it returns 0 for a query that sees nothing
            lse = lse.masked_fill((bias == -math.inf).all(-1), -math.inf)
        return Output(out, lse)

    @staticmethod
    def backward_of_heads(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Output, block: Block
    ) -> Gradients:
        gradients: Gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output.out, output.lse, 0.0, block.causal,
            attn_mask=_bias(query, block.mask), scale=block.scale,
        )  # fmt: skip
        return gradients


def _bias(query: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(exact_dtype(query.dtype))  # it misreads fp32 beside fp64
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -math.inf)


class _Efficient(_OfEqualHeads):
    """torch's memory-efficient attention, for CUDA."""

    _ALIGNMENT = 32  # tokens of the log-sum-exp

    @staticmethod
    def forward_of_heads(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Output:
        out, lse, *state = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, block.causal, scale=block.scale
        )
        return Output(out, lse[..., : query.shape[2]], tuple(state))

    @staticmethod
    def backward_of_heads(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Output, block: Block
    ) -> Gradients:
        missing = -query.shape[2] % _Efficient._ALIGNMENT
        lse = torch.nn.functional.pad(output.lse, (0, missing), value=math.inf).contiguous()
        of_query, of_key, of_value, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, None, output.out, lse, *output.state, 0.0, [True, True, True, False],
            block.causal, scale=block.scale,
        )  # fmt: skip
        return of_query, of_key, of_value


class _Flash(Plain):
    """torch's flash attention, for CUDA. It takes groups of heads as they are."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Output:
        out, lse, _, _, _, _, *state, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, block.causal, False, scale=block.scale
        )
        return Output(out, lse, tuple(state))

    @staticmethod
    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Output, block: Block
    ) -> Gradients:
        gradients: Gradients = aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, output.out, output.lse.contiguous(), None, None, query.shape[2], key.shape[2],
            0.0, block.causal, *output.state, scale=block.scale,
        )  # fmt: skip
        return gradients
