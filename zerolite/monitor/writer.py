"""`Event` and the interface `Writer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Event = tuple[str, float, int]
"""(name, value, step): one point of the curve ``name``; ``step`` is its place on the x axis."""


class Writer(Protocol):
    """One destination. Made on rank 0 only, when the engine is built."""

    @property
    def name(self) -> str:
        """The block of the configuration that asked for it, and where it writes, for messages."""
        ...

    def write(self, events: Sequence[Event]) -> None:
        """Write ``events``. When this returns, ending the process, in whatever way, does not lose them."""
        ...

    def close(self) -> None:
        """Close the writer. May be called twice."""
        ...


def by_step(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """The values of each step by name, steps in the order in which they come first."""
    steps: dict[int, dict[str, float]] = {}
    for name, value, step in events:
        steps.setdefault(step, {})[name] = value
    return steps
