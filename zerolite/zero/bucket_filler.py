"""Batched copies of small gradients into a bucket: on a fast device the calls cost more than the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zerolite.zero.buffer import destinations, flattened
from zerolite.zero.layout import Bucket, Slot

_SMALL = 512  # elements of a parameter; sliced buckets whose parameters have fewer on average are filled in one call
_LARGEST = 1 << 20  # elements of such a bucket, of which each costs four bytes here
_SMALL_SLOT = 2048  # elements of a slot whose copy costs more in the call than in the bytes
_SEGMENT_NUMEL = 1 << 16  # elements of a segment, which stay in a CPU's cache while they are moved


class GradientHolder:
    """Gradients of one bucket that have come and are not moved yet.

    While it is open, the hooks of its parameters put gradients here and do nothing else. A model has thousands of small
    parameters, and counting each gradient would cost more than moving it. :meth:`end` counts them all at once.

    Attributes:
        gradients: by index of the parameter. Those behind the first ``counted`` are counted when it is closed.
        placeholders: what p.grad shows of them, by index of the parameter; None before that is known.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.indices = frozenset(slot.index for slot in slots)
        self.count = len(slots)
        self.bucket = slots[0].bucket
        self.gradients: dict[int, torch.Tensor] = {}
        self.open, self.counted = False, 0
        self.placeholders: Mapping[int, torch.Tensor] | None = None

    def set_placeholders(self, placeholders: Mapping[int, torch.Tensor] | None) -> None:
        """Let ``p.grad`` show these."""
        self.placeholders = placeholders

    def pop_all(self) -> dict[int, torch.Tensor]:
        """Return the gradients that are held, and hold none."""
        held, self.gradients = self.gradients, {}
        return held

    def begin(self) -> None:
        """Let hooks hold gradients here without counting each."""
        self.open, self.counted = True, len(self.gradients)

    def end(self) -> list[int]:
        """Let no hook do so any more; return the parameters whose gradients have not been counted."""
        self.open = False
        return list(self.gradients)[self.counted :]


class Segment(GradientHolder):
    """Neighbouring small slots of a flat bucket. Their gradients are held until all are there, and then copied into the
    bucket in one call: copying a bias of 1,000 elements by itself costs more in the call than in the bytes."""

    def __init__(self, slots: Sequence[Slot], high: int) -> None:
        """high: where the segment ends in its bucket; what lies between its slots and behind the last belongs to it."""
        super().__init__(slots)
        self.low, self.high = slots[0].start, high
        self._slots = tuple(slots)
        self._order = [slot.index for slot in slots]
        ends = [*(slot.start for slot in slots[1:]), high]
        self._gaps = [end - slot.end for slot, end in zip(slots, ends, strict=True)]
        self._padding: dict[torch.dtype, list[torch.Tensor]] = {}

    def pop_flattened(self) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Return the gradients, which are held no longer, and the segment's elements made of them: [high - low], zeros
        where there is no gradient."""
        held, self.gradients = self.gradients, {}
        some = next(iter(held.values()))
        # Gradients that are missing, and the padding between slots, become zeros: the whole range is then one tensor,
        # which one copy moves.
        if len(held) == self.count:
            gradients = [held[index] for index in self._order]
        else:
            gradients = [held[s.index] if s.index in held else some.new_zeros(s.numel) for s in self._slots]
        if any(self._gaps):
            if some.dtype not in self._padding:
                self._padding[some.dtype] = [some.new_zeros(gap) for gap in self._gaps]
            gradients = [part for pair in zip(gradients, self._padding[some.dtype], strict=True) for part in pair]
        return held, torch._C._nn.flatten_dense_tensors(gradients)


def plan_segments(bucket: Bucket, strides: Sequence[tuple[int, ...]]) -> list[Segment]:
    """The segments of a flat bucket; slots that are in none are moved by themselves. strides: of all parameters."""
    segments: list[Segment] = []
    members: list[Slot] = []
    ends = [*(slot.start for slot in bucket.slots[1:]), bucket.numel]
    for slot, end in zip(bucket.slots, ends, strict=True):
        joins = 0 < slot.numel <= _SMALL_SLOT and _row_major(strides[slot.index])
        if joins:
            members.append(slot)
        wide = end - slot.end > _SMALL_SLOT  # padding that is not worth moving
        end = slot.end if wide else end
        if members and (not joins or wide or slot is bucket.slots[-1] or end - members[0].start >= _SEGMENT_NUMEL):
            if len(members) > 1:
                segments.append(Segment(members, end if joins else slot.start))
            members = []
    return segments


def many_small(bucket: Bucket) -> bool:
    """True if moving gradients to a sliced bucket one by one costs more in calls than in bytes."""
    numel = sum(slot.numel for slot in bucket.slots)
    many = bucket.rows and len(bucket.slots) > 1
    return bool(many) and 0 < numel <= _SMALL * len(bucket.slots) and bucket.numel <= _LARGEST


class BucketFiller:
    """Write a whole sliced bucket from the gradients of all its slots, zeros in between, in one call."""

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
            for target, part in destinations(source, bucket, slot, values, (1,)):
                target.copy_(part)
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
