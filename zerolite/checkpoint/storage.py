"""Writing of one checkpoint: a safetensors file from each rank, then index, state and manifest from the first one."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from zerolite.checkpoint import directory, filesystem, json_codec
from zerolite.checkpoint.boxes import Box
from zerolite.checkpoint.directory import MANIFEST, TrainingRun, newest_complete
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.filesystem import FileEntry, FileWriter
from zerolite.checkpoint.flat_ranges import Shard
from zerolite.checkpoint.manifest import (
    INDEX,
    STATE,
    Manifest,
    StoredBox,
    StoredTensor,
    check_complete,
    index_to_json,
)
from zerolite.checkpoint.safetensors import ToStore, build_header, bytes_of
from zerolite.comm import Communicator, HostGroup, RaiseTogether, collective

Result = TypeVar("Result")
Scalars = dict[str, dict[str, Any]]  # state -> parameter -> value


@collective
def write_checkpoint(
    save_dir: Path,
    tag: str,
    shards: Sequence[Shard],
    scalars: Scalars,
    commit: Commit | None,
    host: HostGroup | None = None,
) -> Path:
    """Write ``shards`` and commit. Returns the checkpoint's directory.

    Args:
        shards: shards of this rank; functions in them are called when their values are written.
        scalars: optimizer states that are one number.
        commit: on the first rank, None on the others.
        host: the ranks that write; None for one process alone.

    Raises:
        CheckpointError: on all ranks if one has failed. Then earlier checkpoints are as before.
    """
    host = host or HostGroup(Communicator(), "checkpoint")
    ranks = RaiseTogether(host, "save_checkpoint", CheckpointError, same=CheckpointError)

    def naming(action: Callable[[], Result]) -> Callable[[], Result]:
        return functools.partial(_raise_with_names, action, host.rank, save_dir, tag)

    try:
        file = ranks.run(naming(lambda: _RankFile(host.rank, shards)))
        parts = host.gather_to_first((file.tensors, scalars))
        path = ranks.gather(naming(lambda: save_dir if commit is None else commit.begin(parts)))[0]
        entry = ranks.run(naming(lambda: file.write(path)))
        entries = host.gather_to_first(entry)
        ranks.run(naming(lambda: None if commit is None else commit.finish(entries)))
    except CheckpointError:
        raise
    except RuntimeError as error:  # of a collective
        first = next(iter(str(error).splitlines()), type(error).__name__)
        cause = f"a rank has ended, or cannot be reached ({first})"
        raise CheckpointError(_failed(save_dir, tag, cause)) from error
    finally:
        if commit is not None:
            commit.close()
    return save_dir / tag


def _raise_with_names(action: Callable[[], Result], rank: int, save_dir: Path, tag: str) -> Result:
    """Run ``action``. Its error then names checkpoint and rank, so that all ranks raise the same one."""
    try:
        return action()
    except Exception as error:
        raise CheckpointError(_failed(save_dir, tag, f"rank {rank}: {_sentence(error)}")) from error


def _failed(save_dir: Path, tag: str, cause: str) -> str:
    return f"saving checkpoint '{tag}' failed: {cause.rstrip('. ')}. {newest_complete(save_dir)} in '{save_dir}'"


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"'{error.filename}': {error.strerror}"
    return str(error) if isinstance(error, (CheckpointError, OSError)) else f"{type(error).__name__}: {error}"


class _RankFile:
    """The file of one rank, with all of its shards; without any there is no file.

    Shards of the widest dtypes come first, as the format's own library orders them, so that every tensor is aligned.

    Attributes:
        tensors: the part of the index that describes this file, with tensors that are empty.
    """

    def __init__(self, rank: int, shards: Sequence[Shard]) -> None:
        self.name = f"rank_{rank:05d}.safetensors"
        self._shards = sorted((shard for shard in shards if shard.nbytes), key=lambda shard: -shard.dtype.itemsize)
        entries = [ToStore(_name(shard.key, shard.box), shard.dtype, shard.box[1]) for shard in self._shards]
        self._header, starts = build_header(entries, {"format": "pt"})
        self.tensors = {shard.key: StoredTensor(shard.shape, shard.dtype, []) for shard in shards}
        for shard, start in zip(self._shards, starts, strict=True):
            self.tensors[shard.key].boxes.append(StoredBox(shard.box, self.name, start))

    def write(self, directory: Path) -> dict[str, FileEntry]:
        """Write the file. Returns its entry, by its name."""
        if not self._shards:
            return {}
        with FileWriter(directory / self.name) as file:
            file.write(memoryview(self._header))
            for shard in self._shards:
                values = shard.tensor()
                if values.dtype != shard.dtype or tuple(values.shape) != shard.box[1]:
                    raise AssertionError(f"{shard.key} is not as planned: {tuple(values.shape)} of {values.dtype}")
                file.write(bytes_of(values))
            return {self.name: file.finish()}


def _name(key: str, box: Box) -> str:
    return f"{key}@{','.join(map(str, box[0]))}"


@dataclass
class Commit:
    """The first rank's part in a save: it makes the directory, and completes it when all ranks have written.

    It must be closed, which removes a checkpoint that is not complete.

    Attributes:
        save_dir: directory of the checkpoints.
        manifest: the manifest, without its files.
        state: content of state.json, to which the optimizer's scalars are added.
        run: run of the job that saves; None may replace the checkpoints of all runs.
        save_latest: let ``latest`` point to this checkpoint.
    """

    save_dir: Path
    manifest: Manifest
    state: dict[str, Any]
    run: TrainingRun | None
    save_latest: bool = True
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)
    _path: Path | None = field(default=None, init=False)  # from the begin until the checkpoint has its name
    _tensors: dict[str, StoredTensor] = field(default_factory=dict, init=False)

    def begin(self, ranks: Sequence[tuple[Mapping[str, StoredTensor], Scalars]]) -> Path:
        """Lock the directory of the checkpoints, and make the one that all ranks write into.

        Args:
            ranks: each rank's part of the index, and its scalars. Raises CheckpointError unless they make up every
                tensor.
        """
        scalars: Scalars = {}
        for tensors, scalars_of_rank in ranks:
            for key, tensor in tensors.items():
                self._add(key, tensor)
            for state, values in scalars_of_rank.items():
                scalars.setdefault(state, {}).update(values)
        self.state["optimizer"]["scalars"] = json_codec.encode(scalars, "optimizer states", [])
        for key, tensor in self._tensors.items():
            try:
                check_complete(key, tensor)
            except ValueError as error:
                raise CheckpointError(
                    f"{error}; nothing was saved. This is a bug in zerolite: please report it"
                ) from error
        self._open.enter_context(directory.locked(self.save_dir))
        self._path = directory.begin(self.save_dir, self.manifest.tag, self.run)
        return self._path

    def _add(self, key: str, tensor: StoredTensor) -> None:
        known = self._tensors.setdefault(key, StoredTensor(tensor.shape, tensor.dtype, []))
        if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"'{key}' is {known.shape} of {known.dtype} on one rank and {tensor.shape} of {tensor.dtype} on "
                "another; nothing was saved"
            )
        known.boxes.extend(tensor.boxes)

    def finish(self, entries: Sequence[dict[str, FileEntry]]) -> None:
        """Check the files of all ranks, write index, state and manifest, and rename the directory to its tag."""
        path, tag = self._path, self.manifest.tag
        assert path is not None
        files = {name: entry for of_rank in entries for name, entry in of_rank.items()}
        for name, entry in sorted(files.items()):
            _check_size(path / name, entry.bytes)
        files[INDEX] = filesystem.write_file(path / INDEX, index_to_json(self._tensors))
        files[STATE] = filesystem.write_file(path / STATE, json.dumps(self.state, separators=(",", ":")).encode())
        # The manifest is the last file: a directory without it is not a checkpoint. Only then is the directory renamed.
        manifest = self.manifest.model_copy(update={"files": dict(sorted(files.items()))})
        filesystem.write_file(path / MANIFEST, manifest.to_json())
        directory.commit(path, tag)
        self._path = None
        if self.save_latest:
            try:
                directory.set_latest(self.save_dir, tag)
            except OSError as error:
                raise CheckpointError(
                    f"it is complete in '{self.save_dir}', but the file '{directory.LATEST}' could not be replaced "
                    f"({error.strerror}) and names another one, or none; load it with tag='{tag}'"
                ) from error

    def close(self) -> None:
        """Unlock the directory, and remove a checkpoint that was not committed."""
        with self._open:
            if self._path is not None:
                with contextlib.suppress(OSError):  # the next save removes it
                    filesystem.remove(self._path)


def now() -> str:
    """Return the current time for a manifest."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"'{path}' was written by a rank, but this one, which completes the checkpoint, cannot see it "
            f"({error.strerror}): save_dir must be on a file system that all nodes share"
        ) from error
    if size != expected:
        raise CheckpointError(
            f"'{path}': expected {expected} bytes, as written, found {size}; the checkpoint is dropped"
        )
