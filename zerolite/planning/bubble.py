"""Idle time of pipeline ranks, simulated from their order of computations. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerolite.pipe.schedule_actions import Action

DURATIONS = {"forward": 1, "backward": 2, "backward of inputs": 1, "backward of weights": 1}
"""Duration of each computation of one micro-batch in one part of the model. All parts are assumed equal, a backward
twice as long as a forward, each of its halves as long as a forward, and messages instantaneous."""

ASSUMED = (
    "The bubble is of parts that all take as long, with backwards twice as long as forwards and messages that take no "
    "time."
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
    clocks, waiting = [0] * len(orders), [list(reversed(order)) for order in orders]
    parts = 1 + max((action.part for order in orders for action in order), default=0)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(waiting):
            while order:
                action = order[-1]
                needed = [ends.get(one) for one in _before(action, parts)]
                if None in needed:
                    break
                clocks[rank] = max([clocks[rank], *(end for end in needed if end is not None)])
                clocks[rank] += durations[action.kind]
                if action.kind != "backward of weights":
                    name = "F" if action.kind == "forward" else "I"
                    ends[name, action.part, action.micro_batch] = clocks[rank]
                order.pop()
                moved = True
    if any(waiting):
        raise ValueError("expected orders of computations in which every one can begin, got ranks that wait for ever")
    work = sum(durations[action.kind] for order in orders for action in order)
    return 1 - work / (len(orders) * max(clocks)) if work else 0.0


def _before(action: Action, parts: int) -> list[tuple[str, int, int]]:
    """Return the computations that must end before ``action`` begins."""
    part, index = action.part, action.micro_batch
    if action.kind == "forward":
        return [("F", part - 1, index)] if part else []
    if action.kind == "backward of weights":
        return [("I", part, index)]
    return [("F", part, index), *([("I", part + 1, index)] if part + 1 < parts else [])]
