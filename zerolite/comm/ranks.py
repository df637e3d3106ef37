"""Lists of ranks as text."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 7``, ``ranks 0 and 2`` or ``ranks 0-6, 9 and 11``: in order, three or more in a row as a range."""
    numbers = sorted(set(ranks))
    parts: list[str] = []
    for _, pairs in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    several = "s" if len(numbers) > 1 else ""
    return f"rank{several} {list_of(parts)}"


def list_of(parts: Sequence[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def ranks_by_value(values: Sequence[T]) -> dict[T, list[int]]:
    """Return the ranks that have each of ``values`` (in rank order); the value of the lowest rank comes first."""
    found: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found
