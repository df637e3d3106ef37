"""Dtypes by the config's names and by the codes of safetensors files, and 16-bit roundings of 32-bit values."""

from __future__ import annotations

import torch

from zerolite.utils.text import DTYPE_NAMES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, names[0]) for name, names in DTYPE_NAMES.items()}
"""By the config's name: the dtypes in which zerolite computes, and for which it has kernels."""
FLOATS = tuple(DTYPES.values())
HALF = tuple(dtype for dtype in FLOATS if dtype.itemsize == 2)


def is_castable(tensor: torch.Tensor) -> bool:
    """Return True for floating dtypes of two bytes or more. Those of one byte (fp8) hold quantized values, which mean
    nothing without their scales."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def is_quantized(dtype: torch.dtype) -> bool:
    """Return True for integers and fp8, which hold quantized values."""
    return not (dtype.is_complex or dtype is torch.bool or (dtype.is_floating_point and dtype.itemsize > 1))


SAFETENSORS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",  # torch 2.7
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
"""By the safetensors format's code, torch's name."""

BY_CODE: dict[str, torch.dtype] = {k: getattr(torch, v) for k, v in SAFETENSORS.items() if hasattr(torch, v)}
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in BY_CODE.items()}


def sync_master_from_param_(exact: torch.Tensor, rounded: torch.Tensor) -> bool:
    """Copy values that the user has written into 16-bit parameters into their fp32 masters, in place.

    The user has written an element if it differs from the rounded master. If none differs, nothing is written on the
    CPU. On a device everything is written, because the host does not wait for the comparison.

    Args:
        exact: fp32 masters.
        rounded: 16-bit parameters.

    Returns:
        True if ``exact`` was written.
    """
    # Compared as integers, so that a NaN is equal to itself and -0 differs from 0.
    same = exact.to(rounded.dtype).view(torch.int16) == rounded.view(torch.int16)
    written = same.is_cuda or not bool(same.all())
    if written:
        torch.where(same, exact, rounded.float(), out=exact)
    return written
