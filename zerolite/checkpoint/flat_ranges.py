"""Parts of tensors that a rank writes and reads: boxes with their values, and an engine's flat ranges as boxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from zerolite.checkpoint.boxes import Box, boxes_of_range
from zerolite.tensor_parallel.shard_spec import ShardSpec
from zerolite.zero.flat import dense_strides, flattened


@dataclass(frozen=True)
class Shard:
    """A box of a tensor, with its memory on this rank. A save writes it, on this rank alone; a load fills it.

    Attributes:
        key: name of the tensor in the checkpoint.
        shape: shape of the full tensor.
        dtype: dtype of ``values``; a load casts.
        box: the box; one without elements declares an empty tensor, which is in no file.
        values: tensor of the box's sizes, on any device and of any strides, or a function that returns it when it is
            written.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    values: torch.Tensor | Callable[[], torch.Tensor]

    @classmethod
    def whole(cls, key: str, tensor: torch.Tensor) -> Shard:
        """Return the shard that is all of ``tensor``."""
        return cls(key, tuple(tensor.shape), tensor.dtype, everything(tensor.shape), tensor)

    @property
    def nbytes(self) -> int:
        return math.prod(self.box[1]) * self.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        """Return the values."""
        return self.values if isinstance(self.values, torch.Tensor) else self.values()


def everything(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor of ``shape``."""
    return (0,) * len(shape), tuple(shape)


@dataclass(frozen=True)
class FlatRange:
    """A range of a flattened tensor, with its values.

    The tensor is flattened in the order in which memory holds a tensor of ``shape`` and ``strides``, without holes.

    Attributes:
        key: name of the tensor in the checkpoint.
        shape: shape of the tensor here, which may be a tensor-parallel shard.
        strides: its strides.
        start: first element of the range.
        values: the elements, flat.
        spec: which shard of the full tensor it is; None for the full tensor.
    """

    key: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    values: torch.Tensor
    spec: ShardSpec | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.shape if self.spec is None else self.spec.full_shape

    @property
    def is_of_experts(self) -> bool:
        """True for a part of experts, of which other ranks have the rest."""
        return self.spec is not None and self.spec.dimension == "expert"

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the boxes of the range in the full tensor, and views of their values."""
        for box, view in self._boxes_here():
            yield from boxes_in_full_tensor(box, view, self.spec)

    def _boxes_here(self) -> Iterator[tuple[Box, torch.Tensor]]:
        # Boxes are computed in the order of memory (channels_last has another one), and their dimensions permuted back.
        order = sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim])
        back = sorted(range(len(order)), key=order.__getitem__)
        position = 0
        for offsets, sizes in boxes_of_range([self.shape[dim] for dim in order], self.start, self.values.numel()):
            numel = math.prod(sizes)
            view = self.values.narrow(0, position, numel).view(sizes).permute(back)
            yield (tuple(offsets[dim] for dim in back), tuple(sizes[dim] for dim in back)), view
            position += numel

    def shards(self) -> Iterator[Shard]:
        for box, view in self.boxes():
            yield Shard(self.key, self.full_shape, self.values.dtype, box, view)


def shards_of(key: str, tensor: torch.Tensor, spec: ShardSpec | None = None) -> Iterator[Shard]:
    """Yield a tensor, or the shard ``spec`` of one, as shards that are views of it."""
    full_shape = tuple(tensor.shape) if spec is None else spec.full_shape
    for box, view in boxes_in_full_tensor(everything(tensor.shape), tensor, spec):
        yield Shard(key, full_shape, tensor.dtype, box, view)


def boxes_in_full_tensor(box: Box, values: torch.Tensor, spec: ShardSpec | None) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield a box of a shard as boxes of the full tensor, with views of their ``values``. Padding is left out."""
    if spec is None:
        yield box, values
        return
    for offsets, sizes, start, length in spec.boxes(*box):
        yield (offsets, sizes), values.narrow(spec.dim, start, length)


def range_of(key: str, tensor: torch.Tensor, spec: ShardSpec | None = None) -> FlatRange:
    """Return a tensor, or the shard ``spec`` of one, as one range. It is copied only if its memory has holes."""
    strides = dense_strides(tensor)
    return FlatRange(key, tuple(tensor.shape), strides, 0, flattened(tensor, strides), spec)


def split_evenly(tensors: Sequence[FlatRange], rank: int, world_size: int) -> Iterator[FlatRange]:
    """Yield the ranges that ``rank`` writes of tensors that every rank holds.

    The tensors are taken as one sequence of bytes, divided equally. With the same tensors in the same order on all
    ranks, the ranges of all ranks together are everything.
    """
    total = sum(tensor.values.numel() * tensor.values.element_size() for tensor in tensors)
    low, high = rank * total // world_size, (rank + 1) * total // world_size
    position = 0
    for tensor in tensors:
        size, numel = tensor.values.element_size(), tensor.values.numel()
        # Limits in bytes are rounded up to elements, on both sides of the border alike: no element is lost or doubled.
        start, end = (min(max(-(-(limit - position) // size), 0), numel) for limit in (low, high))
        if start < end:
            part = tensor.values.narrow(0, start, end - start)
            yield replace(tensor, start=tensor.start + start, values=part)
        position += numel * size
