"""Trained parameters that stay whole on every rank: their shards take what users write, and they what updates do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerolite.utils.accelerator import addresses
from zerolite.zero.buffer import take_values
from zerolite.zero.stage3.param_group import ParamGroup, Refresh
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter


class WholeParameters:
    """Parameters of one group that are never released. What each step does with them is planned once, for the memory
    that shards and whole values have now, and again when one of them has got other memory."""

    def __init__(self, group: ParamGroup, members: Sequence[PartitionedParameter]) -> None:
        self._group = group
        self._members = members
        self._plan()

    def _plan(self) -> None:
        self._allocations = self._group.allocations
        self._parameters = [member.parameter for member in self._members]
        self._views = [member.view for member in self._members]
        apart = [member for member in self._members if member.storage is not None]
        self._parts = [member.own_part() for member in apart]
        self._shards = [member.shard[: len(part)] for member, part in zip(apart, self._parts, strict=True)]
        self._refresh = Refresh(self._group, self._members)

    def take_writes(self) -> None:
        """Copy the user's writes into whole values, which are alike on all ranks, into the shards."""
        if self._allocations != self._group.allocations:
            self._plan()
        found, homes = addresses(self._parameters), addresses(self._views)
        if found != homes:
            for member, place, home in zip(self._members, found, homes, strict=True):
                if place != home:
                    take_values(member.name, member.parameter, member.view)
        reader = self._group.reader
        if self._shards and reader is None:
            torch._foreach_copy_(self._shards, self._parts)
        elif self._shards and reader is not None:
            reader.write(self._shards, self._parts)

    def refresh(self) -> None:
        """Gather the values of an update. Called on all ranks, in the same order."""
        if self._allocations != self._group.allocations:
            self._plan()
        self._refresh.run()
