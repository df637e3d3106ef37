"""Flat storage by bucket, for compute parameters and for master weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from zerolite.offload.placements import Placement, Placements
from zerolite.utils.accelerator import address, addresses
from zerolite.utils.memory_tags import COMPUTE, MASTERS, tag_memory
from zerolite.utils.rounding import sync_master_from_param_
from zerolite.zero.layout import Bucket, Fragment, PartitionLayout, Slot

MoveShard = Callable[[torch.nn.Parameter, torch.Tensor, Placement], None]
"""Copy a parameter's shard into the given memory, of that placement, which becomes its ``ds_tensor``."""


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of ``tensor`` if it fills its memory without holes (channels_last too), contiguous ones otherwise."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def flattened(tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """The elements of ``tensor`` in the order in which memory holds a tensor of ``strides`` (default: its own, made
    dense), shape [numel]; a view where possible."""
    strides = dense_strides(tensor) if strides is None else strides
    if strides != tensor.stride():
        dense = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = dense.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def copy_assigned_data(name: str, parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
    """Copy ``parameter``'s values to ``view`` and point it there. Raises RuntimeError for another shape or dtype."""
    data = parameter.data
    if data.shape != view.shape or data.dtype != view.dtype or data.device != view.device:
        raise RuntimeError(
            f"parameter '{name}': expected {tuple(view.shape)} of {view.dtype} on {view.device}, as it was made, "
            f"got {tuple(data.shape)} of {data.dtype} on {data.device}. module.half(), .to(dtype) and the like are for "
            "before zerolite.initialize; for 16 bits, enable bf16 or fp16 in the config"
        )
    view.copy_(data)
    parameter.data = view


