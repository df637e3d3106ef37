"""Dense strides, flat views, and parameters whose values a user has assigned."""

from __future__ import annotations

import torch


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
