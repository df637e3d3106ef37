"""Sub-groups: spans of shards that are updated at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from zerolite.zero.bucket import Bucket

Key = TypeVar("Key")


class Span(NamedTuple):
    """Elements [low, high) of this rank's shard of a bucket. last: True if the shard ends at ``high``."""

    bucket: Bucket
    low: int
    high: int
    last: bool


def full_span(bucket: Bucket, numel: int) -> Span:
    """Return the span of a full shard of ``numel`` elements."""
    return Span(bucket, 0, numel, True)


def sub_groups(numels: Sequence[tuple[Bucket, int]], limit: int, alignment: int) -> list[list[Span]]:
    """Divide shards in their order into groups of at most ``limit`` elements. An empty shard has an empty span.

    Args:
        numels: (bucket, elements of its shard).
        limit: most elements of a group.
        alignment: shards may be split at multiples of so many elements. With 0 none is split, and a shard above the
            limit is a group of its own.
    """
    groups: list[list[Span]] = []
    room = 0
    for bucket, numel in numels:
        if not alignment:
            if not groups or numel > room:
                groups.append([])
                room = limit
            groups[-1].append(full_span(bucket, numel))
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


def group_by_kind(kinds: Iterable[Hashable | None]) -> list[tuple[int, ...]]:
    """Return the indices of equal kinds, one tuple per kind. Entries that are None are left out."""
    found: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        if kind is not None:
            found.setdefault(kind, []).append(index)
    return [tuple(indices) for indices in found.values()]


def segments(
    spans: Iterable[Span], owned: Callable[[Bucket], Iterable[tuple[int, int, Key]]]
) -> list[tuple[int, int, int, Key]]:
    """Return the segments of some spans. Adjacent ranges with equal keys form one segment.

    Args:
        spans: the spans.
        owned: function that returns the ranges of a bucket's shard in order: start, elements and key of each.

    Returns:
        (index in ``spans``, start from the span's ``low``, elements, key) of each segment.
    """
    found: list[tuple[int, int, int, Key]] = []
    for index, (bucket, low, high, _) in enumerate(spans):
        for first, count, key in owned(bucket):
            start = max(first, low)
            numel = min(first + count, high) - start
            if numel <= 0:
                continue
            last = found[-1] if found else None
            if last and (last[0], last[1] + last[2], last[3]) == (index, start - low, key):
                found[-1] = index, last[1], last[2] + numel, key
            else:
                found.append((index, start - low, numel, key))
    return found
