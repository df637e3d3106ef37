"""Tensors that cross the boundary between two pipeline stages."""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerolite.utils.accelerator import is_fake
from zerolite.utils.nested import named_leaves


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class BoundarySpec:
    """Tensors that one part passes to the next.

    Attributes:
        single: they are one tensor and not a tuple.
        tensors: their shapes and dtypes.
    """

    single: bool
    tensors: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors))


def tensors_of(outputs: object, part: int) -> tuple[bool, tuple[torch.Tensor, ...]]:
    """Return True if ``outputs`` of part ``part`` are one tensor and not a tuple, and the tensors.

    Raises TypeError for outputs that cannot be sent to the next part.
    """
    if isinstance(outputs, torch.Tensor):
        return True, (outputs,)
    if not isinstance(outputs, (tuple, list)) or not all(isinstance(output, torch.Tensor) for output in outputs):
        got = type(outputs).__name__
        if isinstance(outputs, (tuple, list)):
            got += " with " + next(type(output).__name__ for output in outputs if not isinstance(output, torch.Tensor))
        raise TypeError(
            f"expected part {part} of the pipeline to return a tensor or a tuple of tensors to the next one, got {got}"
        )
    return False, tuple(outputs)


def shapes_of(value: object) -> dict[str, Any]:
    """Return the (shape, dtype) of each tensor in ``value`` and the class of every other leaf, by name."""
    return {
        name: (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        for name, leaf in named_leaves(value)
    }


def stable_hash(text: str) -> int:
    """Return a 63-bit hash of ``text``, the same in every process (Python's own hash is salted)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


SAMPLES = 4096


def sampled_hash(tensor: torch.Tensor) -> int:
    """Return a hash of about 4096 evenly spaced values of ``tensor``; 0 if it is on a device or has no memory."""
    if tensor.device.type != "cpu" or is_fake(tensor) or not tensor.numel():
        return 0
    flat = tensor.detach().reshape(-1)
    # A sample is enough to notice a different batch, and does not read all of the data.
    flat = flat[:: max(1, flat.numel() // SAMPLES)].contiguous()
    return zlib.crc32(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()))


def same_specs(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> bool:
    return len(tensors) == len(specs) and all(
        tuple(tensor.shape) == spec.shape and tensor.dtype == spec.dtype
        for tensor, spec in zip(tensors, specs, strict=True)
    )
