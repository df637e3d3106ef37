"""Save planner of torch.distributed.checkpoint: each rank writes its boxes, which together must be full tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from zerolite.checkpoint.boxes import Box, covers
from zerolite.checkpoint.errors import CheckpointError

Scalars = dict[str, dict[str, Any]]  # state -> parameter -> value


@dataclass(frozen=True)
class Shard:
    """A box of a tensor, which no other rank writes.

    Attributes:
        key: name of the tensor in the checkpoint.
        shape: shape of the full tensor.
        dtype: its dtype.
        box: the box; None if the tensor is empty, which this shard then only declares.
        values: tensor of the box's sizes, or a function that returns it when it is written.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box | None
    values: torch.Tensor | Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.box[1]) * self.dtype.itemsize if self.box is not None else 0


class ShardSavePlanner(SavePlanner):
    """Each rank writes its own shards. The coordinator checks that together they are full tensors."""

    def __init__(self, shards: Sequence[Shard], scalars: Scalars) -> None:
        self._shards = [shard for shard in shards if shard.box is not None]
        empty = {shard.key: (shard.shape, shard.dtype) for shard in shards if shard.box is None}
        self._beside = empty, scalars  # sent to the coordinator with the plan

    def set_up_planner(
        self, state_dict: object, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
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
        return SavePlan(items, planner_data=self._beside)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors: dict[str, Any] = {}
        scalars: Scalars = {}
        for plan in all_plans:
            empty, numbers = plan.planner_data
            for key, (shape, dtype) in empty.items():
                tensors[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
            for name, values in numbers.items():
                scalars.setdefault(name, {}).update(values)
            for item in plan.items:
                _add(tensors, item)
        for key, tensor in tensors.items():
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
            if not covers(boxes, tensor.size):
                raise CheckpointError(
                    f"the ranks' parts of '{key}' do not make up its shape {tuple(tensor.size)}; nothing was saved. "
                    "This is a bug in zerolite: please report it"
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
