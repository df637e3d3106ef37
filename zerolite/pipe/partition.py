"""Partition of layers into pipeline stages. Standard library only.

A partition of n layers into p parts is p + 1 ascending numbers, from 0 to n. Part i has the layers from the i-th number
up to the next one. No part is empty.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence


def bounds_of(method: str, names: Sequence[str], parts: int, layer_weights: Callable[[], Sequence[float]]) -> list[int]:
    """Divide layers into ``parts`` by a partition_method of the config.

    Args:
        method: "uniform", "parameters" or "type:REGEX".
        names: class names of the layers.
        parts: number of parts.
        layer_weights: returns the number of trained parameters of each layer.

    Raises:
        ValueError: the method is unknown, or it cannot divide these layers.
    """
    if parts == 1:
        return [0, len(names)]
    if method == "uniform":
        return uniform(len(names), parts)
    if method.lower().startswith("type:"):
        return by_type(names, method[len("type:") :], parts)
    if method != "parameters":
        raise ValueError(f'partition_method: expected "parameters", "uniform" or "type:REGEX", got {method!r}')
    return balanced(layer_weights(), parts)


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Return the partition whose heaviest part is the lightest, and among these the one with the most even parts.

    Args:
        weights: weight of each layer, 0 or more.

    Raises:
        ValueError: there are fewer layers than parts.
    """
    count = len(weights)
    check_layer_count(count, parts)
    sums = list(itertools.accumulate(weights, initial=0.0))
    heaviest = _best(sums, parts, math.inf, max)[0]
    # Of parts with the same sum, the most even ones have the least sum of squares.
    return _best(sums, parts, heaviest, lambda total, part: total + part * part)[1]


def _best(
    sums: list[float], parts: int, limit: float, combine: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Find the partition with the least cost by dynamic programming.

    Args:
        sums: for each layer, the sum of the weights before it.
        parts: number of parts.
        limit: largest weight of a part.
        combine: called with the cost of the first parts and the weight of one more part, returns their cost.

    Returns:
        The least cost, and the partition.
    """
    count = len(sums) - 1
    cost = [0.0] + [math.inf] * count
    starts: list[list[int]] = []
    for part in range(1, parts + 1):
        new, start = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(part, count - (parts - part) + 1):
            for low in range(end - 1, part - 2, -1):
                weight = sums[end] - sums[low]
                if weight > limit:  # no weight is negative, so an earlier start would be even heavier
                    break
                total = combine(cost[low], weight)
                if total < new[end]:
                    new[end], start[end] = total, low
        cost = new
        starts.append(start)
    bounds = [count]
    for start in reversed(starts):
        bounds.append(start[bounds[-1]])
    return cost[count], bounds[::-1]


def uniform(count: int, parts: int) -> list[int]:
    """Divide into parts of equally many layers. The first parts have one more if the layers do not divide evenly."""
    check_layer_count(count, parts)
    each, rest = divmod(count, parts)
    return [part * each + min(part, rest) for part in range(parts + 1)]


def by_type(names: Sequence[str], pattern: str, parts: int) -> list[int]:
    """Divide so that each part has equally many layers whose class name contains a match of ``pattern``, ignoring case.

    Raises ValueError if nothing matches or the pattern is invalid.
    """
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(
            f'pipeline.partition_method: expected "type:" and a regular expression, got {pattern!r}: {error}'
        ) from None
    weights = [1.0 if expression.search(name) else 0.0 for name in names]
    if not any(weights):
        listed = ", ".join(dict.fromkeys(names))
        raise ValueError(
            f"pipeline.partition_method: expected type:{pattern} to match the class of a layer, got none among "
            f"{listed}; name one of these"
        )
    return balanced(weights, parts)


def check_layer_count(count: int, parts: int) -> None:
    if count < parts:
        raise ValueError(
            f"expected at least as many layers as parts of the pipeline (pipeline.stages × pipeline.chunks = {parts}), "
            f"got {count}; use fewer stages or chunks"
        )


def ranks_of_parts(stages: int, chunks: int, v_shaped: bool) -> list[int]:
    """Return the pipeline rank of each of ``stages × chunks`` parts: in a loop, or as in a V (``v_shaped``).

    For 2 stages and 2 chunks: 0 1 0 1 in a loop, 0 1 1 0 in a V.
    """
    ranks: list[int] = []
    for chunk in range(chunks):
        ranks += range(stages)[::-1] if v_shaped and chunk % 2 else range(stages)
    return ranks
