"""Many small gradients into one bucket with few calls: on a fast device the calls cost more than the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerolite.runtime.zero.buffer import destinations, flattened
from zerolite.runtime.zero.layout import Bucket

_SMALL = 512  # elements of a parameter; buckets whose parameters have fewer on average are filled in one call
_LARGEST = 1 << 20  # elements of such a bucket, of which each costs four bytes here


def many_small(bucket: Bucket) -> bool:
    """Whether moving gradients one by one costs more in calls than in bytes."""
    numel = sum(slot.numel for slot in bucket.slots)
    return len(bucket.slots) > 1 and 0 < numel <= _SMALL * len(bucket.slots) and bucket.numel <= _LARGEST


class BucketFiller:
    """Writes a whole bucket from the gradients of all its slots, zeros in between, in one call."""

    def __init__(self, bucket: Bucket, strides: Sequence[tuple[int, ...]], device: torch.device) -> None:
        filled = [slot for slot in bucket.slots if slot.numel]
        self._indices = [slot.index for slot in filled]
        # In row-major order flattening is one call for all; other memory formats are brought into their own order.
        self._formats = {s.index: strides[s.index] for s in filled if not _row_major(strides[s.index])}
        self._zero: dict[torch.dtype, torch.Tensor] = {}
        # Where each element of the bucket lies in the concatenated gradients, whose last element is a zero.
        source = torch.full((bucket.numel,), sum(slot.numel for slot in bucket.slots), dtype=torch.int32)
        position = 0
        for slot in bucket.slots:
            values = torch.arange(position, position + slot.numel, dtype=torch.int32)
            for place, part in destinations(source, bucket, slot, values, (1,)):
                place.copy_(part)
            position += slot.numel
        self._source = source.to(device)

    def fill(self, local: torch.Tensor, gradients: dict[int, torch.Tensor]) -> bool:
        """False, and nothing done, unless every slot has a gradient of ``local``'s dtype."""
        if len(gradients) != len(self._indices):
            return False
        flats = [gradients[index] for index in self._indices]
        if any(gradient.dtype != local.dtype for gradient in flats):
            return False
        for position, index in enumerate(self._indices if self._formats else ()):
            if index in self._formats:
                flats[position] = flattened(flats[position], self._formats[index])
        zero = self._zero.setdefault(local.dtype, local.new_zeros(1))
        joined = torch._C._nn.flatten_dense_tensors([*flats, zero])
        torch.index_select(joined, 0, self._source, out=local)
        return True


def _row_major(strides: tuple[int, ...]) -> bool:
    return all(left >= right for left, right in zip(strides, strides[1:], strict=False))
