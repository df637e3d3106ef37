"""Idle time of pipeline ranks, simulated from their order of computations. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

DURATIONS = {"forward": 1, "backward": 2, "backward of inputs": 1, "backward of weights": 1}
"""Of one micro-batch in one part of the model: all parts take as long, a backward twice as long as a forward, and its
two halves one half each; what is sent takes no time."""

ASSUMED = (
    "The bubble is of parts that all take as long, with backwards twice as long as forwards and messages that take no "
    "time."
)


class ActionLike(Protocol):
    """See :class:`zerolite.pipe.order.Action`."""

    @property
    def kind(self) -> str: ...

    @property
    def part(self) -> int: ...

    @property
    def micro_batch(self) -> int: ...


def bubble(orders: Sequence[Sequence[ActionLike]], durations: Mapping[str, int] = DURATIONS) -> float:
    """The share of a step in which ranks wait, on average: 1 - work / (ranks × time), of what each rank computes in its
    own order. Raises ValueError if the orders never come to an end."""
    ends: dict[tuple[str, int, int], int] = {}
    clocks, places = [0] * len(orders), [0] * len(orders)
    parts = 1 + max((action.part for order in orders for action in order), default=0)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                needed = [ends.get(one) for one in _before(action, parts)]
                if None in needed:
                    break
                clocks[rank] = max([clocks[rank], *(end for end in needed if end is not None)])
                clocks[rank] += durations[action.kind]
                for name in _gives(action):
                    ends[name] = clocks[rank]
                places[rank] += 1
                moved = True
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        raise ValueError("expected orders of computations in which every one can begin, got ranks that wait for ever")
    work = sum(durations[action.kind] for order in orders for action in order)
    return 1 - work / (len(orders) * max(clocks)) if work else 0.0


def _before(action: ActionLike, parts: int) -> list[tuple[str, int, int]]:
    """Return the actions that must have ended when this one begins: forwards (F), gradients of inputs (I)."""
    part, index = action.part, action.micro_batch
    if action.kind == "forward":
        return [("F", part - 1, index)] if part else []
    if action.kind == "backward of weights":
        return [("I", part, index)]
    return [("F", part, index), *([("I", part + 1, index)] if part + 1 < parts else [])]


def _gives(action: ActionLike) -> list[tuple[str, int, int]]:
    letter = {"forward": "F", "backward": "I", "backward of inputs": "I"}.get(action.kind)
    return [] if letter is None else [(letter, action.part, action.micro_batch)]
