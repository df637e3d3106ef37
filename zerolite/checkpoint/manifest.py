"""Manifest of a checkpoint and index of its tensors: JSON, validated when it is read."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from zerolite.checkpoint import filesystem
from zerolite.checkpoint.boxes import Box, covers
from zerolite.checkpoint.directory import MANIFEST, MOST_JSON_BYTES
from zerolite.checkpoint.errors import DamagedFile
from zerolite.checkpoint.filesystem import BLOCK_BYTES, FileEntry
from zerolite.checkpoint.state import STRICT, FileModel, Natural, validated
from zerolite.utils.dtypes import BY_CODE, CODES
from zerolite.version import __version__

if TYPE_CHECKING:
    from zerolite.comm.topology import Topology

FORMAT = "zerolite checkpoint"
VERSION = 2
INDEX = "tensors.json"
STATE = "state.json"
MOST_DIMENSIONS = 64  # the most that torch's operators accept


@dataclass(frozen=True, config=STRICT)
class SavedGrid:
    """Grid of the ranks: pipeline stages × data-parallel × tensor-parallel ranks, numbered with tensor innermost."""

    pipe: PositiveInt
    data: PositiveInt
    tensor: PositiveInt

    @classmethod
    def of(cls, topology: Topology) -> SavedGrid:
        return cls(topology.pipe.world_size, topology.data.world_size, topology.tensor.world_size)

    @property
    def ranks(self) -> int:
        return self.pipe * self.data * self.tensor


class Manifest(FileModel):
    """Description of a checkpoint, and of all its other files.

    Attributes:
        saved_at: time in ISO 8601, UTC.
        grid: grid of the ranks that saved it.
        run: id of the run that saved it; "" if it is not stored.
    """

    tag: str
    saved_at: str
    global_steps: Natural
    grid: SavedGrid
    stage: Natural
    config: dict[str, Any]
    versions: dict[str, str]
    exclude_frozen_parameters: bool
    run: str = ""
    files: dict[str, FileEntry] = {}

    def to_json(self) -> bytes:
        body = {"format": FORMAT, "version": VERSION, "block_bytes": BLOCK_BYTES, **self.model_dump()}
        return json.dumps({**body, "crc32": _checksum(body)}, indent=1).encode()


def library_versions() -> dict[str, str]:
    """Return the versions for :class:`Manifest`."""
    return {"zerolite": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _checksum(body: Mapping[str, object]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def read_manifest(path: Path) -> Manifest:
    """Read the manifest in the directory ``path``. Raises DamagedFile if it is damaged or of another version."""
    file = path / MANIFEST
    try:
        return _manifest(filesystem.read_file(file, MOST_JSON_BYTES))
    except OSError as error:
        raise DamagedFile(f"'{file}' cannot be read: {error.strerror}") from error
    except (RecursionError, TypeError, ValueError) as error:
        raise DamagedFile(f"'{file}' is damaged, or of another version: {error}") from error


def _manifest(content: bytes) -> Manifest:
    body = json.loads(content)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError(f"expected the manifest of a {FORMAT}, got another file")
    version = body.get("version")
    if type(version) is not int or version != VERSION:
        by = body["versions"].get("zerolite", "?") if isinstance(body.get("versions"), dict) else "?"
        raise ValueError(
            f"it has format version {version!r}, written by zerolite {by}; this one reads version {VERSION}: use that "
            "zerolite"
        )
    stored = body.pop("crc32", None)
    expected = _checksum(body)
    if stored != expected:
        raise ValueError(f"expected checksum {expected}, found {stored}")
    manifest = validated(lambda: Manifest.model_validate_json(content))
    for name, entry in manifest.files.items():
        entry.check(name)
    for name in (INDEX, STATE):
        if name not in manifest.files:
            raise ValueError(f"it has no entry of the file '{name}'")
    return manifest


# -------------------------------------------------------------------- the index


@dataclasses.dataclass(frozen=True)
class StoredBox:
    """A contiguous part of a tensor: its box, its file, and its first byte there."""

    box: Box
    file: str
    start: int


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor whose boxes make up all of it, without overlaps; an empty tensor has none."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[StoredBox]


def index_to_json(tensors: Mapping[str, StoredTensor]) -> bytes:
    files = sorted({box.file for tensor in tensors.values() for box in tensor.boxes})
    number = {name: i for i, name in enumerate(files)}
    entries = {
        key: {
            "shape": tensor.shape,
            "dtype": CODES[tensor.dtype],
            "boxes": [[number[box.file], box.start, *box.box] for box in tensor.boxes],
        }
        for key, tensor in tensors.items()
    }
    return json.dumps({"files": files, "tensors": entries}, separators=(",", ":")).encode()


def index_from_json(content: bytes, files: Mapping[str, FileEntry]) -> dict[str, StoredTensor]:
    """Read the index. Raises ValueError or LookupError for anything that :func:`index_to_json` does not write."""
    body = validated(lambda: _Index.model_validate_json(content))
    tensors = {key: entry.stored(body.files) for key, entry in body.tensors.items()}
    _check(tensors, files)
    return tensors


class _IndexEntry(FileModel):
    """A tensor. Each of its boxes is a file's number, the first byte there, offsets and sizes."""

    shape: list[Natural] = Field(max_length=MOST_DIMENSIONS)
    dtype: str
    boxes: list[tuple[Natural, Natural, tuple[Natural, ...], tuple[Natural, ...]]]

    def stored(self, names: list[str]) -> StoredTensor:
        boxes = [StoredBox((offsets, sizes), names[file], start) for file, start, offsets, sizes in self.boxes]
        return StoredTensor(tuple(self.shape), BY_CODE[self.dtype], boxes)


class _Index(FileModel):
    files: list[str]
    tensors: dict[str, _IndexEntry]


def check_complete(key: str, tensor: StoredTensor) -> None:
    """Raise ValueError unless the boxes of ``tensor`` make up all of it, each element once."""
    if math.prod(max(1, size) for size in tensor.shape) >= 2**63:
        raise ValueError(f"tensor '{key}' has the shape {str(tensor.shape):.80}, which no tensor has")
    if not covers([box.box for box in tensor.boxes], tensor.shape):
        raise ValueError(f"the ranks' parts of '{key}' do not make up its shape {tensor.shape}")


def _check(tensors: Mapping[str, StoredTensor], files: Mapping[str, FileEntry]) -> None:
    """Check that every tensor is complete, and that no two share bytes of a file.

    So a damaged index cannot make a reader allocate more memory than the files have bytes.
    """
    room = {name: entry.bytes for name, entry in files.items()}
    for key, tensor in tensors.items():
        check_complete(key, tensor)
        for box in tensor.boxes:
            nbytes = math.prod(box.box[1]) * tensor.dtype.itemsize
            if box.start + nbytes > files[box.file].bytes:
                raise ValueError(f"a part of tensor '{key}' ends behind the end of '{box.file}'")
            room[box.file] -= nbytes
            if room[box.file] < 0:
                raise ValueError(f"tensor '{key}' has bytes of '{box.file}' that others have too")
