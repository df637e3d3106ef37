"""Writer of the safetensors file format (https://github.com/huggingface/safetensors).

    | 8 bytes, little-endian: length of the header | header: JSON, padded with spaces | data |

The header maps each tensor's name to ``{"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}``, bytes counted
from the start of the data; ``"__metadata__"`` maps strings to strings. The data is little-endian and has no holes.

The code is our own, because a checkpoint is written in parts, with checksums, and read at offsets that its index names.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerolite.checkpoint.errors import CheckpointError
from zerolite.utils.dtypes import CODES

_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class ToStore:
    """A tensor to be written to a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# -------------------------------------------------------------------- writing


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Return the format's name of ``dtype``. Raises CheckpointError, naming ``tensor``, if it has none."""
    try:
        return CODES[dtype]
    except KeyError:
        raise CheckpointError(
            f"tensor '{tensor}' is of {dtype}, which the safetensors format does not have; expected one of "
            f"{', '.join(str(known).removeprefix('torch.') for known in CODES)}. Keep it in another dtype."
        ) from None


def build_header(entries: Iterable[ToStore], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[int]]:
    """Return the first bytes of a file with ``entries``, in this order, and the offset of each one's data in the file.

    The file ends with the data of the last entry.

    Raises:
        CheckpointError: the format lacks a dtype.
    """
    table: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    begins, position = [], 0
    for entry in entries:
        begins.append(position)
        position += entry.nbytes
        table[entry.name] = {
            "dtype": dtype_name(entry.dtype, entry.name),
            "shape": list(entry.shape),
            "data_offsets": [begins[-1], position],
        }
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = _LENGTH.size + len(text)
    return _LENGTH.pack(len(text)) + text, [start + begin for begin in begins]


# -------------------------------------------------------------------- bytes of tensors


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of any tensor in row-major order; a view of its memory where that has them so."""
    return as_bytes(tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg())


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy. The view keeps the memory alive."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    # torch offers the memory of a tensor as a buffer only through numpy, which is not a dependency.
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor.untyped_storage()  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