def destinations(
    flat: torch.Tensor, bucket: Bucket, slot: Slot, values: torch.Tensor, strides: tuple[int, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (part of the full bucket ``flat``, part of ``values``) that bring ``values``, in the parameter's shape,
    to the slot. ``strides``: of the parameter, without holes."""
    offset = flat.storage_offset() + slot.start
    if not bucket.rows:
        return [(flat.as_strided(values.shape, strides, offset), values)]
    if not slot.numel:
        return []
    part = slot.part
    values = flattened(values, strides)
    row = bucket.numel // bucket.rows
    whole = slot.numel // part
    pairs = []
    if whole:
        pairs.append((flat.as_strided((whole, part), (row, 1), offset), values[: whole * part].view(whole, part)))
    rest = slot.numel - whole * part
    if rest:
        pairs.append((flat.as_strided((rest,), (1,), offset + whole * row), values[whole * part :]))
    return pairs


def zero_slot(flat: torch.Tensor, bucket: Bucket, slot: Slot) -> None:
    """Zeros into the slot's elements of the full bucket ``flat``."""
    if bucket.rows:
        row = bucket.numel // bucket.rows
        flat.as_strided((bucket.rows, slot.part), (row, 1), flat.storage_offset() + slot.start).zero_()
    else:
        flat.narrow(0, slot.start, slot.numel).zero_()


class ParameterBuffer:
    """Compute parameters and master weights over one layout.

    ``compute[b]`` is the full bucket ``b``; every parameter's ``data`` is a view of it. ``master[b]`` is what this rank
    updates: its part of the bucket (``shard=True``) or the whole. Where masters need no other dtype than the compute
    parameters, ``master[b]`` is a view of ``compute[b]`` and costs nothing. Other masters, those of which
    ``separate[b]`` is True, rest at the placement of the optimizer (``placements``). ``owned[b]`` is the range of
    ``compute[b]`` that ``master[b]`` stands for, a view.
    """

    def __init__(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        rank: int,
        shard: bool,
        placements: Placements,
    ) -> None:
        self.placements = placements
        self.rank = rank
        self.shard = shard
        self.compute: list[torch.Tensor] = []
        self.owned: list[torch.Tensor] = []
        self.master: list[torch.Tensor] = []
        self.separate: list[bool] = []
        self._views: dict[int, torch.Tensor] = {}  # by index of the parameter: its view of the bucket
        self._addresses: list[int] = []  # of all parameters when they last were those views
        self.use(layout, parameters)

    def use(self, layout: PartitionLayout, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take another layout, which begins with the buckets that are filled; ``fill`` does the others."""
        self.layout = layout
        self.placements.set_buckets([bucket.numel for bucket in layout.buckets])
        self.parameters = list(parameters)
        self.fragments: list[list[Fragment]] = [[] for _ in layout.buckets]
        for fragment in layout.fragments(self.rank) if self.shard else layout.full_fragments():
            self.fragments[fragment.slot.bucket].append(fragment)

    @torch.no_grad()
    def fill(
        self,
        device: torch.device,
        compute_dtype: Callable[[torch.nn.Parameter], torch.dtype],
        master_dtype: Callable[[torch.dtype], torch.dtype],
        synchronize: Callable[[Bucket, torch.Tensor], None],
    ) -> None:
        """Move every parameter into its bucket, one bucket at a time, and take the masters from the values before
        any rounding. Buckets that are filled stay as they are.

        ``synchronize(bucket, flat)`` makes the flat bucket, in the parameters' original dtype, equal on all ranks.
        """
        for bucket in self.layout.buckets[len(self.compute) :]:
            members = [self.parameters[slot.index] for slot in bucket.slots]
            dtype = compute_dtype(members[0])
            exact = members[0].dtype
            for member in members[1:]:
                exact = torch.promote_types(exact, member.dtype)
            flat = torch.zeros(bucket.numel, dtype=exact, device=device)
            for slot, parameter in zip(bucket.slots, members, strict=True):
                flat.narrow(0, slot.start, slot.numel).copy_(flattened(parameter.data))
            synchronize(bucket, flat)
            compute = tag_memory(flat.to(dtype), COMPUTE)
            kept, owned = master_dtype(dtype), self._owned(bucket, compute)
            master = owned if kept == dtype else self._new_master(bucket.index, self._owned(bucket, flat), kept)
            self._add(compute, owned, master, kept != dtype)
            for slot, parameter in zip(bucket.slots, members, strict=True):
                strides = dense_strides(parameter.data)
                start = compute.storage_offset() + slot.start
                parameter.data = compute.as_strided(parameter.shape, strides, start)
                self._views[slot.index] = parameter.data

    def _add(self, compute: torch.Tensor, owned: torch.Tensor, master: torch.Tensor, separate: bool) -> None:
        """Have another bucket."""
        self.compute.append(compute)
        self.owned.append(owned)
        self.master.append(master)
        self.separate.append(separate)

    def _new_master(self, bucket: int, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.placements.of_optimizer(bucket).zeros(values.numel(), dtype, MASTERS).copy_(values)

    def placement_of_master(self, bucket: int) -> Placement:
        return self.placements.of_optimizer(bucket) if self.separate[bucket] else self.placement_of_compute(bucket)

    def placement_of_compute(self, bucket: int) -> Placement:
        """Return the placement of this rank's range of the compute parameters."""
        return self.placements.on_device

    def _owned(self, bucket: Bucket, full: torch.Tensor) -> torch.Tensor:
        if not self.shard:
            return full
        low, high = self.layout.shard_range(bucket, self.rank)
        return full[low:high]

    def keeps_shape(self, slot: Slot) -> bool:
        """True if shards of the parameter have its shape: all of it is updated here, and they are not flat."""
        return slot.whole or not self.shard

    def view_of(self, fragment: Fragment, flat: torch.Tensor) -> torch.Tensor:
        """The fragment's elements of ``flat`` (laid out like ``master[b]``): in the parameter's own shape and strides
        if :meth:`keeps_shape`."""
        if not self.keeps_shape(fragment.slot):
            return flat.narrow(0, fragment.shard_start, fragment.numel)
        like = self.parameters[fragment.slot.index].data
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset() + fragment.shard_start)

    def sync_param_from_master(self, bucket: int, rounded: bool = False) -> None:
        """Round the masters of ``bucket`` into this rank's range of the compute parameters, unless the update has
        done so (``rounded``)."""
        if self.separate[bucket] and not rounded:
            self.owned[bucket].copy_(self.master[bucket])
        # The buckets were written, and not the parameters, which are views of them with version counters of their own.
        # Without this a second backward through a graph of before the step would silently use the new weights;
        # PyTorch refuses it.
        members = [self.parameters[slot.index] for slot in self.layout.buckets[bucket].slots]
        torch.autograd.graph.increment_version(members)

    @torch.no_grad()
    def collect_assigned_data(self) -> None:
        """Parameters that the user has pointed to other memory (``p.data = values``) get their place in the bucket
        back, and the values from there. Raises RuntimeError for values of another shape or dtype."""
        # Compared in one C loop: in a steady step no parameter has moved.
        found = addresses(self.parameters) if self._views else []
        if found == self._addresses:
            return
        # The view is asked for its address again, because a storage that was emptied and filled lies elsewhere now.
        for index, view in self._views.items():
            if found[index] != address(view):
                copy_assigned_data(self.layout.slots[index].name, self.parameters[index], view)
        self._addresses = addresses(self.parameters)

    @torch.no_grad()
    def sync_master_from_param(self, bucket: int) -> None:
        """Masters take the values that the user has written into the compute parameters: where those are not what the
        masters round to. The kernels do it while they update."""
        if self.separate[bucket]:
            master = self.master[bucket]
            sync_master_from_param_(master, self.owned[bucket].to(master.device))

    @torch.no_grad()
    def copy_to_masters(self, indices: Collection[int]) -> None:
        """Take the masters of these parameters from the compute parameters, after the user has written values into
        those."""
        for bucket, fragments in enumerate(self.fragments):
            if not self.separate[bucket]:
                continue
            for fragment in fragments:
                if fragment.slot.index in indices:
                    compute = self.view_of(fragment, self.owned[bucket])
                    self.view_of(fragment, self.master[bucket]).copy_(compute)


class PartitionedParameterBuffer(ParameterBuffer):
    """Buffer over partitioned parameters: ``compute[b]`` is this rank's row of the sliced bucket ``b`` and every
    ``ds_tensor`` is a view of it."""

    def __init__(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        rank: int,
        move: MoveShard,
        placements: Placements,
        is_persistent: Callable[[torch.nn.Parameter], bool],
    ) -> None:
        """is_persistent: function that returns True for a parameter whose whole values stay on the device."""
        super().__init__(layout, parameters, rank, shard=True, placements=placements)
        self._is_persistent = is_persistent
        self._compute_placements: list[Placement] = []
        self._move = move

    @torch.no_grad()
    def fill_from_shards(
        self,
        compute_dtype: Callable[[torch.nn.Parameter], torch.dtype],
        master_dtype: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        """Move every shard into its row, one bucket at a time, and take the masters from the values before any
        rounding. Buckets that are filled stay as they are."""
        self._choose_placements()
        for bucket in self.layout.buckets[len(self.compute) :]:
            members = [self.parameters[slot.index] for slot in bucket.slots]
            dtype = compute_dtype(members[0])
            kept = master_dtype(dtype)
            numel = bucket.numel // self.layout.world_size
            placement = self._compute_placements[bucket.index]
            compute = placement.zeros(numel, dtype, COMPUTE)
            master = compute
            if kept != dtype:
                master = self.placements.of_optimizer(bucket.index).zeros(numel, kept, MASTERS)
            for slot, parameter in zip(bucket.slots, members, strict=True):
                if master is not compute:
                    master.narrow(0, slot.start, slot.part).copy_(parameter.ds_tensor)  # type: ignore[attr-defined]
                self._move(parameter, compute.narrow(0, slot.start, slot.part), placement)
            self._add(compute, compute, master, kept != dtype)

    def _choose_placements(self) -> None:
        """Choose the placements of new buckets: what a forward uses first, the last buckets, before the others."""
        placements = []
        for bucket in reversed(self.layout.buckets[len(self.compute) :]):
            persistent = all(self._is_persistent(self.parameters[slot.index]) for slot in bucket.slots)
            placements.append(self.placements.place_parameters(bucket.numel // self.layout.world_size, persistent))
        self._compute_placements += reversed(placements)

    def placement_of_compute(self, bucket: int) -> Placement:
        return self._compute_placements[bucket]
