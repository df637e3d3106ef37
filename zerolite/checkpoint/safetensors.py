"""Writer of the safetensors file format (https://github.com/huggingface/safetensors).

    | 8 bytes, little-endian: length of the header | header: JSON, padded with spaces | data |

The header maps each tensor's name to ``{"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}``, bytes counted
from the start of the data; ``"__metadata__"`` maps strings to strings. The data is little-endian and has no holes.

Own code, because a checkpoint is written piece by piece, with checksums, and read at offsets that its index names.
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

MAX_HEADER_BYTES = 100_000_000  # what other readers of the format accept
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class ToStore:
    """A tensor that a file is to hold."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# -------------------------------------------------------------------- writing


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """The format's name of ``dtype``. Raises CheckpointError, which names ``tensor``, if it has none."""
    try:
        return CODES[dtype]
    except KeyError:
        raise CheckpointError(
            f"tensor '{tensor}' is of {dtype}, which the safetensors format does not have; expected one of "
            f"{', '.join(str(known).removeprefix('torch.') for known in CODES)}. Keep it in another dtype."
        ) from None


def build_header(entries: Iterable[ToStore], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[int]]:
    """The first bytes of a file that holds ``entries`` in the order given, and where in the file each one's data
    begins. The file ends with the last one's data.

    Raises CheckpointError for a dtype that the format lacks and a header that readers would refuse; ValueError for a
    name that comes twice.
    """
    table: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    begins, position = [], 0
    for entry in entries:
        if entry.name in table or entry.name == _METADATA:
            raise ValueError(f"expected each tensor's name once, and none called '{_METADATA}', got '{entry.name}'")
        begins.append(position)
        position += entry.nbytes
        table[entry.name] = {
            "dtype": dtype_name(entry.dtype, entry.name),
            "shape": list(entry.shape),
            "data_offsets": [begins[-1], position],
        }
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the header of a safetensors file with {len(begins)} tensors would have {len(text)} bytes; readers take "
            f"up to {MAX_HEADER_BYTES}. Write several files."
        )
    start = _LENGTH.size + len(text)
    return _LENGTH.pack(len(text)) + text, [start + begin for begin in begins]


# -------------------------------------------------------------------- bytes of tensors


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype and shape as bytes; no copy. The view keeps the memory alive.

    Raises ValueError for a tensor that is elsewhere, has gaps, or whose values are not what its memory says
    (lazily conjugated or negated ones).
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"expected a contiguous CPU tensor, got {tuple(tensor.shape)} on {tensor.device} with strides "
            f"{tensor.stride()}"
        )
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor.untyped_storage()  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
