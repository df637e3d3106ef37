"""All-to-alls between parts of the sequence and groups of heads (Jacobs et al., "DeepSpeed Ulysses", 2023).

    before                                  after                              4 tokens, 2 heads, 2 ranks
    rank 0   tokens 0 1, heads a b          rank 0   tokens 0 1 2 3, head a
    rank 1   tokens 2 3, heads a b          rank 1   tokens 0 1 2 3, head b

A rank sends all but 1 / ranks of what it has: with N tokens of width h over P ranks, query, key, value and output of a
layer are N h / P elements each, however many ranks there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zerolite.comm import Communicator

TAG = "sequence"
"""Tag of every collective of sequence parallelism in :func:`zerolite.comm.record`."""


def exchange(tensor: Tensor, comm: Communicator, split: int, join: int) -> Tensor:
    """Divide ``tensor`` along ``split`` among the ranks, and join what they send along ``join``: one all-to-all.

    Called on all ranks of ``comm`` with tensors of equal shapes. The gradient takes the way back. Query, key and value
    go one after another: in one, what is sent and received would be three times as much memory.

    Args:
        split: a dimension whose length the number of ranks divides.
        join: a dimension that becomes as many times longer.
    """
    result: Tensor = _Exchange.apply(tensor, comm, split, join)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator, split: int, join: int) -> Tensor:
        ctx.comm, ctx.split, ctx.join = comm, split, join
        return _exchanged(tensor.detach(), comm, split, join)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> object:
        return _exchanged(gradient, ctx.comm, ctx.join, ctx.split), None, None, None


def _exchanged(tensor: Tensor, comm: Communicator, split: int, join: int) -> Tensor:
    parts = tensor.unflatten(split, (comm.world_size, -1)).movedim(split, 0)
    if parts.numel():
        parts = comm.all_to_all(parts.reshape(-1), TAG).wait().view(parts.shape)
    # The ranks' parts lie behind each other along a new first dimension, which joins ``join``.
    return parts.movedim(0, join).flatten(join, join + 1)


def swap(tensor: Tensor, comm: Communicator, dimension: int, back: bool = False) -> Tensor:
    """Swap the second half of ``tensor`` along ``dimension`` with the rank's mirror image, ``size - 1 - rank``.

    What comes from an earlier part of the sequence is put first. Called on all ranks of ``comm`` with tensors of equal
    shapes. The gradient takes the way back.

    Args:
        back: swap what has been swapped.
    """
    result: Tensor = _Swap.apply(tensor, comm, dimension, back)
    return result


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator, dimension: int, back: bool) -> Tensor:
        ctx.comm, ctx.dimension, ctx.back = comm, dimension, back
        return _swapped(tensor.detach(), comm, dimension, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> object:
        return _swapped(gradient, ctx.comm, ctx.dimension, not ctx.back), None, None, None


def _swapped(tensor: Tensor, comm: Communicator, dimension: int, back: bool) -> Tensor:
    length, mirror = tensor.shape[dimension], comm.world_size - 1 - comm.rank
    turned = comm.rank > mirror  # its own first half comes after what it receives
    half = length // 2
    if back and turned:
        sent, kept = tensor.split([half, length - half], dimension)
    else:
        kept, sent = tensor.split([length - half, half], dimension)
    received = sent
    if sent.numel():
        received = comm.permute(sent.reshape(-1), mirror, mirror, TAG).wait().view(sent.shape)
    return torch.cat([received, kept] if turned and not back else [kept, received], dimension)
