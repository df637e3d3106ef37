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
from zerolite.checkpoint.file_model import validated
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
from zerolite.checkpoint.state import StoredModel

Result = TypeVar("Result")
State = TypeVar("State", bound=StoredModel)
_CHUNK_BYTES = 8 * BLOCK_BYTES  # read at once


@dataclass(frozen=True)
class Target:
    """A box of the tensor ``key``, and the tensor to read it into.

    Attributes:
        key: name of the tensor in the checkpoint.
        box: the box.
        out: tensor of the box's sizes, of any dtype, device and strides.
    """

    key: str
    box: Box
    out: torch.Tensor


class CheckpointReader:
    """One checkpoint, in the directory ``path``.

    Raises CheckpointError, here and whenever it reads, if something is missing, shorter, longer or changed since it was
    saved. The message names the file, and the bytes expected and found.
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
        """Stored state except the model's and the optimizer's tensors."""
        content = self.content(STATE)
        with self._damaged_state():
            decoded = json_codec.decode(json.loads(content), self._client_tensor)
            if not isinstance(decoded, dict):
                raise ValueError(f"expected an object, found a {type(decoded).__name__}")
        return decoded

    def read_state(self, model: type[State]) -> State:
        """Return the stored state as an object of ``model``. Raises CheckpointError if it does not fit."""
        state = self.state
        with self._damaged_state():
            found = validated(lambda: model.model_validate(state))
            found.check_tensors(self.tensors.keys(), self.manifest.about.exclude_frozen_parameters)
        return found

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
        """Return the result of ``use``, which relies on a valid state.json. Raises CheckpointError if it is not
        valid."""
        try:
            return use()
        except CheckpointError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # A file with valid checksums can hold anything, for example if another version has written it.
            raise CheckpointError(
                f"'{self.path / STATE}' is damaged, or does not fit: {type(error).__name__}: "
                f"{str(error).rstrip('. ')}. {self._others()}"
            ) from error

    def _client_tensor(self, index: int) -> torch.Tensor:
        """Read a tensor of the user's state, once for each number: a damaged file cannot take more memory than it has
        bytes."""
        if index not in self._client_tensors:
            self._client_tensors[index] = self.read(f"client_state/{index}")
        return self._client_tensors[index]

    def check_sizes(self) -> None:
        """Raise CheckpointError unless every file is there and has its size."""
        for name in self.manifest.files:
            self._open(name).close()

    def verify(self) -> Iterator[tuple[str, CheckpointError | None]]:
        """Read every file to its end. Yields its name, and the error or None."""
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
        """Return the content of a small file."""
        with self._open(name) as file:
            buffer = bytearray(file.entry.bytes)
            file.read_blocks(0, memoryview(buffer))
            return bytes(buffer)

    def read(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a full tensor on the CPU, in ``dtype`` (default: the stored one)."""
        stored = self.tensors[key]
        whole = torch.empty(stored.shape, dtype=dtype or stored.dtype, device="cpu")
        self.load([Target(key, ((0,) * len(stored.shape), stored.shape), whole)])
        return whole

    def load(self, targets: Iterable[Target]) -> None:
        """Fill ``targets``, file by file, each from begin to end."""
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
            for position, common in boxes[target.key].intersections(target.box):
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
                # In the order of the file, so that the disk reads forward and each block is read once.
                for box, common, target in sorted(wanted, key=lambda entry: entry[0].start):
                    out = part_of(target.out, common, target.box[0])
                    _fetch(file, box, common, self.tensors[target.key].dtype, out)

    def _open(self, name: str) -> _CheckedFile:
        return _CheckedFile(self.path / name, self.manifest.files[name], self._others)

    def _others(self) -> str:
        found = [known.tag for known in complete_checkpoints(self.path.parent) if known.tag != self.path.name]
        return f"The newest other checkpoint there is '{found[-1]}'" if found else "There is no other checkpoint there"


def part_of(tensor: torch.Tensor, box: Box, origin: Sequence[int] | None = None) -> torch.Tensor:
    """Return the elements of ``box`` as a view.

    Args:
        tensor: the tensor.
        box: the box.
        origin: offsets of the tensor's first element; default: 0.
    """
    for dim, (low, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, low - (origin[dim] if origin is not None else 0), size)
    return tensor


def _fetch(file: _CheckedFile, stored: StoredBox, part: Box, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Read the part ``part`` of a stored box into ``out``.

    The bytes between its first and last element are read as one range; without gaps they go straight into ``out``.
    """
    offsets, sizes = stored.box
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    low = [start - offset for start, offset in zip(part[0], offsets, strict=True)]
    first = sum(n * stride for n, stride in zip(low, strides, strict=True))
    last = first + sum((n - 1) * stride for n, stride in zip(part[1], strides, strict=True))
    start = stored.start + first * dtype.itemsize
    compact = last - first + 1 == math.prod(part[1])
    if compact and out.device.type == "cpu" and out.is_contiguous() and out.dtype == dtype:
        file.read(start, as_bytes(out))
        return
    flat = torch.empty(last - first + 1, dtype=dtype, device="cpu")
    file.read(start, as_bytes(flat))
    out.copy_(flat.as_strided(part[1], strides))


class _CheckedFile:
    """A file whose bytes are compared with their checksums, block by block, as they are read."""

    def __init__(self, path: Path, entry: FileEntry, others: Callable[[], str]) -> None:
        self.path = path
        self.entry = entry
        self._others = others
        self._last: tuple[int, bytearray] = (-1, bytearray())  # the latest block of which only a part was needed
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
            # Whole blocks are read straight into the view. A part of a block needs the whole block for its checksum.
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
        """Read whole blocks, including the shorter one at the end of the file, and compare their checksums."""
        done = 0
        while done < len(view):
            try:
                # A read may return less than was asked for: Linux reads at most 2 GiB at once.
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
