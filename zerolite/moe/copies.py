"""Rows that are copied to several places, and sums of these copies in an order that never varies.

    rows      a b c
    copies    a c a b       source 0 2 0 1      by_row 0 2 | 3 | 1      starts 0 2 3

The backward of a copy is the sum, and the backward of the sum is a copy. ``index_add`` and the backward of an index
would add with atomic operations on CUDA, in an order that varies from run to run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Copies(NamedTuple):
    """Copies of rows: the row of each, and the copies of each row.

    Attributes:
        source: row of each copy [copies].
        by_row: the copies of row 0, then those of row 1, and so on, each in their own order [copies].
        starts: place in ``by_row`` where the copies of each row begin [rows].
    """

    source: Tensor
    by_row: Tensor
    starts: Tensor

    @classmethod
    def of(cls, source: Tensor, rows: int) -> Copies:
        """Return the copies of the rows ``source`` out of ``rows``. The host waits for nothing."""
        counts = histogram(source, rows)
        return cls(source, source.argsort(stable=True), counts.cumsum(0) - counts)


def histogram(values: Tensor, size: int) -> Tensor:
    """Return the number of places of each number below ``size`` in ``values``."""
    # torch.bincount makes the host wait for CUDA, twice.
    flat = values.reshape(-1)
    return torch.zeros(size, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def copy_rows(rows: Tensor, copies: Copies) -> Tensor:
    """Return ``rows[copies.source]``."""
    copied: Tensor = _Copy.apply(rows, *copies)
    return copied


def sum_copies(tensor: Tensor, copies: Copies) -> Tensor:
    """Return the sum of the copies of each row. 16-bit values are added in fp32."""
    summed: Tensor = _Sum.apply(tensor, *copies)
    return summed


def added(tensor: Tensor, copies: Copies) -> Tensor:
    """Return the sums of :func:`sum_copies`, for tensors without a graph."""
    if not len(copies.source) or not len(copies.starts):
        return tensor.new_zeros(len(copies.starts), tensor.shape[1])
    # One kernel gathers and adds: a bag are the copies of a row.
    return torch.embedding_bag(tensor.contiguous(), copies.by_row, copies.starts)[0]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, by_row: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(source, by_row, starts)
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Sum.apply(gradient, *ctx.saved_tensors), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: Tensor, by_row: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(source, by_row, starts)
        return added(tensor.detach(), Copies(source, by_row, starts))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Copy.apply(gradient, *ctx.saved_tensors), None, None, None
