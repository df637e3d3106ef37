"""Flat ranges of DeepSpeed's partitions that hold each parameter, in plain integers.

DeepSpeed flattens the trained parameters of a group and gives each rank a part; optimizer states have the same layout.
At stages 1 and 2 it concatenates the parameters and divides the result into equal parts, also within a parameter:

    | a        | b              | c  |pad|
    | rank 0      | rank 1      | rank 2 |        the padding at the end is not saved

At stage 3 it divides each parameter into equal parts, the last one padded, and each rank concatenates its parts:

    rank 0 | a[0:k] | b[0:m] |    rank 1 | a[k:] pad | b[m:] |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerolite.checkpoint.errors import CheckpointError


class PartitionSlice(NamedTuple):
    """Elements ``start`` to ``start + length`` of the partition of ``rank``."""

    rank: int
    start: int
    length: int


Slices = tuple[PartitionSlice, ...]


def equal_partitions(
    numels: Mapping[str, int], gaps: Sequence[int], lengths: Sequence[int], where: str
) -> dict[str, Slices]:
    """Return the slices of each parameter at stages 1 and 2, in the order of its elements.

    Args:
        numels: elements of the parameters, in order.
        gaps: unused elements after each parameter.
        lengths: length of each rank's saved partition.
        where: description of the group, for messages.

    Raises:
        CheckpointError: the numbers do not fit together.
    """
    needed, present, world_size = sum(numels.values()) + sum(gaps), sum(lengths), len(lengths)
    # DeepSpeed pads the flat buffer of a group to a multiple of 2 * world_size for NCCL, so there may be more elements.
    if not needed <= present < needed + max(1, 2 * world_size):
        raise CheckpointError(
            f"{where}: the parameters have {needed} elements together, but the partitions of {world_size} ranks "
            f"{present}; are all files from the same save?"
        )
    starts = [sum(lengths[:rank]) for rank in range(world_size)]
    filled = [length for start, length in zip(starts, lengths, strict=True) if start < needed]
    if any(length != filled[0] for length in filled[:-1]):
        raise CheckpointError(
            f"{where}: expected partitions of the same length on all ranks but the last, got {list(lengths)}; are all "
            f"files from the same save?"
        )
    slices, offset = {}, 0
    for (name, numel), gap in zip(numels.items(), gaps, strict=True):
        slices[name] = tuple(_slices_in(offset, offset + numel, starts, lengths))
        offset += numel + gap
    return slices


def _slices_in(start: int, stop: int, starts: Sequence[int], lengths: Sequence[int]) -> list[PartitionSlice]:
    found = []
    for rank, (first, length) in enumerate(zip(starts, lengths, strict=True)):
        low, high = max(start, first), min(stop, first + length)
        if low < high:
            found.append(PartitionSlice(rank, low - first, high - low))
    return found


def sliced_parameters(numels: Mapping[str, int], lengths: Sequence[int], where: str) -> dict[str, Slices]:
    """Return the slices of each parameter at stage 3; arguments as for :func:`equal_partitions`."""
    world_size = len(lengths)
    needed = sum(-(-numel // world_size) for numel in numels.values())
    if any(length != needed for length in lengths):
        raise CheckpointError(
            f"{where}: the parts of the parameters have {needed} elements together on each of {world_size} ranks, but "
            f"the partitions {list(lengths)}; are all files from the same save?"
        )
    slices, offset = {}, 0
    for name, numel in numels.items():
        slices[name] = partition_slices(numel, world_size, offset)
        offset += -(-numel // world_size)
    return slices


def partition_slices(numel: int, world_size: int, offset: int = 0) -> Slices:
    """Return the slices of a parameter at stage 3, which begins at ``offset`` on each rank, without padding."""
    part = -(-numel // world_size)
    lengths = [min(part, max(0, numel - rank * part)) for rank in range(world_size)]
    return tuple(PartitionSlice(rank, offset, length) for rank, length in enumerate(lengths) if length)
