"""Parameters that stay available over an update, which brings them new values: the persistent ones, mostly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerolite.comm import collective
from zerolite.utils.accelerator import addresses
from zerolite.utils.memory_tags import BUCKETS, DEVICE, tag_memory
from zerolite.utils.torch_private import undispatched
from zerolite.zero.flat import copy_assigned_data
from zerolite.zero.stage3.param_group import CommContext, group_by_context
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter


class _Row(NamedTuple):
    """Shards that are adjacent in memory, which one all-gather sends as one tensor.

    Attributes:
        shard: all of them as one flat tensor.
        parts: the number of elements of each.
        fulls: for each the full values [world size, elements]; in a row of one shard the parameter's flat ``full``.
    """

    shard: torch.Tensor
    parts: list[int]
    fulls: list[torch.Tensor]


class AvailableParameters:
    """Available parameters of one context.

    The work on them is planned once, for the memory that shards and full values have now. It is planned again when a
    parameter has got another tensor for its full values.
    """

    def __init__(self, context: CommContext, sharded_params: Sequence[PartitionedParameter]) -> None:
        self._context = context
        self._sharded_params = sharded_params
        self._plan()

    def _plan(self) -> None:
        """Collect the tensors of all sharded_params, and join adjacent shards to rows."""
        self._allocations = self._context.shared.allocations
        self._parameters = [sharded_param.parameter for sharded_param in self._sharded_params]
        self._views = [sharded_param.view for sharded_param in self._sharded_params]
        sharded = [sharded_param for sharded_param in self._sharded_params if sharded_param.storage is not None]
        self._full_views = [sharded_param.local_shard() for sharded_param in sharded]
        self._shards = [
            sharded_param.shard[: len(part)] for sharded_param, part in zip(sharded, self._full_views, strict=True)
        ]
        self._offloaded = [sharded_param for sharded_param in sharded if sharded_param.placement.location != DEVICE]
        # Without the empty ones: torch's split_with_sizes_copy divides by zero on CUDA where a size is 0.
        on_device = [m for m in sharded if m.placement.location == DEVICE and m.shard.numel()]
        self._on_device = on_device
        self._rows = [self._row(sharded_params) for sharded_params in _neighbours(on_device)]

    def _row(self, sharded_params: Sequence[PartitionedParameter]) -> _Row:
        parts = [sharded_param.shard.numel() for sharded_param in sharded_params]
        shard = sharded_params[0].shard.as_strided((sum(parts),), (1,))
        if len(sharded_params) == 1:
            return _Row(shard, parts, [sharded_params[0].full])
        world = self._context.groups.shard.world_size
        return _Row(shard, parts, [m.full.view(world, part) for m, part in zip(sharded_params, parts, strict=True)])

    def copy_writes_to_shards(self) -> None:
        """Copy the user's writes into full values, the same on all ranks, into the shards."""
        if self._allocations != self._context.shared.allocations:
            self._plan()
        data, expected = addresses(self._parameters), addresses(self._views)
        if data != expected:  # a user has set p.data = values
            for sharded_param, address, view in zip(self._sharded_params, data, expected, strict=True):
                if address != view:
                    copy_assigned_data(sharded_param.name, sharded_param.parameter, sharded_param.view)
        reader = self._context.reader
        if self._shards and reader is None:
            torch._foreach_copy_(self._shards, self._full_views)
        elif self._shards and reader is not None:
            reader.write_back(self._shards, self._full_views)

    @collective
    def refresh(self) -> None:
        """Gather the values of an update into the parameters' memory. One launch is for shards on the device, and
        one for offloaded shards."""
        if self._allocations != self._context.shared.allocations:
            self._plan()
        if self._offloaded:
            for sharded_param in self._offloaded:
                sharded_param.mark_stale()
            self._context.gather(self._offloaded)
        if not self._rows:
            return
        self._context.note_gather(self._on_device)
        comm, shards = self._context.groups.shard, [row.shard for row in self._rows]
        with undispatched():
            # Each row is gathered as one tensor and copied into the full values of its parameters; a row of one
            # directly.
            gathered_rows = []
            for shard, _, fulls in self._rows:
                full = fulls[0]
                if len(fulls) > 1:
                    full = tag_memory(shard.new_empty(comm.world_size * shard.numel()), BUCKETS)
                gathered_rows.append(full)
            comm.gather_shards(gathered_rows, shards, "parameters", self._on_device[0].index + 1, shards).wait()
            for full, (_, parts, fulls) in zip(gathered_rows, self._rows, strict=True):
                if len(fulls) > 1:
                    torch.split_with_sizes_copy(full.view(comm.world_size, -1), parts, dim=1, out=fulls)


@collective
def refresh(sharded_params: Sequence[PartitionedParameter]) -> None:
    """Gather new values into available parameters."""
    for context, of_context in group_by_context(sharded_params):
        AvailableParameters(context, of_context).refresh()


def _neighbours(sharded_params: Sequence[PartitionedParameter]) -> list[list[PartitionedParameter]]:
    """Return ``sharded_params`` in runs whose shards are adjacent in memory.

    Runs are in the order of ``sharded_params`` and not of addresses, because only the former is the same on all ranks.
    """
    runs: list[list[PartitionedParameter]] = []
    # By storage and dtype: the last run there, and the element at which it ends.
    latest: dict[tuple[int, torch.dtype], tuple[list[PartitionedParameter], int]] = {}
    for sharded_param in sharded_params:
        shard = sharded_param.shard
        memory, start = (id(shard.untyped_storage()), shard.dtype), int(shard.storage_offset())
        run, end = latest.get(memory, ([], -1))
        if start != end:
            run = []
            runs.append(run)
        run.append(sharded_param)
        latest[memory] = (run, start + shard.numel())
    return runs
