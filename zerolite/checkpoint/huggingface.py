"""Writer of Hugging Face models: ``model.safetensors``, or shards with an index, tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from zerolite.checkpoint import filesystem
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.filesystem import FileWriter
from zerolite.checkpoint.safetensors import ToStore, build_header, bytes_of
from zerolite.utils.dtypes import FLOATS
from zerolite.utils.text import parse_size

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_INCOMPLETE = ".incomplete"


def exported_dtype(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor of dtype ``stored`` is written if ``dtype`` was asked for.

    Only floating tensors of 16 bits or more are cast.
    """
    return dtype if dtype is not None and stored in (*FLOATS, torch.float64) else stored


@dataclass(frozen=True)
class ModelFile:
    """A file to be written: its tensors, in their order in the file."""

    name: str
    entries: tuple[ToStore, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def plan_files(entries: Iterable[ToStore], max_shard_size: str | int, aliases: Mapping[str, str]) -> list[ModelFile]:
    """Divide tensors, in the order given, into files of at most ``max_shard_size`` bytes, or of one larger tensor.

    Args:
        entries: the tensors.
        max_shard_size: bytes per file. Raises ValueError if it is invalid.
        aliases: other names of these tensors, with the name that is written. They go into the metadata of the file, as
            ``safetensors.torch.save_model`` does it.
    """
    limit = parse_size(max_shard_size)
    shards: list[list[ToStore]] = [[]]
    filled = 0
    for entry in entries:
        if filled + entry.nbytes > limit and filled:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    count = len(shards)
    return [
        ModelFile(
            SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors",
            tuple(sorted(shard, key=lambda entry: -entry.dtype.itemsize)),  # so that every tensor is aligned
            {alias: entry.name for entry in shard for alias in others.get(entry.name, ())} | {"format": "pt"},
        )
        for number, shard in enumerate(shards, start=1)
    ]


class ModelWriter:
    """Writes the files of :func:`plan_files` into ``directory``.

    It is a context. Within it, :meth:`begin`, :meth:`add` for each tensor and :meth:`finish` are called for each file,
    in any order, and :meth:`commit` at the end. Before the commit nothing in the directory changes, and without it
    nothing is left behind. Raises CheckpointError if the directory cannot be written.

    The commit replaces the files of the plan, the index, and the files that an earlier index names. Other files stay.
    """

    def __init__(self, directory: Path, files: Sequence[ModelFile]) -> None:
        self._directory, self._files = directory, files
        self._path = directory
        self._entries: Iterator[ToStore] = iter(())  # of the file that is being written
        self._open = contextlib.ExitStack()
        self._writer: FileWriter | None = None

    def __enter__(self) -> ModelWriter:
        if self._directory.exists() and not self._directory.is_dir():
            raise CheckpointError(f"expected '{self._directory}' to be a directory or not to exist, found a file")
        with _named(self._directory):
            filesystem.make_directory(self._directory, exist_ok=True)
            self._remove_incomplete()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        with contextlib.suppress(OSError):
            self._remove_incomplete()

    def begin(self, file: ModelFile) -> None:
        """Begin to write ``file``."""
        header, _ = build_header(file.entries, file.metadata)
        self._path, self._entries = self._directory / file.name, iter(file.entries)
        with _named(self._path):
            self._writer = self._open.enter_context(FileWriter(self._incomplete(file.name)))
            self._writer.write(memoryview(header))

    def add(self, value: torch.Tensor) -> None:
        """Write the next tensor of the file, which may be on any device."""
        entry = next(self._entries)
        if value.dtype != entry.dtype or tuple(value.shape) != entry.shape:
            raise ValueError(
                f"tensor '{entry.name}': expected {entry.dtype} {entry.shape}, got {value.dtype} {tuple(value.shape)}"
            )
        assert self._writer is not None
        with _named(self._path):
            self._writer.write(bytes_of(value))

    def finish(self) -> None:
        """End the file, which is on the disk when this returns."""
        assert self._writer is not None
        with _named(self._path):
            self._writer.finish()
        self._open.close()

    def commit(self) -> list[Path]:
        """Rename the files to their names, and return their paths.

        A process that is killed meanwhile leaves the earlier model, the new one, or none that looks complete.
        """
        names = [file.name for file in self._files]
        index = self._directory / INDEX
        with _named(self._directory):
            stale = [name for name in self._earlier() if name not in names]
            if names != [SINGLE]:
                stale.append(SINGLE)  # readers prefer it to an index
            filesystem.remove(index)  # first: without an index no reader takes a mixture of old and new files
            for name in stale:
                filesystem.remove(self._directory / name)
            for name in names:
                filesystem.rename(self._incomplete(name), self._directory / name)
            if names != [SINGLE]:
                filesystem.replace_file(index, self._index())
        return [self._directory / name for name in names]

    def _index(self) -> bytes:
        weight_map = {entry.name: file.name for file in self._files for entry in file.entries}
        total = sum(file.nbytes for file in self._files)
        body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(body, indent=2, ensure_ascii=False) + "\n").encode()

    def _earlier(self) -> list[str]:
        """Return the numbered files that the existing index names; [] if it cannot be read."""
        try:
            names = set(json.loads((self._directory / INDEX).read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []
        return sorted(name for name in names if isinstance(name, str) and _NUMBERED.fullmatch(name))

    def _incomplete(self, name: str) -> Path:
        return self._directory / f".{name}{_INCOMPLETE}"

    def _remove_incomplete(self) -> None:
        for path in sorted(self._directory.glob(f".model*.safetensors{_INCOMPLETE}")):
            filesystem.remove(path)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"'{path}' could not be written: {error.strerror or error}") from error
