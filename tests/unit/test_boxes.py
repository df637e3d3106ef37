"""Ranges of flattened tensors as boxes, compared with torch's own indexing."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch

from zerolite.checkpoint.boxes import Box, BoxIndex, boxes_of_range, covers, intersection

SHAPES = [(), (1,), (7,), (1, 1), (3, 4), (5, 1), (1, 5), (2, 3, 4), (3, 1, 2), (2, 2, 3, 2), (2, 1, 2, 1, 3)]
EMPTY = [(0,), (0, 5), (5, 0), (2, 0, 3)]


def ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    numel = math.prod(shape)
    return ((start, end - start) for start in range(numel + 1) for end in range(start, numel + 1))


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (low, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, low, size)
    return tensor


@pytest.mark.parametrize("shape", SHAPES)
def test_every_range_is_its_boxes_in_order(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    for start, numel in ranges(shape):
        boxes = list(boxes_of_range(shape, start, numel))
        parts = [cut(tensor, box).reshape(-1) for box in boxes]
        assert all(len(offsets) == len(sizes) == len(shape) for offsets, sizes in boxes)
        assert all(min(sizes, default=1) > 0 for _, sizes in boxes)
        values = torch.cat(parts) if parts else torch.empty(0)
        assert values.tolist() == list(range(start, start + numel)), (start, numel)
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
        for part in parts:  # contiguous in the flattened tensor
            assert (part - part[0]).tolist() == list(range(len(part)))


@pytest.mark.parametrize("seed", range(2))
def test_the_index_finds_what_a_search_through_all_finds(seed: int) -> None:
    chance = random.Random(seed)
    shape = (11, 7, 3)
    numel = math.prod(shape)
    cuts = sorted({0, numel, *(chance.randrange(numel) for _ in range(9))})
    boxes = [box for low, high in itertools.pairwise(cuts) for box in boxes_of_range(shape, low, high - low)]
    chance.shuffle(boxes)
    assert covers(boxes, shape)
    index = BoxIndex(boxes)
    for _ in range(200):
        offsets = tuple(chance.randrange(n) for n in shape)
        wanted = (offsets, tuple(chance.randint(1, n - low) for n, low in zip(shape, offsets, strict=True)))
        expected = {i: common for i, box in enumerate(boxes) if (common := intersection(box, wanted)) is not None}
        assert dict(index.meeting(wanted)) == expected
        assert sum(math.prod(sizes) for _, sizes in expected.values()) == math.prod(wanted[1])


def test_what_covers_a_tensor_and_what_does_not() -> None:
    assert covers([((), ())], ())
    assert not covers([], ())
    assert covers([((0, 0), (1, 4)), ((1, 0), (2, 4))], (3, 4))
    assert not covers([((0, 0), (1, 4))], (3, 4))
    assert not covers([((0, 0), (3, 5))], (3, 4))
    assert not covers([((0, -1), (3, 4))], (3, 4))
    assert not covers([((0, 0), (3, 4)), ((0, 0), (3, 0))], (3, 4))
    assert not covers([((0,), (1,))], (0,))
