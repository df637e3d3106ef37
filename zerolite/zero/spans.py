"""Sub-groups: ranges of the shards that are updated at once. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Elements [low, high) of this rank's part of a bucket. last: whether the bucket ends here."""

    bucket: int
    low: int
    high: int
    last: bool


def whole(bucket: int, numel: int) -> Span:
    return Span(bucket, 0, numel, True)


def sub_groups(numels: Sequence[tuple[int, int]], limit: int, alignment: int) -> list[list[Span]]:
    """Spans of ``(bucket, elements)`` in their order, in groups of at most ``limit`` elements.

    A bucket is cut where a group is full, at multiples of ``alignment`` elements; alignment 0 cuts none, so that a
    larger bucket is a group of its own. Every bucket has a span, if an empty one.
    """
    groups: list[list[Span]] = []
    room = 0
    for bucket, numel in numels:
        if not alignment:
            if not groups or numel > room:
                groups.append([])
                room = limit
            groups[-1].append(whole(bucket, numel))
            room -= numel
            continue
        low = 0
        while True:
            if not groups or room < min(numel - low, alignment):
                groups.append([])
                room = max(limit, alignment)
            high = numel if numel - low <= room else low + room // alignment * alignment
            groups[-1].append(Span(bucket, low, high, high == numel))
            room -= high - low
            low = high
            if low == numel:
                break
    return groups
