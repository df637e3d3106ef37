"""Batch arithmetic: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world_size.

Pure arithmetic on plain integers. All sizes are in samples; the accumulation is a number of micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


class BatchSizes(NamedTuple):
    """The three sizes. Train and micro batch size are both None if the user's own loader decides."""

    train: int | None
    micro: int | None
    accumulation: int


def solve(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> BatchSizes:
    """Derive the sizes that are None from the others.

    Args:
        train: train batch size, in samples.
        micro: micro-batch size of one rank, in samples.
        accumulation: micro-batches per optimizer step.
        world_size: number of data-parallel ranks.

    Raises:
        ConfigError: no integers of at least 1 satisfy the product.
    """
    steps = 1 if accumulation is None else accumulation
    if train is None:
        return BatchSizes(None if micro is None else micro * steps * world_size, micro, steps)
    if micro is None:
        return BatchSizes(train, _quotient(train, ACCUMULATION, steps, world_size), steps)
    if accumulation is None:
        return BatchSizes(train, micro, _quotient(train, MICRO, micro, world_size))
    product = micro * accumulation * world_size
    if train != product:
        sentence = (
            f"expected {MICRO} {micro} x {ACCUMULATION} {accumulation} x world size {world_size} = {product}, got "
            f"{train}; write {product}, or leave one of the three out"
        )
        raise ConfigError([(TRAIN, sentence)])
    return BatchSizes(train, micro, accumulation)


def _quotient(train: int, key: str, value: int, world_size: int) -> int:
    """Return the third size, from the train batch size and the one at `key`."""
    unit = value * world_size
    if train % unit:
        near = " or ".join(str(size) for size in (train // unit * unit, -(-train // unit) * unit) if size)
        sentence = (
            f"expected a multiple of {key} {value} x world size {world_size} = {unit}, got {train}; write {near}, or "
            f"another {key}"
        )
        raise ConfigError([(TRAIN, sentence)])
    return train // unit
