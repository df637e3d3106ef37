"""What a checkpoint says of itself: the manifest, and the index of its tensors. JSON, and checked as it is read."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zerolite.checkpoint.boxes import Box, covers
from zerolite.checkpoint.directory import MANIFEST
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.safetensors import DTYPES, TORCH_DTYPES

FORMAT = "zerolite checkpoint"
VERSION = 1
INDEX = "tensors.json"
STATE = "state.json"
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """A file's length, and the CRC-32 of each of its blocks of ``BLOCK_BYTES``, 8 hexadecimal digits each."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class About:
    """What somebody who sees a checkpoint wants to know. precision: dtypes by what they are of. parameters: numbers of
    tensors and of elements, all and trained."""

    tag: str
    saved_at: str  # ISO 8601, UTC
    global_steps: int
    world_size: int
    stage: int
    precision: dict[str, str]
    config: dict[str, Any]
    versions: dict[str, str]
    parameters: dict[str, int]
    layout: dict[str, Any]
    exclude_frozen_parameters: bool


@dataclass(frozen=True)
class Manifest:
    about: About
    files: dict[str, FileEntry]

    @property
    def nbytes(self) -> int:
        """Of all files but the manifest itself."""
        return sum(entry.bytes for entry in self.files.values())

    def to_json(self) -> bytes:
        body: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self.about)}
        body |= {"block_bytes": BLOCK_BYTES, "files": {name: asdict(entry) for name, entry in self.files.items()}}
        return json.dumps({**body, "crc32": _checksum(body)}, indent=1).encode()


def _checksum(body: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def read_manifest(path: Path) -> Manifest:
    """Of the checkpoint in the directory ``path``. Raises CheckpointError for one that is damaged, or written by a
    later version."""
    file = path / MANIFEST
    try:
        body = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"'{file}' cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"'{file}' is damaged: it is not JSON ({error})") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"'{file}': expected the manifest of a {FORMAT}, got another file")
    if not isinstance(body.get("version"), int) or body["version"] > VERSION:
        raise CheckpointError(
            f"'{file}' has format version {body.get('version')}, written by zerolite "
            f"{body.get('versions', {}).get('zerolite', '?')}; this one reads versions up to {VERSION}: update it"
        )
    found = body.pop("crc32", None)
    expected = _checksum(body)
    if found != expected:
        raise CheckpointError(f"'{file}' is damaged: expected checksum {expected}, found {found}")
    names = About.__dataclass_fields__
    about = About(**{name: body[name] for name in names})
    return Manifest(about, {name: _file_entry(file, name, value) for name, value in body["files"].items()})


def _file_entry(file: Path, name: str, value: dict[str, Any]) -> FileEntry:
    entry = FileEntry(int(value["bytes"]), str(value["crc32"]))
    if name != Path(name).name or len(entry.crc32) != 8 * math.ceil(entry.bytes / BLOCK_BYTES):
        raise CheckpointError(f"'{file}' is damaged: its entry of the file '{name}' makes no sense")
    return entry


# -------------------------------------------------------------------- the index


@dataclass(frozen=True)
class StoredBox:
    """A part of a tensor, contiguous: where it is in the tensor, and at which byte of which file."""

    box: Box
    file: str
    start: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose boxes, which do not overlap, make up all of it; an empty one has none."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[StoredBox, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def index_to_json(tensors: Mapping[str, StoredTensor]) -> bytes:
    files = sorted({box.file for tensor in tensors.values() for box in tensor.boxes})
    number = {name: i for i, name in enumerate(files)}
    entries = {
        key: {
            "shape": tensor.shape,
            "dtype": DTYPES[tensor.dtype],
            "boxes": [[number[box.file], box.start, *box.box] for box in tensor.boxes],
        }
        for key, tensor in tensors.items()
    }
    return json.dumps({"files": files, "tensors": entries}, separators=(",", ":")).encode()


def index_from_json(file: Path, content: bytes, files: Mapping[str, FileEntry]) -> dict[str, StoredTensor]:
    """Raises CheckpointError for anything that :func:`index_to_json` does not write."""
    try:
        body = json.loads(content)
        tensors = {key: _stored_tensor(entry, body["files"]) for key, entry in body["tensors"].items()}
        for key, tensor in tensors.items():
            _check(key, tensor, files)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"'{file}' is damaged: {error}") from error
    return tensors


def _stored_tensor(entry: Mapping[str, Any], names: list[str]) -> StoredTensor:
    boxes = tuple(
        StoredBox((tuple(offsets), tuple(sizes)), names[file], start) for file, start, offsets, sizes in entry["boxes"]
    )
    return StoredTensor(tuple(entry["shape"]), TORCH_DTYPES[entry["dtype"]], boxes)


def _check(key: str, tensor: StoredTensor, files: Mapping[str, FileEntry]) -> None:
    numbers: Iterable[Any] = (
        *tensor.shape,
        *(n for box in tensor.boxes for n in (box.start, *box.box[0], *box.box[1])),
    )
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"tensor '{key}' has a size or place that is no number")
    if not covers([box.box for box in tensor.boxes], tensor.shape):
        raise ValueError(f"the parts of tensor '{key}' do not make up its shape {tensor.shape}")
    for box in tensor.boxes:
        if box.start + math.prod(box.box[1]) * tensor.dtype.itemsize > files[box.file].bytes:
            raise ValueError(f"a part of tensor '{key}' ends behind the end of '{box.file}'")
