"""Batched copies of small gradients into a bucket, where the calls would cost more than the bytes.

A model has thousands of biases and norms, and copying one by itself costs a call for a few hundred elements. So small
gradients are held until their bucket is launched, and then copied together:

- a flat bucket (stages 0 to 2) has :class:`Segment` s of neighbouring small slots, each copied in one call;
- a sliced bucket (stage 3) whose parameters are small on average is filled in one call (:class:`BucketFiller`).

    flat bucket  | weight |b|n|n|b| weight |b|n| weight |
                           segment           segment
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zerolite.utils.torch_private import flatten
from zerolite.zero.flat import destinations, flattened
from zerolite.zero.layout import BucketLayout, Gap, Slot

# A sliced bucket is filled in one call if its parameters have at most this many elements on average ...
_SMALL = 512
# ... and if it has at most this many: the filler keeps an index of four bytes for each element.
_LARGEST = 1 << 20
_SMALL_SLOT = 2048  # most elements of a slot in a segment
_SEGMENT_NUMEL = 1 << 16  # elements at which a segment ends: they stay in a CPU's cache while they are copied


class Segment:
    """Neighbouring small slots of a flat bucket, whose gradients are copied in one call.

    Attributes:
        indices: parameters of the slots.
        low: start of the segment in the bucket.
        high: end of the segment in the bucket; padding between its slots and after the last one belongs to it.
    """

    def __init__(self, slots: Sequence[Slot], high: int) -> None:
        """
        Args:
            slots: in the order of the bucket.
            high: see the class.
        """
        self.indices = frozenset(slot.index for slot in slots)
        self.low, self.high = slots[0].start, high
        self._slots = tuple(slots)
        ends = [*(slot.start for slot in slots[1:]), high]
        self._gaps = [end - slot.end for slot, end in zip(slots, ends, strict=True)]
        self._padding: dict[torch.dtype, list[torch.Tensor]] = {}

    def joined(self, held: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return all elements of the segment [high - low], in the dtype of its gradients in ``held``, with zeros for
        the others."""
        # Zeros take the places of missing gradients and of padding, so that the whole range is one tensor and one copy.
        gradients = [held.get(slot.index) for slot in self._slots]
        some = next(gradient for gradient in gradients if gradient is not None)
        parts = [some.new_zeros(s.numel) if g is None else g for s, g in zip(self._slots, gradients, strict=True)]
        if any(self._gaps):
            if some.dtype not in self._padding:
                self._padding[some.dtype] = [some.new_zeros(gap) for gap in self._gaps]
            parts = [part for pair in zip(parts, self._padding[some.dtype], strict=True) for part in pair]
        return flatten(parts)


def plan_segments(bucket: BucketLayout, strides: Mapping[int, tuple[int, ...]]) -> list[Segment]:
    """Return the segments of a flat bucket. Slots that are in no segment are copied by themselves.

    A segment has at least two slots. It ends before a large slot or one that is not row-major, at wide padding, and at
    about ``_SEGMENT_NUMEL`` elements.

    Args:
        bucket: a flat bucket.
        strides: strides of the full parameters, by index.
    """
    segments: list[Segment] = []
    members: list[Slot] = []
    ends = [*(slot.start for slot in bucket.slots[1:]), bucket.numel]
    for slot, end in zip(bucket.slots, ends, strict=True):
        joins = 0 < slot.numel <= _SMALL_SLOT and _row_major(strides[slot.index])
        if joins:
            members.append(slot)
        wide = end - slot.end > _SMALL_SLOT  # writing so much padding in every step would cost more than a call
        end = slot.end if wide else end
        if members and (not joins or wide or slot is bucket.slots[-1] or end - members[0].start >= _SEGMENT_NUMEL):
            if len(members) > 1:
                segments.append(Segment(members, end if joins else slot.start))
            members = []
    return segments


def many_small(bucket: BucketLayout) -> bool:
    """Return True if copying gradients into a sliced bucket one by one would cost more in calls than in bytes."""
    numel = sum(slot.numel for slot in bucket.slots)
    many = bucket.rows and len(bucket.slots) > 1
    return bool(many) and 0 < numel <= _SMALL * len(bucket.slots) and bucket.numel <= _LARGEST


def gaps_to_clear(bucket: BucketLayout) -> Sequence[Gap]:
    """Return what is cleared before a bucket is filled: its padding, or all of a sliced bucket if one call costs less
    than a call for each gap."""
    gaps = bucket.gaps
    cost = sum(gap.numel + _SMALL_SLOT for gap in gaps)
    return (Gap(0, 1, bucket.numel),) if bucket.rows and cost > bucket.numel else gaps


class BucketFiller:
    """Fill of a whole sliced bucket from the gradients of all its slots, in one call.

    A sliced bucket has a row for each rank, and each gradient is spread over all rows. So each element of the bucket is
    looked up by an index in the concatenated gradients. Their last element is a zero for the padding.
    """

    def __init__(self, bucket: BucketLayout, strides: Mapping[int, tuple[int, ...]], device: torch.device) -> None:
        """
        Args:
            bucket: a sliced bucket.
            strides: strides of the full parameters, by index.
            device: device of the gradients.
        """
        filled = [slot for slot in bucket.slots if slot.numel]
        self._indices = [slot.index for slot in filled]
        # One call flattens all row-major gradients. Those of another memory format (channels_last) are first brought
        # into the order of their own memory.
        self._formats = {s.index: strides[s.index] for s in filled if not _row_major(strides[s.index])}
        self._zero: dict[torch.dtype, torch.Tensor] = {}
        # Position of each element of the bucket in the concatenated gradients. Padding points to the zero at their end.
        source = torch.full((bucket.numel,), sum(slot.numel for slot in bucket.slots), dtype=torch.int32, device="cpu")
        position = 0
        for slot in bucket.slots:
            values = torch.arange(position, position + slot.numel, dtype=torch.int32, device="cpu")
            for target, part in destinations(source, bucket, slot, values, (1,)):
                target.copy_(part)
            position += slot.numel
        self._source = source.to(device)

    def fill(self, local: torch.Tensor, gradients: Mapping[int, torch.Tensor], factor: float) -> bool:
        """Write all of ``local`` [numel] from ``gradients``, by index of the parameter, times ``factor``.

        Returns:
            False, with ``local`` unchanged, unless every slot has a gradient, all of one dtype no wider than ``local``.
        """
        if len(gradients) != len(self._indices):
            return False
        flats = [gradients[index] for index in self._indices]
        dtype = flats[0].dtype
        if any(gradient.dtype != dtype for gradient in flats) or torch.promote_types(dtype, local.dtype) != local.dtype:
            return False
        for position, index in enumerate(self._indices if self._formats else ()):
            if index in self._formats:
                flats[position] = flattened(flats[position], self._formats[index])
        if dtype not in self._zero:
            self._zero[dtype] = local.new_zeros(1, dtype=dtype)
        joined = flatten([*flats, self._zero[dtype]])
        if factor != 1.0:
            joined.mul_(factor)
        torch.index_select(joined.to(local.dtype), 0, self._source, out=local)
        return True


def _row_major(strides: tuple[int, ...]) -> bool:
    return all(left >= right for left, right in zip(strides, strides[1:], strict=False))
