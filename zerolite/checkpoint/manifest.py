"""Manifest of a checkpoint and index of its tensors: JSON, validated when it is read."""

from __future__ import annotations

import json
import math
import platform
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerolite.checkpoint import filesystem
from zerolite.checkpoint.boxes import Box, covers
from zerolite.checkpoint.directory import MANIFEST, MOST_JSON_BYTES, Complete
from zerolite.checkpoint.errors import CheckpointError
from zerolite.utils.dtypes import BY_CODE, CODES
from zerolite.version import __version__

if TYPE_CHECKING:
    from zerolite.comm.topology import Topology

FORMAT = "zerolite checkpoint"
VERSION = 1
INDEX = "tensors.json"
STATE = "state.json"
BLOCK_BYTES = 1 << 20
MOST_DIMENSIONS = 64  # what torch's operators take


@dataclass(frozen=True)
class FileEntry:
    """A file's length, and the CRC-32 of each of its blocks of ``BLOCK_BYTES``, 8 hexadecimal digits each."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class About:
    """What somebody who sees a checkpoint wants to know. precision: dtypes by what they are of. parameters: numbers of
    tensors and of elements, all and trained. run: id of the run that saved it; "" if it does not say."""

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
    run: str = ""

    @property
    def head(self) -> Complete:
        return Complete(self.global_steps, self.saved_at, self.tag, self.run)


@dataclass(frozen=True)
class SavedGrid:
    """How the ranks were arranged: so many stages of a pipeline, each of so many data-parallel ranks of so many
    tensor-parallel ones, which are numbered in this order, the last one first."""

    pipe: int
    data: int
    tensor: int

    @classmethod
    def of(cls, topology: Topology) -> SavedGrid:
        return cls(topology.pipe.world_size, topology.data.world_size, topology.tensor.world_size)

    @property
    def ranks(self) -> int:
        return self.pipe * self.data * self.tensor

    def __str__(self) -> str:
        return f"pipe={self.pipe}, data={self.data}, tensor={self.tensor}"


def grid_of(about: About) -> SavedGrid:
    """Of the ranks that saved a checkpoint; one that does not say was saved by data-parallel ones."""
    given = about.layout.get("grid")
    return SavedGrid(1, about.world_size, 1) if given is None else SavedGrid(**given)


_KINDS: dict[str, type] = {
    "tag": str,
    "saved_at": str,
    "global_steps": int,
    "world_size": int,
    "stage": int,
    "precision": dict,
    "config": dict,
    "versions": dict,
    "parameters": dict,
    "layout": dict,
    "exclude_frozen_parameters": bool,
    "run": str,
}


def library_versions() -> dict[str, str]:
    """For :class:`About`."""
    return {"zerolite": __version__, "torch": torch.__version__, "python": platform.python_version()}


def count_parameters(described: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """For :class:`About`, of state.json's "parameters"."""
    numels = {name: math.prod(entry["shape"]) for name, entry in described.items()}
    trained = [name for name, entry in described.items() if entry["trained"]]
    return {
        "tensors": len(numels),
        "elements": sum(numels.values()),
        "trained_tensors": len(trained),
        "trained_elements": sum(numels[name] for name in trained),
    }


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
        return _manifest(file, json.loads(filesystem.read_file(file, MOST_JSON_BYTES)))
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"'{file}' cannot be read: {error.strerror}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"'{file}' is damaged: expected JSON as zerolite writes it, found {error!r}") from error


def _manifest(file: Path, body: Any) -> Manifest:
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"'{file}': expected the manifest of a {FORMAT}, got another file")
    if type(body["version"]) is not int or not 1 <= body["version"] <= VERSION:
        by = body["versions"].get("zerolite", "?") if isinstance(body.get("versions"), dict) else "?"
        raise CheckpointError(
            f"'{file}' has format version {body['version']!r}, written by zerolite {by}; this one reads versions up to "
            f"{VERSION}: update it"
        )
    found = body.pop("crc32", None)
    expected = _checksum(body)
    if found != expected:
        raise CheckpointError(f"'{file}' is damaged: expected checksum {expected}, found {found}")
    about = About(**{"run": "", **{name: body[name] for name in _KINDS if name != "run" or name in body}})
    for name, kind in _KINDS.items():
        value = getattr(about, name)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise CheckpointError(f"'{file}' is damaged: expected {name} to be of {kind.__name__}, found {value!r:.80}")
    grid = grid_of(about)
    if any(type(size) is not int or size < 1 for size in asdict(grid).values()) or grid.ranks != about.world_size:
        raise CheckpointError(f"'{file}' is damaged: expected a grid of {about.world_size} ranks, found {grid}")
    files = {name: _file_entry(file, name, value) for name, value in body["files"].items()}
    for name in (INDEX, STATE):
        if name not in files:
            raise CheckpointError(f"'{file}' is damaged: it has no entry of the file '{name}'")
    return Manifest(about, files)


def _file_entry(file: Path, name: str, value: dict[str, Any]) -> FileEntry:
    entry = FileEntry(value["bytes"], value["crc32"])
    plain = bool(name) and name.isprintable() and "/" not in name and not name.startswith(".")
    sizes = type(entry.bytes) is int and entry.bytes >= 0 and type(entry.crc32) is str
    if not plain or not sizes or len(entry.crc32) != 8 * -(-entry.bytes // BLOCK_BYTES):
        raise CheckpointError(f"'{file}' is damaged: its entry of the file {name!r:.80} makes no sense")
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
            "dtype": CODES[tensor.dtype],
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
        _check_sum(tensors, files)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"'{file}' is damaged: {error}") from error
    return tensors


def _stored_tensor(entry: Mapping[str, Any], names: list[str]) -> StoredTensor:
    boxes = tuple(
        StoredBox((tuple(offsets), tuple(sizes)), names[file], start) for file, start, offsets, sizes in entry["boxes"]
    )
    return StoredTensor(tuple(entry["shape"]), BY_CODE[entry["dtype"]], boxes)


def _check(key: str, tensor: StoredTensor, files: Mapping[str, FileEntry]) -> None:
    numbers: Iterable[Any] = (
        *tensor.shape,
        *(n for box in tensor.boxes for n in (box.start, *box.box[0], *box.box[1])),
    )
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"tensor '{key}' has a size or place that is no number")
    if len(tensor.shape) > MOST_DIMENSIONS or math.prod(max(1, size) for size in tensor.shape) >= 2**63:
        raise ValueError(f"tensor '{key}' has the shape {str(tensor.shape):.80}, which no tensor has")
    if not covers([box.box for box in tensor.boxes], tensor.shape):
        raise ValueError(f"the parts of tensor '{key}' do not make up its shape {tensor.shape}")
    for box in tensor.boxes:
        if box.start + math.prod(box.box[1]) * tensor.dtype.itemsize > files[box.file].bytes:
            raise ValueError(f"a part of tensor '{key}' ends behind the end of '{box.file}'")


def _check_sum(tensors: Mapping[str, StoredTensor], files: Mapping[str, FileEntry]) -> None:
    """That the tensors are no larger than the files: who reads them needs no more memory than that."""
    room = {name: entry.bytes for name, entry in files.items()}
    for key, tensor in tensors.items():
        for box in tensor.boxes:
            room[box.file] -= math.prod(box.box[1]) * tensor.dtype.itemsize
            if room[box.file] < 0:
                raise ValueError(f"tensor '{key}' has bytes of '{box.file}' that others have too")
