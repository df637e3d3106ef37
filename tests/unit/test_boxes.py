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


@pytest.mark.parametrize("shape", EMPTY)
def test_a_tensor_without_elements_has_no_boxes(shape: tuple[int, ...]) -> None:
    assert list(boxes_of_range(shape, 0, 0)) == []
    assert covers([], shape)


def test_a_large_shape_takes_no_time_for_each_element() -> None:
    boxes = list(boxes_of_range((1 << 20, 1 << 20, 3), 5, (1 << 41) - 1))
    assert sum(math.prod(sizes) for _, sizes in boxes) == (1 << 41) - 1
    assert len(boxes) <= 5


@pytest.mark.parametrize(("start", "numel"), [(-1, 1), (0, -1), (0, 13), (12, 1), (13, 0)])
def test_a_range_outside_the_tensor_is_refused(start: int, numel: int) -> None:
    with pytest.raises(ValueError, match=r"12 elements of \(3, 4\)"):
        list(boxes_of_range((3, 4), start, numel))


def members(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(low, low + size) for low, size in zip(*box, strict=True))))


def all_boxes(shape: tuple[int, ...]) -> list[Box]:
    sides = [[(low, high - low) for low in range(n) for high in range(low + 1, n + 1)] for n in shape]
    return [tuple(zip(*sides, strict=True)) if sides else ((), ()) for sides in itertools.product(*sides)]  # type: ignore[misc]


@pytest.mark.parametrize("shape", [(), (5,), (3, 3), (2, 2, 3)])
def test_intersections_are_those_of_sets(shape: tuple[int, ...]) -> None:
    boxes = all_boxes(shape)
    for one, other in itertools.product(boxes, boxes):
        common = intersection(one, other)
        expected = members(one) & members(other)
        assert (members(common) if common is not None else set()) == expected, (one, other)


@pytest.mark.parametrize("seed", range(5))
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
