"""Ranges of a flattened tensor as boxes of the tensor.

Pure: standard library only. A checkpoint stores boxes and a loader asks for boxes, so that the two may shard a tensor
differently. A box of a tensor of n dimensions is ``(offsets, sizes)``, n integers each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]


def boxes_of_range(shape: Sequence[int], start: int, numel: int, prefix: Shape = ()) -> Iterator[Box]:
    """Yield the elements ``[start, start + numel)`` of a tensor, flattened in row-major order, as boxes in the same
    order.

    There are at most 2 × dimensions − 1 boxes, each contiguous in the flattened tensor.

    Args:
        prefix: indices of leading dimensions, if ``shape`` is that of the part which they select.
    """
    fixed = (1,) * len(prefix)
    if not numel:
        return
    if len(shape) <= 1:
        yield prefix + (start,) * len(shape), fixed + (numel,) * len(shape)
        return
    # The first row may be incomplete, then come whole rows, and the last row may be incomplete.
    inner = math.prod(shape[1:])
    first, skipped = divmod(start, inner)
    if skipped:
        part = min(inner - skipped, numel)
        yield from boxes_of_range(shape[1:], skipped, part, (*prefix, first))
        first, numel = first + 1, numel - part
    rows, rest = divmod(numel, inner)
    if rows:
        yield (*prefix, first, *(0 for _ in shape[1:])), (*fixed, rows, *shape[1:])
    yield from boxes_of_range(shape[1:], 0, rest, (*prefix, first + rows))


def intersection(one: Box, other: Box) -> Box | None:
    """Return the box that lies in both, or None."""
    offsets = tuple(map(max, one[0], other[0]))
    sizes = tuple(
        min(a + n, b + m) - low for a, n, b, m, low in zip(one[0], one[1], other[0], other[1], offsets, strict=True)
    )
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


class BoxIndex:
    """The boxes of one tensor, without overlaps, to find those that intersect another box."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        first = [(box[0][0], box[0][0] + box[1][0]) if box[0] else (0, 1) for box in boxes]
        self._order = sorted(range(len(boxes)), key=first.__getitem__)
        self._starts = [first[index][0] for index in self._order]
        self._ends: list[int] = []  # largest end of the boxes so far: it never decreases, so bisect works
        for index in self._order:
            self._ends.append(max(first[index][1], self._ends[-1] if self._ends else 0))

    def intersections(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the index of every box that intersects ``box``, and the intersection."""
        low, high = (box[0][0], box[0][0] + box[1][0]) if box[0] else (0, 1)
        for place in range(bisect_left(self._ends, low + 1), bisect_left(self._starts, high)):
            index = self._order[place]
            common = intersection(self._boxes[index], box)
            if common is not None:
                yield index, common


def covers(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Return True if the boxes make up all of a tensor of ``shape``, each element once."""
    inside = all(
        low >= 0 and size > 0 and low + size <= length
        for offsets, sizes in boxes
        for low, size, length in zip(offsets, sizes, shape, strict=True)
    )
    return inside and sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape) and not _overlap(boxes)


def _overlap(boxes: Sequence[Box]) -> bool:
    index = BoxIndex(boxes)
    return any(sum(1 for _ in islice(index.intersections(box), 2)) > 1 for box in boxes)
