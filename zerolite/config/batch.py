"""Batch arithmetic: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world_size.

Pure arithmetic on plain integers. All sizes are in samples; the accumulation is a number of micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSizes:
    """A solved triangle. Micro and train batch size are both None where the user's own loader decides."""

    train: int | None
    micro: int | None
    accumulation: int


@dataclass(eq=False)
class BatchSizeError(ValueError):
    """The given values contradict each other.

    Attributes:
        key: the key the error is reported at.
        sentence: each value with its origin (given or derived), what does not fit, and what would.
        offers: (key, value) pairs; changing any single one of them to its value makes the triangle fit.
    """

    key: str
    sentence: str
    offers: list[tuple[str, int]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.key}: {self.sentence}"


def solve(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> BatchSizes:
    """Fill in what is not given (None), from what is.

    Raises:
        BatchSizeError: no integers of at least 1 satisfy the product.
    """
    if train is None:
        steps = 1 if accumulation is None else accumulation
        return BatchSizes(None if micro is None else micro * steps * world_size, micro, steps)
    if micro is not None and accumulation is not None:
        if train != micro * accumulation * world_size:
            raise _all_given(train, micro, accumulation, world_size)
        return BatchSizes(train, micro, accumulation)
    if micro is not None:
        if train % (micro * world_size):
            raise _one_missing(ACCUMULATION, train, (MICRO, micro), world_size)
        return BatchSizes(train, micro, train // (micro * world_size))
    steps = 1 if accumulation is None else accumulation
    if train % (steps * world_size):
        raise _one_missing(MICRO, train, (ACCUMULATION, accumulation), world_size)
    return BatchSizes(train, train // (steps * world_size), steps)


def _all_given(train: int, micro: int, accumulation: int, world_size: int) -> BatchSizeError:
    product = micro * accumulation * world_size
    offers = [(TRAIN, product)]
    if train % (accumulation * world_size) == 0:
        offers.append((MICRO, train // (accumulation * world_size)))
    if train % (micro * world_size) == 0:
        offers.append((ACCUMULATION, train // (micro * world_size)))
    sentence = (
        f"expected {micro} x {accumulation} x {world_size} = {product}, got {train} ({TRAIN} {train} given, {MICRO} "
        f"{micro} given, {ACCUMULATION} {accumulation} given, world size {world_size}); {_offer_text(offers)}, "
        f"or leave one of the three out"
    )
    return BatchSizeError(TRAIN, sentence, offers)


def _one_missing(missing: str, train: int, other: tuple[str, int | None], world_size: int) -> BatchSizeError:
    """train and the other value are given (other None: defaulted to 1), and the missing one would be a fraction."""
    other_key, other_value = other
    value = 1 if other_value is None else other_value
    unit = value * world_size
    offers = [(TRAIN, size) for size in (train // unit * unit, -(-train // unit) * unit) if size]
    if train % world_size == 0:
        offers += [(other_key, divisor) for divisor in _nearest_divisors(train // world_size, value)]
    origin = "derived: the default" if other_value is None else "given"
    sentence = (
        f"expected a multiple of {other_key} x world size = {value} x {world_size} = {unit}, got {train} "
        f"({TRAIN} {train} given, {other_key} {value} {origin}, world size {world_size}; {missing} derived would be "
        f"{train / unit:.4g}); {_offer_text(offers)}"
    )
    return BatchSizeError(TRAIN, sentence, offers)


def _offer_text(offers: list[tuple[str, int]]) -> str:
    by_key: dict[str, list[str]] = {}
    for key, value in offers:
        by_key.setdefault(key, []).append(str(value))
    return "what would fit: " + ", or ".join(f"{key} {' or '.join(values)}" for key, values in by_key.items())


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _nearest_divisors(number: int, target: int) -> list[int]:
    """The largest divisor of number below target and the smallest above it, where they exist."""
    found = divisors(number)
    below = [d for d in found if d < target][-1:]
    above = [d for d in found if d > target][:1]
    return below + above
