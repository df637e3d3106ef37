"""Views of flat tensors, and values on their way into them."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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


def check_has_memory(name: str, parameter: torch.Tensor) -> None:
    """Raise ValueError for a parameter that consists of other tensors, which no bucket and no shard can hold."""
    wraps: object = is_traceable_wrapper_subclass(parameter)  # no TypeGuard: mypy takes the branch for unreachable
    if wraps:
        raise ValueError(
            f"zerolite: expected parameters with memory of their own, got '{name}' of class "
            f"{type(parameter).__name__}, which consists of other tensors, as DTensors and the quantized tensors of "
            "torchao do; give the packed values and their scales as frozen parameters of torch.nn.Parameter or a class "
            "derived from it"
        )


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
