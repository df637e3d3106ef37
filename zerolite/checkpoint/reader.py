"""Checkpoint reader without a process group: reads only the requested bytes and verifies each of them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from zerolite.checkpoint import filesystem, json_codec
from zerolite.checkpoint.boxes import Box, BoxIndex
from zerolite.checkpoint.directory import complete_checkpoints
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.file_model import FileModel, validated
from zerolite.checkpoint.manifest import (
    BLOCK_BYTES,
    INDEX,
    STATE,
    FileEntry,
    Manifest,
    StoredBox,
    StoredTensor,
    index_from_json,
    read_manifest,
)
from zerolite.checkpoint.safetensors import as_bytes

Result = TypeVar("Result")
State = TypeVar("State", bound=FileModel)
_CHUNK_BYTES = 8 * BLOCK_BYTES


@dataclass(frozen=True)
class Target:
    """A box of the tensor ``key`` that is wanted. ``place``: a tensor of the box's sizes, any dtype and device, any
    strides."""

    key: str
    box: Box
    place: torch.Tensor


class CheckpointReader:
    """One checkpoint, in the directory ``path``.

    Raises CheckpointError, here and wherever it reads, with the file, and the bytes expected and found, if something is
    missing, shorter, longer or other than it was when it was saved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._client_tensors: dict[int, torch.Tensor] = {}
        with self._naming_others():
            self.manifest: Manifest = read_manifest(path)

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Stored tensors, by key."""
        content = self.content(INDEX)
        with self._naming_others():
            return index_from_json(self.path / INDEX, content, self.manifest.files)

    @cached_property
    def state(self) -> dict[str, Any]:
        """Stored state beside the model's and the optimizer's tensors."""
        content = self.content(STATE)
        with self._damaged_state():
            decoded = json_codec.decode(json.loads(content), self._client_tensor)
            if not isinstance(decoded, dict):
                raise ValueError(f"expected an object, found a {type(decoded).__name__}")
        return decoded

    def read_state(self, model: type[State]) -> State:
        """Return what is stored beside the tensors, in the form of ``model``. Raises CheckpointError if it is other."""
        state = self.state
        with self._damaged_state():
            return validated(lambda: model.model_validate(state))

    @contextlib.contextmanager
    def _damaged_state(self) -> Iterator[None]:
        try:
            yield
        except (RecursionError, ValueError) as error:
            raise CheckpointError(f"'{self.path / STATE}' is damaged: {error}. {self._others()}") from error

    @contextlib.contextmanager
    def _naming_others(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {self._others()}") from error

    def trust(self, use: Callable[[], Result]) -> Result:
        """The result of ``use``, which takes state.json for what zerolite writes. Raises CheckpointError where it is
        not."""
        try:
            return use()
        except CheckpointError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"'{self.path / STATE}' is damaged, or does not fit: {type(error).__name__}: "
                f"{str(error).rstrip('. ')}. {self._others()}"
            ) from error

    def _client_tensor(self, index: int) -> torch.Tensor:
        """The same one for the same number: it takes no more memory than there is in the files."""
        if index not in self._client_tensors:
            self._client_tensors[index] = self.read(f"client_state/{index}")
        return self._client_tensors[index]

    def check_sizes(self) -> None:
        """Check that every file is there and as long as it was."""
        for name in self.manifest.files:
            self._open(name).close()

    def verify(self) -> Iterator[tuple[str, CheckpointError | None]]:
        """Read every file to its end: its name and what is wrong with it, or None."""
        buffer = bytearray(_CHUNK_BYTES)
        for name, entry in self.manifest.files.items():
            problem = None
            try:
                with self._open(name) as file:
                    for start in range(0, entry.bytes, _CHUNK_BYTES):
                        file.read_blocks(start, memoryview(buffer)[: min(_CHUNK_BYTES, entry.bytes - start)])
            except CheckpointError as error:
                problem = error
            yield name, problem

    def content(self, name: str) -> bytes:
        """All of a small file."""
        with self._open(name) as file:
            buffer = bytearray(file.entry.bytes)
            file.read_blocks(0, memoryview(buffer))
            return bytes(buffer)

    def read(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor, on the CPU, in ``dtype`` (default: as it is stored)."""
        stored = self.tensors[key]
        whole = torch.empty(stored.shape, dtype=dtype or stored.dtype, device="cpu")
        self.load([Target(key, ((0,) * len(stored.shape), stored.shape), whole)])
        return whole

    def load(self, targets: Iterable[Target]) -> None:
        """Fill the places of ``targets``, file by file, from the front to the back."""
        by_file: dict[str, list[tuple[StoredBox, Box, Target]]] = {}
        boxes: dict[str, BoxIndex] = {}
        for target in targets:
            stored = self.tensors.get(target.key)
            if stored is None:
                raise CheckpointError(
                    f"'{self.path / INDEX}' is damaged: it has no tensor '{target.key}'. {self._others()}"
                )
            if target.key not in boxes:
                boxes[target.key] = BoxIndex([box.box for box in stored.boxes])
            found = 0
            for position, common in boxes[target.key].meeting(target.box):
                box = stored.boxes[position]
                by_file.setdefault(box.file, []).append((box, common, target))
                found += math.prod(common[1])
            if found != math.prod(target.box[1]):
                raise CheckpointError(
                    f"the tensor '{target.key}' of the checkpoint has the shape {tuple(stored.shape)}, in which "
                    f"{target.box[1]} elements from {target.box[0]} on are not"
                )
        for name, wanted in sorted(by_file.items()):
            with self._open(name) as file:
                for box, common, target in sorted(wanted, key=lambda entry: entry[0].start):
                    place = part_of(target.place, common, target.box[0])
                    _fetch(file, box, common, self.tensors[target.key].dtype, place)

    def _open(self, name: str) -> _CheckedFile:
        return _CheckedFile(self.path / name, self.manifest.files[name], self._others)

    def _others(self) -> str:
        found = [known.tag for known in complete_checkpoints(self.path.parent) if known.tag != self.path.name]
        return f"The newest other checkpoint there is '{found[-1]}'" if found else "There is no other checkpoint there"


