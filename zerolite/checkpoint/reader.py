"""Checkpoint reader without a process group: reads only the requested bytes and verifies each of them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from zerolite.checkpoint import json_codec
from zerolite.checkpoint.boxes import Box, BoxIndex
from zerolite.checkpoint.directory import newest_complete
from zerolite.checkpoint.errors import CheckpointError, DamagedFile
from zerolite.checkpoint.filesystem import CheckedFile
from zerolite.checkpoint.flat_ranges import Shard
from zerolite.checkpoint.manifest import (
    INDEX,
    STATE,
    Manifest,
    StoredBox,
    StoredTensor,
    index_from_json,
    read_manifest,
)
from zerolite.checkpoint.safetensors import as_bytes
from zerolite.checkpoint.state import StoredModel, validated

Result = TypeVar("Result")
State = TypeVar("State", bound=StoredModel)


class CheckpointReader:
    """One checkpoint, in the directory ``path``.

    Raises CheckpointError, here and whenever it reads, if something is missing, shorter, longer or changed since it was
    saved. The message names the file, the bytes expected and found, and which other checkpoint is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._client_tensors: dict[int, torch.Tensor] = {}
        self.manifest: Manifest = self.trust(lambda: read_manifest(path))

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Stored tensors, by key."""
        return self.trust(lambda: index_from_json(self._content(INDEX), self.manifest.files), INDEX)

    @cached_property
    def state(self) -> dict[str, Any]:
        """Stored state except the model's and the optimizer's tensors."""

        def decoded() -> dict[str, Any]:
            content = json_codec.decode(json.loads(self._content(STATE)), self._client_tensor)
            if not isinstance(content, dict):
                raise ValueError(f"expected an object, found a {type(content).__name__}")
            return content

        return self.trust(decoded)

    def read_state(self, model: type[State]) -> State:
        """Return the stored state as an object of ``model``. Raises CheckpointError if it does not fit."""

        def fitting() -> State:
            state = validated(lambda: model.model_validate(self.state))
            shapes = {key: stored.shape for key, stored in self.tensors.items()}
            state.check(shapes, self.manifest.exclude_frozen_parameters)
            return state

        return self.trust(fitting)

    def trust(self, use: Callable[[], Result], name: str = STATE) -> Result:
        """Return the result of ``use``, which relies on the content of the file ``name``.

        Raises CheckpointError, with the newest other checkpoint, if a file is damaged or its content is not valid. A
        file with valid checksums can hold anything, for example if another version has written it.
        """
        try:
            with self._naming_others():
                return use()
        except CheckpointError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"'{self.path / name}' is damaged, or does not fit: {type(error).__name__}: "
                f"{str(error).rstrip('. ')}. {self._others()}"
            ) from error

    @contextlib.contextmanager
    def _naming_others(self) -> Iterator[None]:
        try:
            yield
        except DamagedFile as error:
            raise CheckpointError(f"{error}. {self._others()}") from error

    def _others(self) -> str:
        return newest_complete(self.path.parent, besides=self.path.name)

    def problems(self, sizes_only: bool = False) -> Iterator[CheckpointError]:
        """Read every file to its end, or only look at its size. Yields an error for each that is not as it was."""
        for name in self.manifest.files:
            try:
                with self._naming_others(), self._open(name) as file:
                    if not sizes_only:
                        file.verify()
            except CheckpointError as error:
                yield error

    def read(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a full tensor on the CPU, in ``dtype`` (default: the stored one)."""
        stored = self.tensors[key]
        values = torch.empty(stored.shape, dtype=dtype or stored.dtype, device="cpu")
        self.load([Shard.whole(key, values)])
        return values

    def load(self, shards: Iterable[Shard]) -> None:
        """Fill ``shards``, file by file, each from begin to end."""
        with self._naming_others():
            self._load(shards)

    def _load(self, shards: Iterable[Shard]) -> None:
        by_file: dict[str, list[tuple[StoredBox, Box, Shard]]] = {}
        boxes: dict[str, BoxIndex] = {}
        for shard in shards:
            stored = self.tensors.get(shard.key)
            if stored is None:
                raise DamagedFile(f"'{self.path / INDEX}' is damaged: it has no tensor '{shard.key}'")
            if shard.shape != stored.shape:
                raise CheckpointError(
                    f"the tensor '{shard.key}' has the shape {stored.shape} in the checkpoint, and {shard.shape} here"
                )
            if shard.key not in boxes:
                boxes[shard.key] = BoxIndex([box.box for box in stored.boxes])
            for position, common in boxes[shard.key].intersections(shard.box):
                box = stored.boxes[position]
                by_file.setdefault(box.file, []).append((box, common, shard))
        for name, wanted in sorted(by_file.items()):
            with self._open(name) as file:
                # In the order of the file, so that the disk reads forward and each block is read once.
                for box, common, shard in sorted(wanted, key=lambda entry: entry[0].start):
                    out = part_of(shard.tensor(), common, shard.box[0])
                    _fetch(file, box, common, self.tensors[shard.key].dtype, out)

    def _client_tensor(self, index: int) -> torch.Tensor:
        """Read a tensor of the user's state, once for each number: a damaged file cannot take more memory than it has
        bytes."""
        if index not in self._client_tensors:
            self._client_tensors[index] = self.read(f"client_state/{index}")
        return self._client_tensors[index]

    def _content(self, name: str) -> bytes:
        with self._open(name) as file:
            return file.read_all()

    def _open(self, name: str) -> CheckedFile:
        return CheckedFile(self.path / name, self.manifest.files[name])


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


def _fetch(file: CheckedFile, stored: StoredBox, part: Box, dtype: torch.dtype, out: torch.Tensor) -> None:
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
