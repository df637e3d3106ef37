"""Flat ranges of tensors, as engines keep them, to boxes, as checkpoints keep them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zerolite.checkpoint.boxes import Box, boxes_of_range
from zerolite.checkpoint.planner import Shard, Target


@dataclass(frozen=True)
class FlatRange:
    """The elements from ``start`` on of the tensor ``key``, in the order in which memory holds a tensor of ``shape``
    and ``strides`` (without holes): ``values``, flat."""

    key: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    values: torch.Tensor

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes of the range, and views of their values."""
        order = sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim])
        back = sorted(range(len(order)), key=order.__getitem__)
        position = 0
        for offsets, sizes in boxes_of_range([self.shape[dim] for dim in order], self.start, self.values.numel()):
            numel = math.prod(sizes)
            view = self.values.narrow(0, position, numel).view(sizes).permute(back)
            yield (tuple(offsets[dim] for dim in back), tuple(sizes[dim] for dim in back)), view
            position += numel

    def shards(self) -> Iterator[Shard]:
        dtype = self.values.dtype
        for box, view in self.boxes():
            yield Shard(self.key, self.shape, dtype, box, view)

    def targets(self) -> Iterator[Target]:
        for box, view in self.boxes():
            yield Target(self.key, box, view)


def empty_shard(key: str, shape: Sequence[int], dtype: torch.dtype) -> Shard:
    """Of a tensor without elements, which is in no file."""
    return Shard(key, tuple(shape), dtype, None, torch.empty(0, dtype=dtype, device="cpu"))


def whole(key: str, tensor: torch.Tensor) -> FlatRange:
    """A tensor that fills its memory without holes; a copy of any other."""
    if not _dense(tensor):
        tensor = tensor.contiguous()
    return FlatRange(key, tuple(tensor.shape), tensor.stride(), 0, tensor.as_strided((tensor.numel(),), (1,)))


def _dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def cut_evenly(tensors: Sequence[FlatRange], rank: int, world_size: int) -> Iterator[FlatRange]:
    """Of tensors that every rank has whole, the part that ``rank`` writes: all of them in a row, cut into equal numbers
    of bytes. Given the same tensors in the same order on all ranks, the parts are everything."""
    total = sum(tensor.values.numel() * tensor.values.element_size() for tensor in tensors)
    low, high = rank * total // world_size, (rank + 1) * total // world_size
    position = 0
    for tensor in tensors:
        size, numel = tensor.values.element_size(), tensor.values.numel()
        start, end = (min(max(-(-(limit - position) // size), 0), numel) for limit in (low, high))
        if start < end:
            part = tensor.values.narrow(0, start, end - start)
            yield FlatRange(tensor.key, tensor.shape, tensor.strides, tensor.start + start, part)
        position += numel * size
