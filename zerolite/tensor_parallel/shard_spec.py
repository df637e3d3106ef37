"""Tensor-parallel shard of a parameter: its ranges in the full tensor, its names, and if its gradient is partial.

:mod:`zerolite.tensor_parallel` and :mod:`zerolite.pipe` record it. Checkpoints, the gradient norm and state dicts read
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zerolite.comm import Communicator


@dataclass(frozen=True)
class ShardSpec:
    """This rank's shard of a tensor of shape ``full_shape``, divided along ``dim``.

    Attributes:
        full_shape: shape of the full tensor.
        dim: the dimension that is sharded.
        ranges: (start in the shard, start in the full tensor, length) along ``dim``, ascending in both. There are
            several if fused parts (query, key and value) are sharded each.
        length: length of ``dim`` in the shard. Elements outside of all ranges are padding: zeros, not in checkpoints.
        rank: index of this shard.
        size: number of shards.
        dimension: dimension of the grid whose ranks have the other shards: "tensor", or "expert" for experts.

        full     | q0  q1 | k0  k1 | v0  v1 |      rank 0 of 2: ranges (0, 0, 1), (1, 2, 1), (2, 4, 1)
        rank 0   | q0 | k0 | v0 |
    """

    full_shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int, int], ...]
    length: int
    rank: int
    size: int
    dimension: str = "tensor"

    @classmethod
    def of_parts(cls, shape: Sequence[int], dim: int, parts: Sequence[int], comm: Communicator) -> ShardSpec:
        """Return the spec of equal shares of ``parts``, the lengths that are fused along ``dim``.

        Raises ValueError if one of them cannot be shared equally.
        """
        local_start = full_start = 0
        ranges = []
        for length in parts:
            if length % comm.world_size:
                raise ValueError(
                    f"expected sizes that are multiples of {comm.world_size} tensor-parallel ranks, got {length} along "
                    f"dimension {dim} of shape {list(shape)}"
                )
            share = length // comm.world_size
            ranges.append((local_start, full_start + comm.rank * share, share))
            local_start, full_start = local_start + share, full_start + length
        if full_start != shape[dim]:
            raise ValueError(
                f"expected parts that add up to {shape[dim]}, the length along dimension {dim} of shape {list(shape)}, "
                f"got {list(parts)}, which add up to {full_start}"
            )
        if len(ranges) > 1 and comm.world_size == 1:
            ranges = [(0, 0, local_start)]
        return cls(tuple(shape), dim, tuple(ranges), local_start, comm.rank, comm.world_size)

    @classmethod
    def of_rows(cls, shape: Sequence[int], dim: int, comm: Communicator) -> ShardSpec:
        """Return the spec of one range along ``dim``, equally long on all ranks. The last ranks are padded."""
        length = math.ceil(shape[dim] / comm.world_size)
        start = min(comm.rank * length, shape[dim])
        rows = min(length, shape[dim] - start)
        return cls(tuple(shape), dim, ((0, start, rows),) if rows else (), length, comm.rank, comm.world_size)

    @classmethod
    def of_experts(cls, shape: Sequence[int], rank: int, size: int) -> ShardSpec:
        """Return the spec of the experts of one of ``size`` ranks, whose number is a multiple of it."""
        share = shape[0] // size
        return cls(tuple(shape), 0, ((0, rank * share, share),), share, rank, size, "expert")

    @property
    def of_all_ranks(self) -> tuple[ShardSpec, ...]:
        """The shards of experts of all ranks."""
        return tuple(self.of_experts(self.full_shape, rank, self.size) for rank in range(self.size))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.full_shape[: self.dim], self.length, *self.full_shape[self.dim + 1 :])

    @property
    def full_numel(self) -> int:
        return math.prod(self.full_shape)

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of ``full`` as a new tensor of ``local_shape``."""
        local = full.new_zeros(self.local_shape)
        for local_start, full_start, length in self.ranges:
            local.narrow(self.dim, local_start, length).copy_(full.narrow(self.dim, full_start, length))
        return local

    def into(self, full: torch.Tensor, local: torch.Tensor) -> None:
        """Write ``local``, this rank's shard, to its ranges in ``full``."""
        for local_start, full_start, length in self.ranges:
            full.narrow(self.dim, full_start, length).copy_(local.narrow(self.dim, local_start, length))

    def boxes(
        self, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
        """Yield the boxes of the full tensor that a box of the shard covers, without padding.

        Args:
            offsets: offsets of the box in the shard.
            sizes: its sizes.

        Yields:
            Offsets and sizes in the full tensor, and start and length within the given box along ``dim``.
        """
        dim = self.dim
        low, high = offsets[dim], offsets[dim] + sizes[dim]
        for local_start, full_start, length in self.ranges:
            start, stop = max(low, local_start), min(high, local_start + length)
            if start < stop:
                box = (*offsets[:dim], full_start + start - local_start, *offsets[dim + 1 :])
                yield box, (*sizes[:dim], stop - start, *sizes[dim + 1 :]), start - low, stop - start


# In dictionaries and not as attributes of the parameter, which torch would pickle with it.
_SPECS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_NAMES: WeakIdKeyDictionary = WeakIdKeyDictionary()
_PARTIAL: WeakIdKeyDictionary = WeakIdKeyDictionary()


def set_shard_spec(parameter: torch.Tensor, spec: ShardSpec) -> None:
    """Record that ``parameter`` holds this shard."""
    _SPECS[parameter] = spec


def shard_spec_of(parameter: torch.Tensor) -> ShardSpec | None:
    """Return the shard that ``parameter`` holds; None if every tensor-parallel rank has the full parameter."""
    spec: ShardSpec | None = _SPECS.get(parameter)
    return spec


def is_of_experts(parameter: torch.Tensor) -> bool:
    """Return True for a parameter that has this rank's experts, where the ranks have different ones."""
    spec = shard_spec_of(parameter)
    return spec is not None and spec.dimension == "expert"


@torch.no_grad()
def shard_parameter(parameter: torch.nn.Parameter | None, spec: ShardSpec) -> None:
    """Reduce ``parameter`` to this rank's shard. It stays the same object, and is sharded once if it is used twice."""
    before = None if parameter is None else shard_spec_of(parameter)
    if parameter is None or before == spec:
        return
    if before is not None:
        raise ValueError(f"expected one way of sharding a parameter, got {before} and {spec}")
    parameter.data = spec.of(parameter.data)
    set_shard_spec(parameter, spec)


def set_names(parameter: torch.Tensor, names: Sequence[str]) -> None:
    """Record all names of ``parameter`` in the full model, in the order of registration.

    A stage's own model has only the stage's name of a parameter that several pipeline stages share.
    """
    _NAMES[parameter] = tuple(names)


def names_of(parameter: torch.Tensor) -> tuple[str, ...] | None:
    """Return the names set by :func:`set_names`; None if the parameter has no names on other stages."""
    names: tuple[str, ...] | None = _NAMES.get(parameter)
    return names


def mark_partial(parameter: torch.Tensor) -> None:
    """Record that the gradient of ``parameter`` is the sum of what the tensor-parallel ranks compute.

    All of them have the parameter, but for example each has only a part of the sequence.
    """
    _PARTIAL[parameter] = True


def is_partial(parameter: torch.Tensor) -> bool:
    return bool(_PARTIAL.get(parameter))
