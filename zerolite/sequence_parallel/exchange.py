"""All-to-alls between parts of the sequence and groups of heads (Jacobs et al., "DeepSpeed Ulysses", 2023).

    before                                  after                              4 tokens, 2 heads, 2 ranks
    rank 0   tokens 0 1, heads a b          rank 0   tokens 0 1 2 3, head a
    rank 1   tokens 2 3, heads a b          rank 1   tokens 0 1 2 3, head b

A rank sends all but 1 / ranks of what it has: with N tokens of width h over P ranks, query, key, value and output of a
layer are N h / P elements each, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zerolite.comm import Communicator

TAG = "sequence"
"""Tag of every collective of sequence parallelism in :func:`zerolite.comm.record`."""


def exchange(tensors: Sequence[Tensor], comm: Communicator, split: int, join: int) -> tuple[Tensor, ...]:
    """Divide each tensor along ``split`` among the ranks, and join what they send along ``join``: one all-to-all.

    Called on all ranks of ``comm`` with tensors of equal shapes and one dtype. The gradients take the way back.

    Args:
        split: a dimension whose length the number of ranks divides.
        join: a dimension that becomes as many times longer.
    """
    result: tuple[Tensor, ...] = _Exchange.apply(comm, split, join, *tensors)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, split: int, join: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.split, ctx.join = comm, split, join
        return _exchanged(tensors, comm, split, join)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> object:
        return None, None, None, *_exchanged(gradients, ctx.comm, ctx.join, ctx.split)


def _exchanged(tensors: Sequence[Tensor], comm: Communicator, split: int, join: int) -> tuple[Tensor, ...]:
    size = comm.world_size
    parts = [tensor.detach().unflatten(split, (size, -1)).movedim(split, 0) for tensor in tensors]
    sent = torch.cat([part.reshape(size, -1) for part in parts], 1)
    received = comm.all_to_all(sent.view(-1), TAG).wait().view_as(sent) if sent.numel() else sent
    columns = received.split([part[0].numel() for part in parts], 1)
    # The ranks' parts lie behind each other along a new first dimension, which joins ``join``.
    return tuple(
        column.reshape(part.shape).movedim(0, join).flatten(join, join + 1)
        for column, part in zip(columns, parts, strict=True)
    )
