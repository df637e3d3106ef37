"""Idle time of pipeline ranks, simulated from their order of computations. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerolite.pipe.schedule_actions import Action

DURATIONS = {"forward": 1, "backward": 2, "backward of inputs": 1, "backward of weights": 1}
"""Assumed duration of each computation of one micro-batch in one part of the model. All parts take equally long, and
messages no time. A backward takes twice as long as a forward, and each of its halves as long as a forward."""

ASSUMPTION = (
    "The bubble assumes that all parts take equally long, a backward twice as long as a forward, and messages no time."
)


def bubble(orders: Sequence[Sequence[Action]], durations: Mapping[str, int] = DURATIONS) -> float:
    """Return the average share of a step in which a rank waits: 1 - work / (ranks × time).

    Args:
        orders: the computations of each rank, in its order.
        durations: duration of each kind of computation.

    Raises:
        ValueError: the orders deadlock.
    """
    # End times of forwards (F) and gradients of inputs (I), by part and micro-batch.
    ends: dict[tuple[str, int, int], int] = {}
    clocks, remaining = [0] * len(orders), [list(reversed(order)) for order in orders]
    parts = 1 + max((action.part for order in orders for action in order), default=0)
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(remaining):
            while order and all(needed in ends for needed in _dependencies(order[-1], parts)):
                action = order.pop()
                begin = max([clocks[rank], *(ends[needed] for needed in _dependencies(action, parts))])
                clocks[rank] = begin + durations[action.kind]
                if action.kind != "backward of weights":
                    name = "F" if action.kind == "forward" else "I"
                    ends[name, action.part, action.micro_batch] = clocks[rank]
                progress = True
    if any(remaining):
        raise ValueError("expected orders of computations in which every one can begin, got ranks that wait for ever")
    work = sum(durations[action.kind] for order in orders for action in order)
    return 1 - work / (len(orders) * max(clocks)) if work else 0.0


def _dependencies(action: Action, parts: int) -> list[tuple[str, int, int]]:
    """Return the computations that must end before ``action`` begins."""
    part, index = action.part, action.micro_batch
    if action.kind == "forward":
        return [("F", part - 1, index)] if part else []
    if action.kind == "backward of weights":
        return [("I", part, index)]
    return [("F", part, index), *([("I", part + 1, index)] if part + 1 < parts else [])]
