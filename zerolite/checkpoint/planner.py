"""Save and load planners of torch.distributed.checkpoint: assign boxes of tensors to ranks."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from zerolite.checkpoint.boxes import Box, BoxIndex, covers
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.manifest import StoredTensor
from zerolite.checkpoint.reader import part_of

Scalars = dict[str, dict[str, Any]]  # state -> parameter -> value


@dataclass(frozen=True)
class Shard:
    """A box of the tensor ``key`` of ``shape``, which no other rank writes. ``values``: a tensor of the box's sizes, or
    a function that gives it when it is written. ``box`` None: the tensor is empty, and this only says so."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box | None
    values: torch.Tensor | Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.box[1]) * self.dtype.itemsize if self.box is not None else 0


@dataclass(frozen=True)
class Contribution:
    """Additions of a rank to the plan beside its shards."""

    empty: dict[str, tuple[tuple[int, ...], torch.dtype]]
    scalars: Scalars


class ShardSavePlanner(SavePlanner):
    """Each rank writes its own shards. The coordinator makes sure that together they are whole tensors."""

    def __init__(self, shards: Sequence[Shard], scalars: Scalars) -> None:
        self._shards = [shard for shard in shards if shard.box is not None]
        empty = {shard.key: (shard.shape, shard.dtype) for shard in shards if shard.box is None}
        self._contribution = Contribution(empty, scalars)

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the shards are the state."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for number, shard in enumerate(self._shards):
            assert shard.box is not None
            chunk = ChunkStorageMetadata(torch.Size(shard.box[0]), torch.Size(shard.box[1]))
            data = TensorWriteData(chunk, TensorProperties(dtype=shard.dtype), torch.Size(shard.shape))
            index = MetadataIndex(shard.key, shard.box[0], number)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data=self._contribution)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors: dict[str, Any] = {}
        scalars: Scalars = {}
        for plan in all_plans:
            for key, (shape, dtype) in plan.planner_data.empty.items():
                tensors[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
            for name, values in plan.planner_data.scalars.items():
                scalars.setdefault(name, {}).update(values)
            for item in plan.items:
                _add(tensors, item)
        for key, tensor in tensors.items():
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
            if not covers(boxes, tensor.size):
                raise CheckpointError(
                    f"the ranks' parts of '{key}' do not make up its shape {tuple(tensor.size)}; nothing was saved. "
                    "This is an error of zerolite's: please report it"
                )
        return [replace(plan, planner_data=None) for plan in all_plans], Metadata(tensors, planner_data=scalars)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        number = write_item.index.index
        assert number is not None, "given by create_local_plan"
        values = self._shards[number].values
        return values if isinstance(values, torch.Tensor) else values()


def _add(tensors: dict[str, Any], item: WriteItem) -> None:
    data = item.tensor_data
    assert data is not None
    known = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
    if (known.size, known.properties.dtype) != (data.size, data.properties.dtype):
        raise CheckpointError(
            f"'{item.index.fqn}' is {tuple(known.size)} of {known.properties.dtype} on one rank and {tuple(data.size)} "
            f"of {data.properties.dtype} on another; nothing was saved"
        )
    known.chunks.append(data.chunk)


# -------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Target:
    """A box of the tensor ``key`` that this rank needs. ``place``: a tensor of the box's sizes, any dtype and device,
    any strides."""

    key: str
    box: Box
    place: torch.Tensor


class TargetLoadPlanner(LoadPlanner):
    """Each rank reads what its targets have in common with the stored boxes."""

    def __init__(self, targets: Sequence[Target], stored: Mapping[str, StoredTensor]) -> None:
        self._targets = targets
        self._stored = stored

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Do nothing: the targets are the state."""

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        known: dict[str, BoxIndex] = {}
        for number, target in enumerate(self._targets):
            stored = self._stored[target.key]
            if target.key not in known:
                known[target.key] = BoxIndex([box.box for box in stored.boxes])
            found = 0
            for position, common in known[target.key].meeting(target.box):
                found += math.prod(common[1])
                source = stored.boxes[position].box
                items.append(
                    ReadItem(
                        LoadItemType.TENSOR,
                        dest_index=MetadataIndex(target.key, target.box[0], number),
                        dest_offsets=_relative(common, target.box),
                        storage_index=MetadataIndex(target.key, source[0], position),
                        storage_offsets=_relative(common, source),
                        lengths=torch.Size(common[1]),
                    )
                )
            if found != math.prod(target.box[1]):
                raise CheckpointError(
                    f"the tensor '{target.key}' of the checkpoint has the shape {tuple(stored.shape)}, in which "
                    f"{target.box[1]} elements from {target.box[0]} on are not"
                )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        raise AssertionError("a checkpoint has tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None, "given by create_local_plan"
        return part_of(self._targets[number].place, (tuple(read_item.dest_offsets), tuple(read_item.lengths)))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: what :meth:`resolve_tensor` gives is the place itself."""


def _relative(box: Box, origin: Box) -> torch.Size:
    return torch.Size(low - start for low, start in zip(box[0], origin[0], strict=True))
