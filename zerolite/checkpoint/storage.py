"""Storage of torch.distributed.checkpoint: one safetensors file per rank, JSON instead of pickles, and the commit."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from zerolite.checkpoint import directory, filesystem, json_codec
from zerolite.checkpoint.checksums import BlockChecksums, entry_of
from zerolite.checkpoint.directory import MANIFEST, newest_complete
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.manifest import (
    INDEX,
    STATE,
    About,
    FileEntry,
    Manifest,
    StoredBox,
    StoredTensor,
    index_to_json,
)
from zerolite.checkpoint.planner import Scalars, Shard, ShardSavePlanner
from zerolite.checkpoint.safetensors import ToStore, as_bytes, build_header
from zerolite.checkpoint.training_run import TrainingRun
from zerolite.comm import collective, read_objects_without_numpy


@dataclass(frozen=True)
class Commit:
    """Inputs of the commit, which follows when all ranks have written.

    Attributes:
        save_dir: directory of the checkpoints.
        about: content of the manifest.
        state: content of state.json, to which the optimizer's scalars are added.
        run: run of the job that saves.
        save_latest: let ``latest`` point to this checkpoint.
        keep_last: see :func:`directory.prune`; None removes nothing.
        overwrite: see :meth:`TrainingRun.check`.
    """

    save_dir: Path
    about: About
    state: dict[str, Any]
    run: TrainingRun
    save_latest: bool = True
    keep_last: int | None = None
    overwrite: bool = False


@collective
def write_checkpoint(
    save_dir: Path, tag: str, shards: Sequence[Shard], scalars: Scalars, commit: Commit | None, group: Any = None
) -> Path:
    """Write ``shards`` and commit. Returns the checkpoint's directory.

    Args:
        shards: shards of this rank; functions in them are called when their values are written.
        scalars: optimizer states that are one number.
        commit: on the group's first rank, None on the others.
        group: gloo group of the ranks that write; None for one process alone.

    Raises:
        CheckpointError: on all ranks if one has failed. Then earlier checkpoints are as before.
    """
    writer = _CheckpointWriter(commit)
    try:
        with _raised_on_all(
            f"saving checkpoint '{tag}' failed", lambda: f"{newest_complete(save_dir)} in '{save_dir}'"
        ):
            read_objects_without_numpy()
            _save(writer, ShardSavePlanner(shards, scalars), group)
    finally:
        writer.close()
    return save_dir / tag


def _save(writer: _CheckpointWriter, planner: ShardSavePlanner, group: Any) -> None:
    alone = group is None  # one process by itself, also where torch.distributed runs
    # torch warns that it saves alone; in torch 2.6 only the deprecated function can. A filter stays, because contexts
    # of warnings are not for threads.
    for message in ("torch.distributed is ", "`save_state_dict` is deprecated"):
        warnings.filterwarnings("ignore", message)
    if "no_dist" in inspect.signature(dcp.save).parameters:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
    else:
        dcp.save_state_dict({}, writer, group, no_dist=alone, planner=planner)


@contextlib.contextmanager
def _raised_on_all(what: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Convert the errors that torch.distributed.checkpoint raises on all ranks, if one fails, to CheckpointErrors."""
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        said = f"'{error.filename}': {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        if not isinstance(error, (CheckpointError, OSError)):
            said = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{what}: rank {rank}: {said.rstrip('. ')}. {remedy()}") from error
    except CheckpointError:
        raise
    except RuntimeError as error:  # the error of a collective
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{what}: a rank has ended, or cannot be reached ({first}). {remedy()}") from error


@dataclass(frozen=True)
class _Written:
    """File and offset of a written item. All items of a file share one ``entry`` object, which is filled at the end."""

    file: str
    start: int
    entry: FileEntry


