"""All buckets of a model's trained parameters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from zerolite.comm import collective
from zerolite.offload.placement import Placement, Placements
from zerolite.utils.accelerator import addresses
from zerolite.utils.memory_tags import COMPUTE, tag_memory
from zerolite.zero.bucket import Bucket
from zerolite.zero.flat import flattened
from zerolite.zero.layout import BucketLayout, PartitionLayout
from zerolite.zero.local_sum import GradientMemory
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter, sharded_param_of, unpartitioned_shape


class ParameterBuffer:
    """Buckets of one layout.

    Attributes:
        layout: layout of the buckets.
        buckets: the buckets that are filled, in the order of the layout.
        parameters: trained parameters, by index.
        gradient_memory: memory of gradients.
        rank: this rank among those that split the states.
        shard: this rank updates its shard of each bucket; False: all of it.
        placements: placements of the states.
    """

    def __init__(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        gradient_memory: GradientMemory,
        placements: Placements,
    ) -> None:
        self.gradient_memory, self.placements = gradient_memory, placements
        self.rank, self.shard = gradient_memory.groups.states.rank, gradient_memory.options.shard
        self.buckets: list[Bucket] = []
        self._addresses: list[int] = []  # of all parameters, when their data were views of the buckets
        self.set_layout(layout, parameters)

    def set_layout(self, layout: PartitionLayout, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Set a layout that begins with the buckets that are filled. :meth:`fill` fills the others."""
        self.layout = layout
        self.placements.set_buckets([bucket.numel for bucket in layout.buckets])
        self.parameters = list(parameters)

    @property
    def unfilled(self) -> Sequence[BucketLayout]:
        """Layouts of the buckets that :meth:`fill` is to fill."""
        return self.layout.buckets[len(self.buckets) :]

    @torch.no_grad()
    def fill(
        self,
        device: torch.device,
        compute_dtype: Callable[[torch.nn.Parameter], torch.dtype],
        master_dtype: Callable[[torch.dtype], torch.dtype],
        synchronize: Callable[[BucketLayout, torch.Tensor], None],
    ) -> None:
        """Move the parameters into the buckets that are not filled yet. Masters get the values before any rounding.

        It goes one bucket at a time, so that parameters and buckets exist twice for one bucket only.

        Args:
            device: device of the compute parameters.
            compute_dtype: returns the dtype in which a parameter is computed with.
            master_dtype: returns the dtype of the masters for a dtype of compute parameters.
            synchronize: makes a full bucket, in the parameters' original dtype, equal on all ranks.
        """
        for layout in self.unfilled:
            members = [self.parameters[slot.index] for slot in layout.slots]
            dtype = compute_dtype(members[0])
            flat_dtype = functools.reduce(torch.promote_types, [member.dtype for member in members])
            flat = torch.zeros(layout.numel, dtype=flat_dtype, device=device)
            for slot, parameter in zip(layout.slots, members, strict=True):
                flat.narrow(0, slot.start, slot.numel).copy_(flattened(parameter.data))
            synchronize(layout, flat)
            compute = tag_memory(flat.to(dtype), COMPUTE)
            bucket = Bucket(layout, members, self, compute, self.placements.on_device, master_dtype(dtype))
            if bucket.separate:
                bucket.master.copy_(self.owned_range(layout, flat))
            bucket.show_parameters()
            self.buckets.append(bucket)

    def owned_range(self, layout: BucketLayout, full: torch.Tensor) -> torch.Tensor:
        """Return the range that this rank updates of a full bucket, or of its row of the bucket, a view."""
        if not self.shard:
            return full
        owned = self.layout.shard_range(layout, self.rank)
        return full.narrow(0, owned.start % full.numel(), owned.numel)

    @collective
    def gather(
        self, indices: Sequence[int], shards: Mapping[int, torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Gather full tensors of parameters from the parts that the ranks own, in one all-gather.

        Args:
            indices: indices of the parameters.
            shards: this rank's parts by index, flat or in the parameter's shape; it may own nothing of a parameter.
            dtype: dtype of the parts.
        """
        slots = [self.layout.slots[index] for index in indices]
        spreads = dict.fromkeys(self.buckets[slot.bucket].layout.spread for slot in slots)
        if len(spreads) > 1:  # experts have other ranks
            gathered: dict[int, torch.Tensor] = {}
            for spread in spreads:
                alike = [s.index for s in slots if self.buckets[s.bucket].layout.spread == spread]
                gathered.update(zip(alike, self.gather(alike, shards, dtype), strict=True))
            return [gathered[index] for index in indices]
        spread = next(iter(spreads), 1)
        comm = self.gradient_memory.groups.of_spread(spread).states
        strides = [self.buckets[slot.bucket].strides[slot.index] for slot in slots]
        parts = {
            index: flattened(shards[index], order) if shards[index].dim() > 1 else shards[index].view(-1)
            for index, order in zip(indices, strides, strict=True)
            if index in shards
        }
        device = self.placements.device
        empty = torch.empty(0, dtype=dtype, device=device)
        flats = [parts.get(index, empty).to(device, copy=True) for index in indices] if not self.shard else []
        if self.shard:
            owners = [spread * rank for rank in range(comm.world_size)]
            owned = [[self.layout.param_range(slot, rank) for rank in owners] for slot in slots]
            starts = [0, *itertools.accumulate(max(part.numel for part in of_ranks) for of_ranks in owned)]
            rows = torch.zeros(comm.world_size, starts[-1], dtype=dtype, device=device)
            for index, start in zip(indices, starts, strict=False):
                if index in parts:
                    rows[comm.rank].narrow(0, start, parts[index].numel()).copy_(parts[index])
            if rows.numel() and comm.world_size > 1:
                comm.all_gather(rows.view(-1), tag="access").wait()
            for start, of_ranks in zip(starts, owned, strict=False):
                in_order = sorted(zip(of_ranks, rows, strict=True), key=lambda pair: pair[0])
                flats.append(torch.cat([row.narrow(0, start, part.numel) for part, row in in_order]))
        shapes = [getattr(p, "ds_shape", p.shape) for p in map(self.parameters.__getitem__, indices)]
        return [flat.as_strided(shape, order) for flat, shape, order in zip(flats, shapes, strides, strict=True)]

    @collective
    def gather_states(
        self, indices: Sequence[int], parts: Mapping[int, torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Gather full states as :meth:`gather` does, or send them from their owners where parameters have some."""
        of = {index: self.buckets[self.layout.slots[index].bucket] for index in indices}
        if not any(bucket.owners for bucket in of.values()):
            return self.gather(indices, parts, dtype)
        states = []
        for index, bucket in of.items():
            shape, strides = unpartitioned_shape(self.parameters[index]), bucket.strides[index]
            state = torch.empty_strided(shape, strides, dtype=dtype, device=self.placements.device)
            if index in parts:
                state.copy_(parts[index])
            if state.numel():
                self.gradient_memory.groups.states.broadcast(flattened(state, strides), "access", bucket.owners[index])
            states.append(state)
        return states

    @torch.no_grad()
    def collect_assigned_data(self) -> None:
        """Copy tensors that the user has assigned (``p.data = values``) into the buckets, and restore the views.

        Raises:
            RuntimeError: an assigned tensor has another shape, dtype or device.
        """
        # Compared in one C loop: in a steady step no parameter has moved.
        if addresses(self.parameters) != self._addresses:
            for bucket in self.buckets:
                bucket.collect_assigned_data()
            self._addresses = addresses(self.parameters)


class PartitionedParameterBuffer(ParameterBuffer):
    """Buckets of partitioned parameters: ``compute`` is this rank's row of a sliced bucket, and ``ds_tensor`` of every
    parameter is a view of it."""

    @torch.no_grad()
    def fill_from_shards(
        self,
        compute_dtype: Callable[[torch.nn.Parameter], torch.dtype],
        master_dtype: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        """Move the shards into the buckets that are not filled yet, one at a time. Masters get the values before any
        rounding. The arguments are those of :meth:`fill`."""
        for layout, placement in zip(self.unfilled, self._choose_placements(), strict=True):
            members = [self.parameters[slot.index] for slot in layout.slots]
            dtype = compute_dtype(members[0])
            compute = placement.zeros(layout.numel // layout.rows, dtype, COMPUTE)
            bucket = Bucket(layout, members, self, compute, placement, master_dtype(dtype))
            sharded_params = dict(zip(layout.slots, self._sharded_params(layout), strict=True))
            for fragment in bucket.fragments if bucket.separate else ():
                in_shard = fragment.param_start % fragment.slot.part
                shard = sharded_params[fragment.slot].shard.narrow(0, in_shard, fragment.numel)
                bucket.master_view(fragment).copy_(shard)
            for slot, sharded_param in sharded_params.items():
                sharded_param.move_shard(compute.narrow(0, slot.start, slot.part), placement)
            bucket.collect_written()
            self.buckets.append(bucket)

    def _choose_placements(self) -> list[Placement]:
        """Choose the placements of new buckets. The last buckets come first and get the room on the host, because a
        forward uses them first."""
        placements = []
        for layout in reversed(self.unfilled):
            persistent = all(sharded_param.persistent for sharded_param in self._sharded_params(layout))
            placements.append(self.placements.place_parameters(layout.numel // layout.rows, persistent))
        return placements[::-1]

    def _sharded_params(self, layout: BucketLayout) -> list[PartitionedParameter]:
        sharded_params = [sharded_param_of(self.parameters[slot.index]) for slot in layout.slots]
        return [sharded_param for sharded_param in sharded_params if sharded_param is not None]
