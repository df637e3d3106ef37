"""Views of flat tensors, values on their way into them, and slots that are copied together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zerolite.zero.layout import BucketLayout, Gap, Slot


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of ``tensor`` if it fills its memory without holes (as channels_last does), otherwise
    contiguous ones."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def flattened(tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the elements of ``tensor`` in the memory order of a tensor with ``strides``, shape [numel]; a view if
    possible. The default is :func:`dense_strides` of the tensor."""
    strides = dense_strides(tensor) if strides is None else strides
    if strides != tensor.stride():
        dense = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = dense.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def copy_assigned_data(name: str, parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
    """Copy the values of a parameter to ``view``, and make ``view`` its data.

    Raises:
        RuntimeError: shape, dtype or device differ.
    """
    data = parameter.data
    if data.shape != view.shape or data.dtype != view.dtype or data.device != view.device:
        raise RuntimeError(
            f"parameter '{name}': expected {tuple(view.shape)} of {view.dtype} on {view.device}, as it was made, "
            f"got {tuple(data.shape)} of {data.dtype} on {data.device}. module.half(), .to(dtype) and the like are for "
            "before zerolite.initialize; for 16 bits, enable bf16 or fp16 in the config"
        )
    view.copy_(data)
    parameter.data = view


def destinations(
    flat: torch.Tensor, bucket: BucketLayout, slot: Slot, values: torch.Tensor, strides: tuple[int, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the copies that bring the values of a parameter into its slot, as pairs (target, source).

    Args:
        flat: the full bucket, shape [bucket.numel].
        bucket: the bucket.
        slot: the slot.
        values: values in the parameter's shape.
        strides: dense strides of the parameter.
    """
    offset = flat.storage_offset() + slot.start
    if not bucket.rows:
        return [(flat.as_strided(values.shape, strides, offset), values)]
    if not slot.numel:
        return []
    part = slot.part
    values = flattened(values, strides)
    row = bucket.numel // bucket.rows
    full_rows = slot.numel // part  # rows whose part is full; the row after them has the rest
    pairs = []
    if full_rows:
        target = flat.as_strided((full_rows, part), (row, 1), offset)
        pairs.append((target, values[: full_rows * part].view(full_rows, part)))
    rest = slot.numel - full_rows * part
    if rest:
        pairs.append((flat.as_strided((rest,), (1,), offset + full_rows * row), values[full_rows * part :]))
    return pairs


def zero_slot(flat: torch.Tensor, bucket: BucketLayout, slot: Slot) -> None:
    """Set the slot's elements of the full bucket ``flat`` to zero."""
    if bucket.rows:
        row = bucket.numel // bucket.rows
        flat.as_strided((bucket.rows, slot.part), (row, 1), flat.storage_offset() + slot.start).zero_()
    else:
        flat.narrow(0, slot.start, slot.numel).zero_()


def zero_gap(flat: torch.Tensor, bucket: BucketLayout, gap: Gap) -> None:
    """Set a gap of the full bucket ``flat`` to zero."""
    if gap.rows == 1:
        flat.narrow(0, gap.start, gap.width).zero_()
    else:
        row = bucket.numel // bucket.rows
        flat.as_strided((gap.rows, gap.width), (row, 1), flat.storage_offset() + gap.start).zero_()


# ---------------------------------------------------------------- small slots, copied together

# A sliced bucket is filled in one call if its parameters have at most this many elements on average ...
_SMALL = 512
# ... and if it has at most this many: the segment has an index of four bytes for each element.
_LARGEST = 1 << 20
_SMALL_SLOT = 2048  # most elements of a slot in a segment of a flat bucket
_SEGMENT_NUMEL = 1 << 16  # elements at which such a segment ends: they stay in a CPU's cache while they are copied


class Segment:
    """Slots of a bucket whose gradients are joined and copied in one call.

    A flat bucket (stages 0 to 2) has segments of neighbouring small slots. A sliced bucket (stage 3) whose parameters
    are small on average is one segment.

        flat bucket  | weight |b|n|n|b| weight |b|n| weight |
                               segment           segment

    Attributes:
        slots: in the order of the bucket.
        order: their parameters.
        indices: the same as a set.
        low: start of the segment in the bucket.
        high: end of the segment in the bucket; padding between its slots and after the last one belongs to it.
        gaps: elements of padding behind each slot; empty if there is none.
        source: position of each element of the segment among the joined ones; None if their order is the bucket's. In
            a sliced bucket each gradient is spread over all rows, and all padding points to one zero at the end.
        padding: zeros for the gaps, by dtype.
    """

    def __init__(self, slots: Sequence[Slot], high: int, source: torch.Tensor | None = None) -> None:
        """
        Args:
            slots, high, source: see the class.
        """
        self.slots, self.order = tuple(slots), tuple(slot.index for slot in slots)
        self.indices, self.source = frozenset(self.order), source
        self.low, self.high = slots[0].start if source is None else 0, high
        ends = [*(slot.start for slot in slots[1:]), high]
        gaps = [end - slot.end for slot, end in zip(slots, ends, strict=True)]
        self.gaps = [1] if source is not None else gaps if any(gaps) else []
        self.padding: dict[torch.dtype, list[torch.Tensor]] = {}


def plan_segments(bucket: BucketLayout, strides: Mapping[int, tuple[int, ...]]) -> list[Segment]:
    """Return the segments of a flat bucket. Slots that are in no segment are copied by themselves.

    A segment has at least two slots. It ends before a large slot or one that is not row-major, at wide padding, and at
    about ``_SEGMENT_NUMEL`` elements.

    Args:
        bucket: a flat bucket.
        strides: dense strides of the full parameters, by index.
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


def plan_rows(
    bucket: BucketLayout,
    shapes: Mapping[int, torch.Size],
    strides: Mapping[int, tuple[int, ...]],
    device: torch.device,
) -> list[Segment]:
    """Return the segment that is all of a sliced bucket, if copying its gradients one by one would cost more in calls
    than in bytes; otherwise none.

    Args:
        bucket: a sliced bucket.
        shapes: shapes of the full parameters, by index.
        strides: their dense strides.
        device: device of the gradients.
    """
    numel = sum(slot.numel for slot in bucket.slots)
    if len(bucket.slots) < 2 or not 0 < numel <= _SMALL * len(bucket.slots) or bucket.numel > _LARGEST:
        return []
    source = torch.full((bucket.numel,), numel, dtype=torch.int32, device="cpu")
    position = 0
    for slot in bucket.slots:
        values = torch.arange(position, position + slot.numel, dtype=torch.int32, device="cpu")
        values = values.view(shapes[slot.index])
        for target, part in destinations(source, bucket, slot, values, strides[slot.index]):
            target.copy_(part)
        position += slot.numel
    return [Segment([slot for slot in bucket.slots if slot.numel], bucket.numel, source.to(device))]


def gaps_to_clear(bucket: BucketLayout) -> Sequence[Gap]:
    """Return what is cleared before a bucket is filled: its padding, or all of a sliced bucket if one call costs less
    than a call for each gap."""
    gaps = bucket.gaps
    cost = sum(gap.numel + _SMALL_SLOT for gap in gaps)
    return (Gap(0, 1, bucket.numel),) if bucket.rows and cost > bucket.numel else gaps


def _row_major(strides: tuple[int, ...]) -> bool:
    return all(left >= right for left, right in zip(strides, strides[1:], strict=False))