class _CheckpointWriter(StorageWriter):
    """Writer of one checkpoint. Only the coordinator needs ``commit`` and must call :meth:`close`."""

    def __init__(self, commit: Commit | None) -> None:
        self._commit = commit
        self._open = contextlib.ExitStack()
        self._written_in: Path | None = None
        self._beside = ""  # reason, if `latest` and other checkpoints must be left alone

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lock the directory, and make the one that all ranks write into."""
        commit = self._commit
        assert commit is not None
        save_dir, new = commit.save_dir, commit.about.head
        self._open.enter_context(directory.locked(save_dir))
        self._beside = commit.run.check(save_dir, new, commit.save_latest, commit.keep_last, commit.overwrite)
        path = self._written_in = directory.begin(save_dir, new.tag)
        return [replace(plan, storage_data=path / f"rank_{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result(_write_items(plan.storage_data, plan.items, planner))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check the files of all ranks, write index, state and manifest, and rename the directory to its tag."""
        commit, path = self._commit, self._written_in
        assert commit is not None and path is not None
        about = commit.about
        files = {result.storage_data.file: result.storage_data.entry for of_rank in results for result in of_rank}
        for name, entry in sorted(files.items()):
            _check_size(path / name, entry.bytes)
        scalars = json_codec.encode(metadata.planner_data, "optimizer states", [])
        state = {**commit.state, "optimizer": {**commit.state["optimizer"], "scalars": scalars}}
        contents = {
            INDEX: index_to_json(_index(metadata, results)),
            STATE: json.dumps(state, separators=(",", ":")).encode(),
        }
        for name, content in contents.items():
            filesystem.write_file(path / name, [[memoryview(content)]])
            files[name] = entry_of(content)
        # The manifest is the last file: a directory without it is not a checkpoint. Only then is the directory renamed.
        manifest = Manifest(about, dict(sorted(files.items()))).to_json()
        filesystem.write_file(path / MANIFEST, [[memoryview(manifest)]])
        directory.commit(path, about.tag)
        self._written_in = None
        if self._beside:  # report it only now: the job must not lose its own checkpoint because of others
            raise CheckpointError(
                f"it is complete in '{commit.save_dir}' as '{about.tag}', but '{directory.LATEST}' and all other "
                f"checkpoints were left alone: {self._beside}"
            )
        if commit.save_latest:
            _set_latest(commit.save_dir, about.tag)
        if commit.keep_last is not None:
            directory.prune(commit.save_dir, commit.keep_last, about.tag)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def close(self) -> None:
        """Unlock the directory, and remove a checkpoint that was not committed."""
        with self._open:
            # Set from the begin of the save until the commit: then the save has failed.
            if self._written_in is not None:
                with contextlib.suppress(OSError):  # the next save removes it
                    filesystem.remove(self._written_in)


def now() -> str:
    """Return the current time for a manifest."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def _set_latest(save_dir: Path, tag: str) -> None:
    try:
        directory.set_latest(save_dir, tag)
    except OSError as error:
        raise CheckpointError(
            f"it is complete in '{save_dir}', but the file '{directory.LATEST}' could not be replaced "
            f"({error.strerror}) and names another one, or none; load it with tag='{tag}'"
        ) from error


def _write_items(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """Write one file with all items; no items, no file.

    Items of the widest dtypes come first, as the format's own library orders them, so that every tensor is aligned.
    """
    if not items:
        return []
    entries = sorted(((_entry(item), item) for item in items), key=lambda pair: -pair[0].dtype.itemsize)
    header, starts = build_header([entry for entry, _ in entries], {"format": "pt"})
    sums = BlockChecksums()
    try:
        batches = filesystem.batches_of(_bytes(header, entries, planner))
        filesystem.write_file(path, sums.of(batches), directly=True)
    finally:
        written = sums.finish()
    return [
        WriteResult(item.index, entry.nbytes, _Written(path.name, start, written))
        for (entry, item), start in zip(entries, starts, strict=True)
    ]


def _entry(item: WriteItem) -> ToStore:
    data = item.tensor_data
    assert data is not None
    name = f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
    return ToStore(name, data.properties.dtype, tuple(data.chunk.sizes))


def _bytes(header: bytes, entries: Sequence[tuple[ToStore, WriteItem]], planner: SavePlanner) -> Iterator[memoryview]:
    yield memoryview(header)
    for entry, item in entries:
        values = planner.resolve_data(item)
        assert isinstance(values, torch.Tensor)
        if values.dtype != entry.dtype or values.shape != entry.shape:
            raise AssertionError(f"{entry.name} is not as planned: {tuple(values.shape)} of {values.dtype}")
        yield as_bytes(values.detach().to("cpu").contiguous().resolve_conj().resolve_neg())


def _check_size(path: Path, expected: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"'{path}' was written by a rank, but this one, which completes the checkpoint, cannot see it "
            f"({error.strerror}): save_dir must be on a file system that all nodes share"
        ) from error
    if found != expected:
        raise CheckpointError(
            f"'{path}': expected {expected} bytes, as written, found {found}; the checkpoint is dropped"
        )


def _index(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> dict[str, StoredTensor]:
    places = {result.index: result.storage_data for of_rank in results for result in of_rank}
    tensors = {}
    for key, tensor in metadata.state_dict_metadata.items():
        boxes = []
        for chunk in tensor.chunks:  # type: ignore[union-attr]  # all are tensors
            place = places[MetadataIndex(key, chunk.offsets)]
            boxes.append(StoredBox((tuple(chunk.offsets), tuple(chunk.sizes)), place.file, place.start))
        tensors[key] = StoredTensor(tuple(tensor.size), tensor.properties.dtype, tuple(boxes))  # type: ignore[union-attr]
    return tensors
