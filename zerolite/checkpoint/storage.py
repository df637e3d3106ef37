"""Storage backend of torch.distributed.checkpoint: one safetensors file per rank, and JSON instead of pickles."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zerolite.checkpoint import directory, filesystem, plain
from zerolite.checkpoint.checksums import BlockChecksums, entry_of
from zerolite.checkpoint.directory import MANIFEST
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
from zerolite.checkpoint.reader import CheckpointReader, Request
from zerolite.checkpoint.run import TrainingRun
from zerolite.checkpoint.safetensors import ToStore, as_bytes, build_header


@dataclass(frozen=True)
class Commit:
    """Inputs of the commit, which follows when all ranks have written.

    Attributes:
        state: the content of state.json, to which the scalars of the optimizer are added.
        run: of the job that saves.
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


@dataclass(frozen=True)
class _Written:
    """Location of a written item; the file's entry is the same object for all of its items."""

    file: str
    start: int
    entry: FileEntry


class CheckpointWriter(StorageWriter):
    """Writer of one checkpoint. Only the coordinator needs ``commit``, and must :meth:`close`."""

    def __init__(self, commit: Commit | None) -> None:
        self._commit = commit
        self._open = contextlib.ExitStack()
        self._written_in: Path | None = None
        self._beside = ""  # why nothing but the checkpoint itself may be changed, if that is so

    # ---------------------------------------------------------------- torch's interface

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise ValueError("CheckpointWriter: expected no checkpoint_id: the directory is given when it is made")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator and self._commit is None:
            raise ValueError("CheckpointWriter: expected the coordinator to know what is to be committed")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        other = next((item.index.fqn for item in plan.items if item.tensor_data is None), None)
        if other is not None:
            raise ValueError(f"CheckpointWriter: expected tensors only, got '{other}', which is none")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory that all ranks write into."""
        assert self._commit is not None
        save_dir, new = self._commit.save_dir, self._commit.about.head
        self._open.enter_context(directory.locked(save_dir))
        commit = self._commit
        self._beside = commit.run.check(save_dir, new, commit.save_latest, commit.keep_last, commit.overwrite)
        path = self._written_in = directory.begin(save_dir, new.tag)
        return [replace(plan, storage_data=path / f"rank_{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result(_write_items(plan.storage_data, plan.items, planner))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check what all ranks have written, describe it, and give it its name."""
        assert self._commit is not None and self._written_in is not None
        path, about = self._written_in, self._commit.about
        files = {result.storage_data.file: result.storage_data.entry for of_rank in results for result in of_rank}
        for name, entry in sorted(files.items()):
            _check_size(path / name, entry.bytes)
        state = self._commit.state
        scalars = plain.encode(metadata.planner_data, "optimizer states", [])
        optimizer = {**state["optimizer"], "scalars": scalars}
        contents = {
            INDEX: index_to_json(_index(metadata, results)),
            STATE: json.dumps({**state, "optimizer": optimizer}, separators=(",", ":")).encode(),
        }
        for name, content in contents.items():
            filesystem.write_file(path / name, [[memoryview(content)]])
            files[name] = entry_of(content)
        manifest = Manifest(about, dict(sorted(files.items()))).to_json()
        filesystem.write_file(path / MANIFEST, [[memoryview(manifest)]])
        directory.commit(path, about.tag)
        self._written_in = None
        if self._beside:  # a job must not lose what it has trained because of what else is in the directory
            raise CheckpointError(
                f"it is complete in '{self._commit.save_dir}' as '{about.tag}', but '{directory.LATEST}' and all other "
                f"checkpoints were left alone: {self._beside}"
            )
        if self._commit.save_latest:
            self._set_latest(self._commit.save_dir, about.tag)
        if self._commit.keep_last is not None:
            directory.prune(self._commit.save_dir, self._commit.keep_last, about.tag)

    def _set_latest(self, save_dir: Path, tag: str) -> None:
        try:
            directory.set_latest(save_dir, tag)
        except OSError as error:
            raise CheckpointError(
                f"it is complete in '{save_dir}', but the file '{directory.LATEST}' could not be replaced "
                f"({error.strerror}) and names another one, or none; load it with tag='{tag}'"
            ) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Let go of the directory; what was not committed is removed."""
        with self._open:
            if self._written_in is not None:
                with contextlib.suppress(OSError):  # the next save removes it
                    filesystem.remove(self._written_in)


def now() -> str:
    """Return the time for a manifest."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def _write_items(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """One file of all items, those of the widest dtypes first, as the format's own library orders them. No items, no
    file."""
    if not items:
        return []
    items = sorted(items, key=lambda item: -_dtype(item).itemsize)
    entries = [ToStore(_name(item), _dtype(item), tuple(_sizes(item))) for item in items]
    header, starts = build_header(entries, {"format": "pt"})
    sums = BlockChecksums()
    try:
        batches = filesystem.batches_of(_bytes(header, items, planner))
        filesystem.write_file(path, _checked(batches, sums), directly=True)
    finally:
        entry = sums.finish()
    return [
        WriteResult(item.index, described.nbytes, _Written(path.name, start, entry))
        for item, described, start in zip(items, entries, starts, strict=True)
    ]


def _checked(batches: Iterator[list[memoryview]], sums: BlockChecksums) -> Iterator[list[memoryview]]:
    """The batches, whose checksums are computed while they are written."""
    for batch in batches:
        sums.add(batch)
        yield batch
        sums.wait()


def _bytes(header: bytes, items: Sequence[WriteItem], planner: SavePlanner) -> Iterator[memoryview]:
    yield memoryview(header)
    for item in items:
        values = planner.resolve_data(item)
        assert isinstance(values, torch.Tensor)
        if values.dtype != _dtype(item) or values.shape != _sizes(item):
            raise AssertionError(f"{_name(item)} is not as planned: {tuple(values.shape)} of {values.dtype}")
        yield as_bytes(values.detach().to("cpu").contiguous().resolve_conj().resolve_neg())


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _sizes(item: WriteItem) -> torch.Size:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes


def _name(item: WriteItem) -> str:
    return f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"


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
        assert isinstance(tensor, TensorStorageMetadata)
        boxes = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(key, chunk.offsets)]
            boxes.append(StoredBox((tuple(chunk.offsets), tuple(chunk.sizes)), place.file, place.start))
        tensors[key] = StoredTensor(tuple(tensor.size), tensor.properties.dtype, tuple(boxes))
    return tensors


# -------------------------------------------------------------------- loading


class CheckpointStorageReader(StorageReader):
    """Reader of our checkpoints, with whichever planner."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise ValueError(
                "CheckpointStorageReader: expected no checkpoint_id: a checkpoint is given when it is made"
            )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, StoredBox] = {}
        for key, stored in self._reader.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(box.box[0]), torch.Size(box.box[1])) for box in stored.boxes]
            tensors[key] = TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks)
            places.update({MetadataIndex(key, box.box[0]): box for box in stored.boxes})
        return Metadata(tensors, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        requests = []
        for item in plan.items:
            stored: StoredBox = self._metadata.storage_data[item.storage_index]
            low = tuple(a + b for a, b in zip(stored.box[0], item.storage_offsets, strict=True))
            dtype = self._reader.tensors[item.storage_index.fqn].dtype
            place = lambda item=item: planner.resolve_tensor(item)  # noqa: E731
            requests.append(Request(stored, dtype, (low, tuple(item.lengths)), place))
        self._reader.fetch(requests)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False
