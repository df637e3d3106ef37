"""Parameters that stay available over an update, which brings them new values: the persistent ones, mostly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerolite.comm import collective
from zerolite.utils.accelerator import addresses
from zerolite.utils.memory_tags import DEVICE
from zerolite.utils.torch_private import undispatched
from zerolite.zero.flat import copy_assigned_data
from zerolite.zero.stage3.param_group import CommContext, group_by_context
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter


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
        """Collect the tensors of all parameters."""
        self._allocations = self._context.allocations
        self._parameters = [sharded_param.parameter for sharded_param in self._sharded_params]
        self._views = [sharded_param.view for sharded_param in self._sharded_params]
        sharded = [sharded_param for sharded_param in self._sharded_params if sharded_param.storage is not None]
        self._owned = [sharded_param.local_shard() for sharded_param in sharded]
        self._owned_shards = [p.shard[: len(part)] for p, part in zip(sharded, self._owned, strict=True)]
        self._offloaded = [sharded_param for sharded_param in sharded if sharded_param.placement.location != DEVICE]
        on_device = [p for p in sharded if p.placement.location == DEVICE and p.shard.numel()]
        self._fulls, self._shards = [p.full for p in on_device], [p.shard for p in on_device]
        self._key = on_device[0].index + 1 if on_device else 0

    def copy_writes_to_shards(self) -> None:
        """Copy the user's writes into full values, the same on all ranks, into the shards."""
        if self._allocations != self._context.allocations:
            self._plan()
        data, expected = addresses(self._parameters), addresses(self._views)
        if data != expected:  # a user has set p.data = values
            for sharded_param, address, view in zip(self._sharded_params, data, expected, strict=True):
                if address != view:
                    copy_assigned_data(sharded_param.name, sharded_param.parameter, sharded_param.view)
        reader = self._context.reader
        if self._owned_shards and reader is None:
            torch._foreach_copy_(self._owned_shards, self._owned)
        elif self._owned_shards and reader is not None:
            reader.write_back(self._owned_shards, self._owned)

    @collective
    def refresh(self) -> None:
        """Gather the values of an update into the parameters' memory. One launch is for shards on the device, and
        one for offloaded shards."""
        if self._allocations != self._context.allocations:
            self._plan()
        if self._offloaded:
            for sharded_param in self._offloaded:
                sharded_param.mark_stale()
            self._context.gather(self._offloaded)
        if self._shards:
            self._context.note_gather(self._key, len(self._shards))
            with undispatched():
                comm = self._context.groups.shard
                comm.gather_shards(self._fulls, self._shards, "parameters", self._key, self._shards).wait()


@collective
def refresh(sharded_params: Sequence[PartitionedParameter]) -> None:
    """Gather new values into available parameters."""
    for context, of_context in group_by_context(sharded_params):
        AvailableParameters(context, of_context).refresh()
