"""Table of torch dtypes by the config's names and by the codes of safetensors files."""

from __future__ import annotations

import torch

from zerolite.utils.dtype_names import CONFIG, SAFETENSORS

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, names[0]) for name, names in CONFIG.items()}
"""By the config's name: the dtypes in which zerolite computes, and for which it has kernels."""
FLOATS = tuple(DTYPES.values())
HALF = tuple(dtype for dtype in FLOATS if dtype.itemsize == 2)


def is_castable(tensor: torch.Tensor) -> bool:
    """Return True for floating dtypes of two bytes or more. Those of one byte (fp8) hold quantized values, which mean
    nothing without their scales."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


BY_CODE: dict[str, torch.dtype] = {k: getattr(torch, v) for k, v in SAFETENSORS.items() if hasattr(torch, v)}
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in BY_CODE.items()}
