"""The safetensors file format (https://github.com/huggingface/safetensors), written and read in place.

    | 8 bytes, little-endian: length of the header | header: JSON, padded with spaces | data |

The header maps each tensor's name to ``{"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}``, bytes counted
from the start of the data; ``"__metadata__"`` maps strings to strings. The data is little-endian and has no holes.

Own code, because a checkpoint is written and read piece by piece, with checksums, at known offsets in the file.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from zerolite.checkpoint.errors import CheckpointError
from zerolite.utils.dtypes import BY_CODE, CODES

MAX_HEADER_BYTES = 100_000_000  # what other readers of the format accept
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_LARGEST = 2**63 - 1
_DIMENSIONS = 64  # what torch's operators take


@dataclass(frozen=True)
class ToStore:
    """A tensor that a file is to hold."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """A tensor that a file holds. ``start`` and ``end`` are bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """A file's checked header. ``tensors`` in the order in which the header names them."""

    tensors: dict[str, Stored]
    metadata: dict[str, str]
    data_start: int


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


# -------------------------------------------------------------------- reading


def read_header(file: BinaryIO, size: int, name: str | None = None) -> Header:
    """Read and check the header of ``file``, which has ``size`` bytes and stands at its beginning.

    Nothing in the file is trusted: on return every tensor's bytes lie in the file, fit its dtype and shape, and
    together they are the rest of the file. Raises CheckpointError, which calls the file ``name`` (its own one where
    it has one).
    """
    where = f"safetensors file '{name or getattr(file, 'name', '(unnamed)')}'"
    table = _parse(_header_text(file, size, where), where)
    metadata = _metadata(table.pop(_METADATA, {}), where)
    data_start = file.tell()
    available = size - data_start
    tensors = {key: _stored(key, value, data_start, available, where) for key, value in table.items()}
    _cover(tensors, data_start, size, where)
    return Header(tensors, metadata, data_start)


def _header_text(file: BinaryIO, size: int, where: str) -> bytes:
    first = file.read(_LENGTH.size)
    if len(first) < _LENGTH.size:
        raise CheckpointError(f"{where}: expected at least {_LENGTH.size} bytes, found {len(first)}")
    (length,) = _LENGTH.unpack(first)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{where}: expected a header of at most {MAX_HEADER_BYTES} bytes, found {length}")
    if length > size - _LENGTH.size:
        raise CheckpointError(f"{where}: expected a header of {length} bytes, found {size - _LENGTH.size} in the file")
    text = file.read(length)
    if len(text) < length:
        raise CheckpointError(f"{where}: expected a header of {length} bytes, found {len(text)} in the file")
    return text


def _parse(text: bytes, where: str) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise CheckpointError(f"{where}: expected a header that begins with '{{', found {text[:8]!r}")
    try:
        table = json.loads(text.decode(), object_pairs_hook=_once, parse_int=_integer, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: expected a header in JSON, found what is none: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{where}: expected a JSON object as header, found {type(table).__name__}")
    return table


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{_quoted(twice)} comes twice")
    for key in found:
        key.encode()  # a lone surrogate is no name: UnicodeEncodeError is a ValueError
    return found


def _integer(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _no_constant(word: str) -> Any:
    raise ValueError(f"the constant {word}")


def _metadata(found: Any, where: str) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CheckpointError(f"{where}: expected {_METADATA} to map strings to strings, found {_quoted(found)}")
    return found


def _stored(key: str, value: Any, data_start: int, available: int, where: str) -> Stored:
    """One entry of the header, its bytes within the file."""
    where = f"{where}, tensor {_quoted(key)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets, found {_quoted(value)}")
    name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = BY_CODE.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: expected a dtype out of {', '.join(BY_CODE)}, found {_quoted(name)}")
    if not _naturals(shape) or len(shape) > _DIMENSIONS:
        raise CheckpointError(
            f"{where}: expected a shape of at most {_DIMENSIONS} whole numbers from 0 on, found {_quoted(shape)}"
        )
    if math.prod(max(1, dimension) for dimension in shape) > _LARGEST:
        raise CheckpointError(f"{where}: expected a shape of at most 2**63 - 1 elements, found {_quoted(shape)}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1] or offsets[1] > available:
        raise CheckpointError(
            f"{where}: expected data_offsets [begin, end] within the {available} bytes of data in the file, found "
            f"{_quoted(offsets)}"
        )
    expected = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise CheckpointError(
            f"{where}: expected {expected} bytes for shape {tuple(shape)} of {name}, found {offsets[1] - offsets[0]}"
        )
    return Stored(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _cover(tensors: Mapping[str, Stored], data_start: int, size: int, where: str) -> None:
    """Raise CheckpointError unless the tensors' bytes are all of the data, each byte one tensor's."""
    position = data_start
    for key, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if stored.start != position:
            what = "overlaps the one before it" if stored.start < position else "leaves a hole before it"
            raise CheckpointError(
                f"{where}, tensor {_quoted(key)}: {what}: expected its data to begin at byte {position} of the file, "
                f"found {stored.start}"
            )
        position = stored.end
    if position != size:
        raise CheckpointError(f"{where}: expected {position} bytes, found {size} in the file")


def _quoted(value: Any) -> str:
    """A value out of an untrusted file, for a message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}… ({len(text)} characters)"


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


def tensor_on(buffer: Any, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
    """A tensor on the bytes of a writable ``buffer`` from byte ``offset`` on, aligned or not; no copy. It keeps the
    buffer alive. Raises ValueError if the buffer is too small."""
    numel = math.prod(shape)
    if numel == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=dtype, count=numel, offset=offset).view(tuple(shape))
