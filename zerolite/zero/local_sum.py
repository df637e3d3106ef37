"""Local sum: a bucket's gradients on this rank, from the hooks to the tensor that is sent.

A model has thousands of biases and norms, and copying one by itself costs a call for a few hundred elements. So small
gradients are held until the bucket is launched, and then copied together. Large ones are copied when they come, which
frees their memory.

- A flat bucket (stages 0 to 2) has :class:`Segment` s of neighbouring small slots, each copied in one call.
- A sliced bucket (stage 3) whose parameters are small on average is filled in one call (:class:`BucketFiller`).

    flat bucket  | weight |b|n|n|b| weight |b|n| weight |
                           segment           segment
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence

import torch

from zerolite.utils.dtypes import HALF
from zerolite.utils.memory_tags import tag_memory
from zerolite.zero.flat import destinations, flattened, zero_gap, zero_slot
from zerolite.zero.gradient_memory import GradientDtypes, GradientMemory
from zerolite.zero.layout import BucketLayout, Gap, Slot

# A sliced bucket is filled in one call if its parameters have at most this many elements on average ...
_SMALL = 512
# ... and if it has at most this many: the filler keeps an index of four bytes for each element.
_LARGEST = 1 << 20
_SMALL_SLOT = 2048  # most elements of a slot in a segment
_SEGMENT_NUMEL = 1 << 16  # elements at which a segment ends: they stay in a CPU's cache while they are copied
_NONE: frozenset[int] = frozenset()


class LocalSum:
    """Sum of this rank's gradients of one bucket that have not been reduced yet.

    A *contribution* is one gradient that autograd has accumulated for one parameter. A shared parameter may get several
    in a backward.

    Attributes:
        layout: slots of the bucket.
        place: position of the bucket in the order of launches.
        held: gradients that wait to be copied, by index of the parameter.
        direct: indices of the parameters whose gradients hooks may put into ``held`` without another call.
        waits_for: contributions of the current backward that are not copied yet. When so many are held, all have come.
            Below 0 if more came than expected.
        repeats: contributions in this backward, of parameters with more than one.
        flat: the sum [numel]; None before the first copy.
    """

    def __init__(
        self,
        layout: BucketLayout,
        strides: Mapping[int, tuple[int, ...]],
        device: torch.device,
        dtypes: GradientDtypes,
        memory: GradientMemory,
    ) -> None:
        """
        Args:
            layout: see the class.
            strides: strides of the full parameters, by index.
            device: device of the gradients.
            dtypes: dtypes of the bucket's gradients.
            memory: allocates full buckets.
        """
        self.layout, self.place = layout, layout.index
        self._strides, self._device, self._dtypes, self._memory = strides, device, dtypes, memory
        self._slots = {slot.index: slot for slot in layout.slots}
        self._filler = BucketFiller(layout, strides, device) if many_small(layout) else None
        self._segments = [] if layout.rows else plan_segments(layout, strides)
        self._not_empty = frozenset(slot.index for slot in layout.slots if slot.numel)
        self._small = frozenset(index for segment in self._segments for index in segment.indices)
        # Padding must be zero, because it is sent and summed. Padding inside a segment is written with the segment.
        ends, begins = [0, *(segment.high for segment in self._segments)], [segment.low for segment in self._segments]
        self._gaps = [gap for gap in gaps_to_clear(layout) if gap.start >= ends[bisect.bisect(begins, gap.start)]]
        self.held: dict[int, torch.Tensor] = {}
        self.direct = _NONE
        self.waits_for = 0
        self.flat: torch.Tensor | None = None
        self._written: set[int] = set()  # parameters whose gradients `flat` contains
        self._launching = False  # `flat` is being filled for a launch that follows at once
        self._came: set[int] = set()  # parameters with a contribution in this backward; those in `held` may be left out
        self.repeats: dict[int, int] = {}
        self._most: dict[int, int] = {}  # the most of them in any backward

    # ---------------------------------------------------------------- contributions

    def begin(self) -> None:
        """Expect the contributions of one backward."""
        self._came.clear()
        self.repeats.clear()
        # A parameter may have several contributions if reentrant checkpointing runs a backward inside the backward.
        self.waits_for = len(self._not_empty) + sum(self._most.values()) - len(self._most)

    def open_directly(self, by_group: bool) -> None:
        """Let hooks put small gradients into ``held`` without another call.

        Args:
            by_group: no gradient launches a bucket, so a whole bucket may be held until its group's backward ends.
        """
        if not self.layout.rows:
            self.direct = self._small
        elif by_group and self.flat is None:
            self.direct = self._not_empty

    def close(self) -> None:
        """Let hooks put nothing into ``held`` any more."""
        self.direct = _NONE

    @property
    def is_complete(self) -> bool:
        """True if all contributions that are expected in this backward have come."""
        return len(self.held) >= self.waits_for

    def discard(self, index: int) -> None:
        """Count a contribution whose values are dropped."""
        self._count(index)
        self.waits_for -= 1

    def _count(self, index: int) -> None:
        """Note a contribution that a hook has not put into ``held``."""
        if index in self._came or index in self.held:
            self.repeats[index] = self.repeats.get(index, 1) + 1
        self._came.add(index)

    def learn_contributions(self) -> None:
        """Expect as many contributions from now on as this complete backward has brought, if that is more."""
        for index, count in self.repeats.items():
            self._most[index] = max(count, self._most.get(index, 1))

    def add(self, slot: Slot, gradient: torch.Tensor, at_once: bool, factor: float, tag: bool) -> None:
        """Copy a contribution into ``flat``, or hold it until it is copied with others.

        Args:
            slot: slot of the parameter.
            gradient: the contribution, in the parameter's shape.
            at_once: copy it now, unless it is small or the bucket is filled in one call.
            factor: factor of gradients that are copied.
            tag: tag the memory of a held gradient, because a tracker listens.
        """
        index = slot.index
        self._count(index)
        if index in self.held:
            self.copy_in_held(factor)
        holds = self.flat is None and (self._filler is not None or not at_once)
        if holds or index in self._small:
            self.held[index] = tag_memory(gradient, self._memory.item()) if tag else gradient
        else:
            self.waits_for -= 1
            self._copy_in(slot, gradient, factor)

    def drop(self, index: int) -> None:
        """Drop the gradient of a parameter."""
        self.held.pop(index, None)
        if self.flat is not None and index in self._written:
            zero_slot(self.flat, self.layout, self._slots[index])

    # ---------------------------------------------------------------- copies

    def complete(self, factor: float) -> torch.Tensor:
        """Copy in all held gradients, and return the full bucket [numel], which is launched next.

        It has zeros where no gradient came: every rank sends every bucket, whatever its own graph has used.
        """
        self._launching = True
        try:
            self.copy_in_held(factor)
        finally:
            self._launching = False
        if self.flat is None:
            zeros = torch.zeros(self.layout.numel, dtype=self._dtypes.sent, device=self._device)
            return tag_memory(zeros, self._memory.item())
        if len(self._written) < len(self._not_empty):
            for segment in self._segments:  # a segment that was copied in already has these zeros
                if self._written.isdisjoint(segment.indices):
                    self.flat[segment.low : segment.high].zero_()
            for index in sorted(self._not_empty - self._small - self._written):
                zero_slot(self.flat, self.layout, self._slots[index])
        return self.flat

    def copy_in_held(self, factor: float) -> None:
        """Copy all held gradients into ``flat``, in as few calls as possible."""
        held = self.held
        self.waits_for -= len(held)
        self._came.update(held)
        try:
            if not held or (self.flat is None and self._filler is not None and self._fill(held, factor)):
                return
            for segment in self._segments:
                if not segment.indices.isdisjoint(held):
                    self._copy_in_segment(segment, held, factor)
            for index in sorted(held.keys() - self._small):
                self._copy_in(self._slots[index], held[index], factor)
        finally:
            self.held = {}  # until they are copied, the bucket reports them as its memory

    def _copy_in_segment(self, segment: Segment, held: Mapping[int, torch.Tensor], factor: float) -> None:
        joined, indices = segment.joined(held), segment.indices & held.keys()
        flat = self._open(joined) if self.flat is None else self.flat
        target, written = flat[segment.low : segment.high], self._written & segment.indices
        # One call writes all elements of the segment, and zeros where no gradient came. So either all its gradients
        # must be the first ones of their slots, or all must be added to earlier ones. A mixture is copied slot by slot.
        if not written:
            if factor != 1.0:
                torch.mul(joined, factor, out=target)
            else:
                target.copy_(joined)
        elif written >= indices:
            self._widen()[segment.low : segment.high].add_(joined, alpha=factor)
        else:
            for index in sorted(indices):
                self._copy_in(self._slots[index], held[index], factor)
        self._written |= indices

    def _copy_in(self, slot: Slot, gradient: torch.Tensor, factor: float) -> None:
        """Copy the first gradient of a slot into ``flat``, times ``factor``; add later ones in accumulate_dtype."""
        flat = self._open(gradient) if self.flat is None else self.flat
        first = slot.index not in self._written
        if not first:
            flat = self._widen()
        for target, values in destinations(flat, self.layout, slot, gradient, self._strides[slot.index]):
            if not first:
                target.add_(values, alpha=factor)
            elif factor != 1.0:
                torch.mul(values, factor, out=target)
            else:
                target.copy_(values)
        self._written.add(slot.index)

    def _fill(self, held: Mapping[int, torch.Tensor], factor: float) -> bool:
        """Write all of ``flat`` in one call. Return False if that is not possible; ``flat`` is then allocated."""
        assert self._filler is not None
        flat = self._open(next(iter(held.values())), clear_gaps=False)
        if not self._filler.fill(flat, held, factor):
            self._clear_gaps(flat)
            return False
        self._written.update(held)
        return True

    # ---------------------------------------------------------------- memory

    def _open(self, gradient: torch.Tensor, clear_gaps: bool = True) -> torch.Tensor:
        """Allocate ``flat`` for a first gradient like ``gradient``; only its padding is initialised."""
        dtypes, dtype = self._dtypes, self._dtypes.accumulate or gradient.dtype
        # A bucket that is sent in a wider dtype is filled in it: a conversion would read and write it once more. It
        # takes more memory, so those that wait long for their launch are converted then.
        wider = dtypes.accumulate is None and dtype != dtypes.sent
        wider = wider and torch.promote_types(dtype, dtypes.sent) == dtypes.sent
        if wider and self._memory.is_launched_soon(self, self._launching):
            dtype = dtypes.sent
        self.flat = flat = self._memory.allocate(self.layout.numel, dtype, self._device)
        if clear_gaps and self._gaps:
            self._clear_gaps(flat)
        return flat

    def _clear_gaps(self, flat: torch.Tensor) -> None:
        for gap in self._gaps:
            zero_gap(flat, self.layout, gap)

    def _widen(self) -> torch.Tensor:
        """Convert ``flat`` to the dtype in which several contributions are summed."""
        dtype, flat = self._memory.options.accumulate_dtype, self.flat
        assert flat is not None
        # In bf16 a small gradient vanishes in a large sum. A single gradient is sent as it came, with half the bytes.
        if dtype is not None and flat.dtype in HALF:
            self.flat = flat = tag_memory(flat.to(dtype), self._memory.item())
        return flat

    def set_place(self, place: int) -> None:
        """Set the position of the bucket in the order of launches."""
        self.place = place

    def take(self) -> None:
        """Forget ``flat``, which is sent."""
        self.flat = None
        self._written.clear()

    def clear(self) -> None:
        """Drop all gradients."""
        self.held.clear()
        flat = self.flat
        self.take()
        if flat is not None:
            self._memory.release(flat)

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors with their items of memory."""
        item = self._memory.item()
        if self.flat is not None:
            yield item, self.flat
        yield from ((item, gradient) for gradient in self.held.values())


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
        return torch.ops.aten.flatten_dense_tensors(parts)


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
        joined = torch.ops.aten.flatten_dense_tensors([*flats, self._zero[dtype]])
        if factor != 1.0:
            joined.mul_(factor)
        torch.index_select(joined.to(local.dtype), 0, self._source, out=local)
        return True


def _row_major(strides: tuple[int, ...]) -> bool:
    return all(left >= right for left, right in zip(strides, strides[1:], strict=False))
