"""Numbers that say how many tokens experts have: read from the device, and in a plan taken to be equal.

A plan runs on tensors without values. There all sets of experts are chosen equally often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from zerolite.utils.accelerator import host_values, is_fake


def read_numbers(tensor: Tensor, in_plan: Sequence[int]) -> list[int]:
    """Return the elements of a small tensor, for which the host waits.

    Args:
        in_plan: the elements in a plan.
    """
    numbers = [int(number) for number in host_values(tensor)]
    return list(in_plan) if is_fake(tensor) else numbers


def equal_loads(pairs: int, experts: int) -> list[int]:
    """Return the pairs of a token and an expert that each of ``experts`` has, of ``pairs``."""
    return [pairs // experts + (place < pairs % experts) for place in range(experts)]


def equal_rows(tokens: int, chosen: int, share: int, ranks: int) -> int:
    """Return how many of ``tokens`` a rank gets, to which they go once for all their experts there.

    Args:
        tokens: of one rank.
        chosen: experts of a token.
        share: experts of a rank.
        ranks: that have all experts together.
    """
    without = math.comb(share * (ranks - 1), chosen) / math.comb(share * ranks, chosen)
    return round(tokens * (1 - without))
