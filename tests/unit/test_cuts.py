"""Cuts: parts of whole tensors, and boxes of parts as boxes of the whole."""

from __future__ import annotations

import itertools

import pytest
import torch

from zerolite.tensor_parallel.cuts import Cut


def columns(rank: int, size: int) -> Cut:
    """Shards of [7, 3] along dimension 0, padded to a multiple."""
    length = -(-7 // size)
    start = min(rank * length, 7)
    own = min(length, 7 - start)
    return Cut((7, 3), 0, ((0, start, own),) if own else (), length, rank, size)


def fused(rank: int, size: int) -> Cut:
    """Shards of [2, 12, 3] along dimension 1: parts of 4, 4 and 4, each sharded."""
    share = 4 // size
    ranges = tuple((part * share, part * 4 + rank * share, share) for part in range(3))
    return Cut((2, 12, 3), 1, ranges, 3 * share, rank, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_padded_parts_make_up_the_whole(size: int) -> None:
    whole = torch.arange(1.0, 22.0).view(7, 3)
    again = torch.zeros(7, 3)
    for rank in range(size):
        cut = columns(rank, size)
        part = cut.of(whole)
        assert tuple(part.shape) == cut.local_shape
        covered = sum(length for _, _, length in cut.ranges)
        assert not part[covered:].any(), "padding is zero"
        cut.into(again, part)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_boxes_of_fused_parts(size: int) -> None:
    whole = torch.arange(72.0).view(2, 12, 3)
    seen = torch.zeros_like(whole)
    for rank in range(size):
        cut = fused(rank, size)
        part = cut.of(whole)
        for low, high in itertools.combinations(range(cut.length + 1), 2):
            for offsets, sizes, start, length in cut.boxes((0, low, 1), (2, high - low, 2)):
                box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                local = part[:, low:high, 1:3].narrow(1, start, length)
                assert torch.equal(whole[box], local)
        for offsets, sizes, _, _ in cut.boxes((0, 0, 0), cut.local_shape):
            seen[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    assert torch.equal(seen, torch.ones_like(seen)), "every element once"


def test_a_box_of_padding_alone_is_none() -> None:
    assert list(columns(3, 4).boxes((1, 0), (1, 3))) == []
