"""Tensor-parallel shard of a parameter: its ranges in the full tensor, and sums over other ranks.

:mod:`zerolite.tensor_parallel` and :mod:`zerolite.pipe` attach it; checkpoints, norm and state dicts read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True)
class Cut:
    """This rank's part of a tensor ``full_shape``, cut along ``dim``.

    Attributes:
        ranges: (start here, start in the full tensor, length) along ``dim``, ascending on both sides; several where
            parts that are fused in one tensor (query, key and value) are cut each.
        length: of ``dim`` here; what no range covers is padding, zeros that no checkpoint has.
        rank, size: which part of how many.

        full     | q0  q1 | k0  k1 | v0  v1 |      rank 0 of 2: ranges (0, 0, 1), (1, 2, 1), (2, 4, 1)
        rank 0   | q0 | k0 | v0 |
    """

    full_shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int, int], ...]
    length: int
    rank: int
    size: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.full_shape[: self.dim], self.length, *self.full_shape[self.dim + 1 :])

    @property
    def full_numel(self) -> int:
        return math.prod(self.full_shape)

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part, a new tensor ``local_shape``, of ``full``."""
        local = full.new_zeros(self.local_shape)
        for here, there, length in self.ranges:
            local.narrow(self.dim, here, length).copy_(full.narrow(self.dim, there, length))
        return local

    def into(self, full: torch.Tensor, local: torch.Tensor) -> None:
        """Write ``local``, this rank's part, into its places in ``full``."""
        for here, there, length in self.ranges:
            full.narrow(self.dim, there, length).copy_(local.narrow(self.dim, here, length))

    def boxes(
        self, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
        """A box of the part here as boxes of the full tensor: (offsets, sizes) there, and the (start, length) along
        ``dim`` inside the given box. Padding is left out."""
        dim = self.dim
        low, high = offsets[dim], offsets[dim] + sizes[dim]
        for here, there, length in self.ranges:
            start, stop = max(low, here), min(high, here + length)
            if start < stop:
                box = (*offsets[:dim], there + start - here, *offsets[dim + 1 :])
                yield box, (*sizes[:dim], stop - start, *sizes[dim + 1 :]), start - low, stop - start


_CUTS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_NAMES: WeakIdKeyDictionary = WeakIdKeyDictionary()
_PARTIAL: WeakIdKeyDictionary = WeakIdKeyDictionary()


def set_cut(parameter: torch.Tensor, cut: Cut) -> None:
    """``parameter`` holds that part from now on."""
    _CUTS[parameter] = cut


def cut_of(parameter: torch.Tensor) -> Cut | None:
    """None if the parameter is whole on every tensor rank."""
    found: Cut | None = _CUTS.get(parameter)
    return found


def set_names(parameter: torch.Tensor, names: Sequence[str]) -> None:
    """All names that ``parameter`` has in the whole model, in the order of registration: where several pipeline stages
    have it, each knows it by its own only."""
    _NAMES[parameter] = tuple(names)


def names_of(parameter: torch.Tensor) -> tuple[str, ...] | None:
    """None if its names here are all that it has."""
    found: tuple[str, ...] | None = _NAMES.get(parameter)
    return found


def mark_partial(parameter: torch.Tensor) -> None:
    """The gradient of ``parameter``, which every tensor rank holds whole, is the sum of theirs: each sees a part of the
    sequence only (sequence parallelism)."""
    _PARTIAL[parameter] = True


def is_partial(parameter: torch.Tensor) -> bool:
    return bool(_PARTIAL.get(parameter))
