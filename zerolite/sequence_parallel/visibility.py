"""Sight of each query in a sequence, by places in all of it, so that no mask of the whole is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Sight(Enum):
    """Share of a block of keys that a block of queries sees."""

    NOTHING = "nothing"
    ALL = "all"
    BEFORE = "before"  # each query the keys up to its own place, where both blocks are the same tokens
    SOME = "some"  # what a mask says


@dataclass(frozen=True)
class Visibility:
    """Sight of each query. It sees what all of these let it see.

    Attributes:
        causal: keys up to its own place.
        window: with ``causal``, this many of them; None: all.
        keys: bool [batch or 1, length], False for padding; None: all.
        documents: number of each token's document, [batch or 1, length], which sees itself alone; None: one document.
        dense: mask or bias of ``scaled_dot_product_attention``, [batch or 1, heads or 1, length or 1, length]; None:
            without.
    """

    causal: bool = False
    window: int | None = None
    keys: Tensor | None = None
    documents: Tensor | None = None
    dense: Tensor | None = None

    @property
    def masked(self) -> bool:
        """True if more than places decides what a query sees."""
        return not (self.keys is None and self.documents is None and self.dense is None)

    def sight(self, rows: range, columns: range) -> Sight:
        """Return how much of the keys at the places ``columns`` queries at ``rows`` see."""
        if self.causal and columns.start >= rows.stop:
            return Sight.NOTHING
        if self.window is not None and rows.start - (columns.stop - 1) >= self.window:
            return Sight.NOTHING
        if self.masked:
            return Sight.SOME
        reaches = self.window is None or rows.stop - 1 - columns.start < self.window
        if reaches and (not self.causal or columns.stop - 1 <= rows.start):
            return Sight.ALL
        return Sight.BEFORE if reaches and rows == columns else Sight.SOME

    def mask(self, rows: range, columns: range, device: torch.device) -> Tensor:
        """Return the mask of one block, [batch or 1, heads or 1, rows, columns]: bool, or a bias with -inf."""
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        column = torch.arange(columns.start, columns.stop, device=device)[None]
        sees = torch.ones(1, 1, len(rows), len(columns), dtype=torch.bool, device=device)
        if self.causal:
            sees &= column <= row
        if self.window is not None:
            sees &= row - column < self.window
        if self.keys is not None:
            sees = sees & self.keys[:, None, None, columns.start : columns.stop].to(device)
        if self.documents is not None:
            documents = self.documents[:, None, None]
            own, others = documents[..., rows.start : rows.stop], documents[..., columns.start : columns.stop]
            sees = sees & (own.mT == others)
        if self.dense is None:
            return sees
        lines = slice(None) if self.dense.shape[-2] == 1 else slice(rows.start, rows.stop)
        dense = self.dense[..., lines, columns.start : columns.stop]
        if dense.dtype == torch.bool:
            return sees & dense
        return dense.masked_fill(~sees, -math.inf)