def part_of(tensor: torch.Tensor, box: Box, origin: Sequence[int] | None = None) -> torch.Tensor:
    """The elements of ``box``, a view; ``origin``: where the tensor's first element is."""
    for dim, (low, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, low - (origin[dim] if origin is not None else 0), size)
    return tensor


def _fetch(file: _CheckedFile, stored: StoredBox, part: Box, dtype: torch.dtype, place: torch.Tensor) -> None:
    """Read the bytes of the stored box from the first to the last element of ``part``, and copy those that are in it to
    ``place``."""
    offsets, sizes = stored.box
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    low = [start - offset for start, offset in zip(part[0], offsets, strict=True)]
    first = sum(n * stride for n, stride in zip(low, strides, strict=True))
    last = first + sum((n - 1) * stride for n, stride in zip(part[1], strides, strict=True))
    start = stored.start + first * dtype.itemsize
    compact = last - first + 1 == math.prod(part[1])
    if compact and place.device.type == "cpu" and place.is_contiguous() and place.dtype == dtype:
        file.read(start, as_bytes(place))
        return
    flat = torch.empty(last - first + 1, dtype=dtype, device="cpu")
    file.read(start, as_bytes(flat))
    place.copy_(flat.as_strided(part[1], strides))


class _CheckedFile:
    """A file whose bytes are compared with their checksums as they are read, block by block."""

    def __init__(self, path: Path, entry: FileEntry, others: Callable[[], str]) -> None:
        self.path = path
        self.entry = entry
        self._others = others
        self._last: tuple[int, bytearray] = (-1, bytearray())  # a block that was read for a part of it
        try:
            self._descriptor = filesystem.open_file(path)
        except OSError as error:
            raise self._problem(f"cannot be read: {error.strerror}") from error
        found = os.fstat(self._descriptor).st_size
        if found != entry.bytes:
            self.close()
            raise self._problem(f"is damaged: expected {entry.bytes} bytes, found {found}")

    def __enter__(self) -> _CheckedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``start`` on."""
        end = start + len(view)
        while start < end:
            block = start - start % BLOCK_BYTES
            whole = (min(end, self.entry.bytes - self.entry.bytes % BLOCK_BYTES) - start) // BLOCK_BYTES * BLOCK_BYTES
            if start == block and whole:
                numel = min(whole, _CHUNK_BYTES)
                self.read_blocks(start, view[:numel])
            else:
                numel = min(block + BLOCK_BYTES, end) - start
                view[:numel] = memoryview(self._block(block))[start - block : start - block + numel]
            view = view[numel:]
            start += numel

    def _block(self, start: int) -> bytearray:
        if self._last[0] != start:
            content = bytearray(min(BLOCK_BYTES, self.entry.bytes - start))
            self.read_blocks(start, memoryview(content))
            self._last = (start, content)
        return self._last[1]

    def read_blocks(self, start: int, view: memoryview) -> None:
        """Whole blocks, and the shorter one at the end of the file."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], start + done)
            except OSError as error:
                raise self._problem(f"cannot be read at byte {start + done}: {error.strerror}") from error
            if not count:
                raise self._problem(f"is damaged: expected {self.entry.bytes} bytes, found {start + done}")
            done += count
        for low in range(0, len(view), BLOCK_BYTES):
            number = (start + low) // BLOCK_BYTES
            expected = self.entry.crc32[8 * number : 8 * number + 8]
            found = f"{zlib.crc32(view[low : low + BLOCK_BYTES]):08x}"
            if found != expected:
                end = min(start + low + BLOCK_BYTES, self.entry.bytes)
                raise self._problem(
                    f"is damaged between bytes {start + low} and {end}: expected checksum {expected}, found {found}"
                )

    def _problem(self, what: str) -> CheckpointError:
        return CheckpointError(f"'{self.path}' {what}. {self._others()}")
