"""Flat storage by bucket, for compute parameters and for master weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerolite.offload.placements import Placement, Placements
from zerolite.utils.accelerator import address, addresses
from zerolite.utils.memory_tags import COMPUTE, MASTERS, tag_memory
from zerolite.utils.rounding import sync_master_from_param_
from zerolite.zero.layout import Bucket, Fragment, Gap, PartitionLayout, Slot

MoveShard = Callable[[torch.nn.Parameter, torch.Tensor, Placement], None]
"""Function (parameter, memory, placement of the memory) that copies a parameter's shard into the memory, which becomes
its ``ds_tensor``."""


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of ``tensor`` if it fills its memory without holes (as channels_last does), otherwise
    contiguous ones."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def flattened(tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the elements of ``tensor`` in the memory order of a tensor with ``strides``, shape [numel]; a view if
    possible. The default is :func:`dense_strides` of the tensor."""
    strides = dense_strides(tensor) if strides is None else strides
    if strides != tensor.stride():
        dense = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = dense.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def check_has_memory(name: str, parameter: torch.Tensor) -> None:
    """Raise ValueError for a parameter that consists of other tensors, which no bucket and no shard can hold."""
    wraps: object = is_traceable_wrapper_subclass(parameter)  # no TypeGuard: mypy takes the branch for unreachable
    if wraps:
        raise ValueError(
            f"zerolite: expected parameters with memory of their own, got '{name}' of class "
            f"{type(parameter).__name__}, which consists of other tensors, as DTensors and the quantized tensors of "
            "torchao do; give the packed values and their scales as frozen parameters of torch.nn.Parameter or a class "
            "derived from it"
        )


def copy_assigned_data(name: str, parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
    """Copy the values of a parameter to ``view``, and make ``view`` its data.

    Raises:
        RuntimeError: shape, dtype or device differ.
    """
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
    """Return the copies that bring the values of a parameter into its slot, as pairs (target, source).

    Args:
        flat: the full bucket, shape [bucket.numel].
        bucket: the bucket.
        slot: the slot.
        values: values in the parameter's shape.
        strides: dense strides of the parameter.
    """
    offset = flat.storage_offset() + slot.start
    if not bucket.rows:
        return [(flat.as_strided(values.shape, strides, offset), values)]
    if not slot.numel:
        return []
    part = slot.part
    values = flattened(values, strides)
    row = bucket.numel // bucket.rows
    full_rows = slot.numel // part  # rows whose part is full; the row after them has the rest
    pairs = []
    if full_rows:
        target = flat.as_strided((full_rows, part), (row, 1), offset)
        pairs.append((target, values[: full_rows * part].view(full_rows, part)))
    rest = slot.numel - full_rows * part
    if rest:
        pairs.append((flat.as_strided((rest,), (1,), offset + full_rows * row), values[full_rows * part :]))
    return pairs


def zero_slot(flat: torch.Tensor, bucket: Bucket, slot: Slot) -> None:
    """Set the slot's elements of the full bucket ``flat`` to zero."""
    if bucket.rows:
        row = bucket.numel // bucket.rows
        flat.as_strided((bucket.rows, slot.part), (row, 1), flat.storage_offset() + slot.start).zero_()
    else:
        flat.narrow(0, slot.start, slot.numel).zero_()


def zero_gap(flat: torch.Tensor, bucket: Bucket, gap: Gap) -> None:
    """Set a gap of the full bucket ``flat`` to zero."""
    if gap.rows == 1:
        flat.narrow(0, gap.start, gap.width).zero_()
    else:
        row = bucket.numel // bucket.rows
        flat.as_strided((gap.rows, gap.width), (row, 1), flat.storage_offset() + gap.start).zero_()


class ParameterBuffer:
    """Compute parameters and master weights of one layout, in flat tensors by bucket.

    Attributes:
        layout: layout of the buckets.
        parameters: trained parameters, by index.
        rank: data-parallel rank.
        shard: this rank updates its shard of each bucket; False: all of it.
        placements: placements of the states.
        compute: full buckets of compute parameters, [bucket.numel]. Every parameter's ``data`` is a view of them.
        owned: the range of each compute bucket that this rank updates, a view.
        master: master weights of these ranges; ``owned`` itself, at no cost, if the dtypes are equal.
        separate: True for each bucket whose masters have memory of their own, at the placement of the optimizer.
        fragments: fragments that this rank updates, by bucket.
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
        self._views: dict[int, torch.Tensor] = {}  # each parameter's view of its bucket, by index
        self._addresses: list[int] = []  # of all parameters, when their data were those views
        self.set_layout(layout, parameters)

    def set_layout(self, layout: PartitionLayout, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Set a layout that begins with the buckets that are filled. :meth:`fill` fills the others."""
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
        """Move the parameters into the buckets that are not filled yet. Masters get the values before any rounding.

        It goes one bucket at a time, so that parameters and buckets exist twice for one bucket only.

        Args:
            device: device of the compute parameters.
            compute_dtype: returns the dtype in which a parameter is computed with.
            master_dtype: returns the dtype of the masters for a dtype of compute parameters.
            synchronize: makes a full bucket, in the parameters' original dtype, equal on all ranks.
        """
        for bucket in self.layout.buckets[len(self.compute) :]:
            members = [self.parameters[slot.index] for slot in bucket.slots]
            dtype = compute_dtype(members[0])
            flat_dtype = functools.reduce(torch.promote_types, [member.dtype for member in members])
            flat = torch.zeros(bucket.numel, dtype=flat_dtype, device=device)
            for slot, parameter in zip(bucket.slots, members, strict=True):
                flat.narrow(0, slot.start, slot.numel).copy_(flattened(parameter.data))
            synchronize(bucket, flat)
            compute = tag_memory(flat.to(dtype), COMPUTE)
            owned = self._owned(bucket, compute)
            master = self._new_master(bucket.index, owned, master_dtype(dtype))
            if master is not owned:
                master.copy_(self._owned(bucket, flat))
            self._add(compute, owned, master)
            for slot, parameter in zip(bucket.slots, members, strict=True):
                strides = dense_strides(parameter.data)
                start = compute.storage_offset() + slot.start
                parameter.data = compute.as_strided(parameter.shape, strides, start)
                self._views[slot.index] = parameter.data

    def _add(self, compute: torch.Tensor, owned: torch.Tensor, master: torch.Tensor) -> None:
        """Add the tensors of one bucket."""
        self.compute.append(compute)
        self.owned.append(owned)
        self.master.append(master)
        self.separate.append(master is not owned)

    def _new_master(self, bucket: int, owned: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``owned`` if it has the dtype of the masters, otherwise new memory for them."""
        if dtype == owned.dtype:
            return owned
        return self.placements.optimizer_placement(bucket).zeros(owned.numel(), dtype, MASTERS)

    def placement_of_master(self, bucket: int) -> Placement:
        return (
            self.placements.optimizer_placement(bucket) if self.separate[bucket] else self.placement_of_compute(bucket)
        )

    def placement_of_compute(self, bucket: int) -> Placement:
        """Return the placement of this rank's range of the compute parameters."""
        return self.placements.on_device

    def _owned(self, bucket: Bucket, full: torch.Tensor) -> torch.Tensor:
        if not self.shard:
            return full
        low, high = self.layout.shard_range(bucket, self.rank)
        return full[low:high]

    def keeps_shape(self, slot: Slot) -> bool:
        """Return True if the shard has the parameter's shape and is not flat: this rank updates all of it."""
        return slot.whole or not self.shard

    def view_of(self, fragment: Fragment, flat: torch.Tensor) -> torch.Tensor:
        """Return the fragment's elements of a tensor that is laid out like the master of its bucket.

        They are flat, or have the parameter's shape and strides if :meth:`keeps_shape`.
        """
        if not self.keeps_shape(fragment.slot):
            return flat.narrow(0, fragment.shard_start, fragment.numel)
        like = self.parameters[fragment.slot.index].data
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset() + fragment.shard_start)

    def master_view(self, fragment: Fragment) -> torch.Tensor:
        """Return the fragment's elements of the master, as :meth:`view_of` does."""
        return self.view_of(fragment, self.master[fragment.slot.bucket])

    def sync_param_from_master(self, bucket: int, rounded: bool = False) -> None:
        """Round the masters of a bucket into this rank's range of the compute parameters.

        Args:
            bucket: index of the bucket.
            rounded: the update has done so already.
        """
        if self.separate[bucket] and not rounded:
            self.owned[bucket].copy_(self.master[bucket])
        # The bucket was written. Parameters are views of it with version counters of their own, which have not changed.
        # With a new version autograd refuses a second backward through a graph from before the step. Without it that
        # backward would silently use the new weights.
        members = [self.parameters[slot.index] for slot in self.layout.buckets[bucket].slots]
        torch.autograd.graph.increment_version(members)

    @torch.no_grad()
    def collect_assigned_data(self) -> None:
        """Copy tensors that the user has assigned (``p.data = values``) into the buckets, and restore the views.

        Raises:
            RuntimeError: an assigned tensor has another shape, dtype or device.
        """
        # Compared in one C loop: in a steady step no parameter has moved.
        found = addresses(self.parameters) if self._views else []
        if found == self._addresses:
            return
        # Addresses of the views are read again: a storage that was emptied and filled has another one now.
        for index, view in self._views.items():
            if found[index] != address(view):
                copy_assigned_data(self.layout.slots[index].name, self.parameters[index], view)
        self._addresses = addresses(self.parameters)

    @torch.no_grad()
    def sync_master_from_param(self, bucket: int) -> list[torch.Tensor]:
        """Copy values that the user has written into the compute parameters to the masters. Return the bucket's master
        if it was written.

        An element was written if it is not what its master rounds to. zerolite's kernels do this while they update.
        """
        master = self.master[bucket]
        written = self.separate[bucket] and sync_master_from_param_(master, self.owned[bucket].to(master.device))
        return [master] if written else []

    @torch.no_grad()
    def copy_to_masters(self, indices: Collection[int]) -> list[torch.Tensor]:
        """Copy the compute parameters of these indices to the masters, also where a master rounds to the same value.
        Return the parts of the masters that were written."""
        written = []
        for bucket, fragments in enumerate(self.fragments):
            if not self.separate[bucket]:
                continue
            for fragment in fragments:
                if fragment.slot.index in indices:
                    compute = self.view_of(fragment, self.owned[bucket])
                    written.append(self.master_view(fragment).copy_(compute))
        return written


class PartitionedParameterBuffer(ParameterBuffer):
    """Buffer of partitioned parameters: ``compute[b]`` is this rank's row of the sliced bucket ``b``, and ``ds_tensor``
    of every parameter is a view of it."""

    def __init__(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        rank: int,
        move: MoveShard,
        placements: Placements,
        is_persistent: Callable[[torch.nn.Parameter], bool],
    ) -> None:
        """is_persistent: function that returns True for a parameter whose full values stay on the device."""
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
        """Move the shards into the buckets that are not filled yet, one at a time. Masters get the values before any
        rounding. The arguments are those of :meth:`fill`."""
        self._choose_placements()
        for bucket in self.layout.buckets[len(self.compute) :]:
            members = [self.parameters[slot.index] for slot in bucket.slots]
            dtype = compute_dtype(members[0])
            placement = self._compute_placements[bucket.index]
            compute = placement.zeros(bucket.numel // self.layout.world_size, dtype, COMPUTE)
            master = self._new_master(bucket.index, compute, master_dtype(dtype))
            for slot, parameter in zip(bucket.slots, members, strict=True):
                if master is not compute:
                    master.narrow(0, slot.start, slot.part).copy_(parameter.ds_tensor)  # type: ignore[attr-defined]
                self._move(parameter, compute.narrow(0, slot.start, slot.part), placement)
            self._add(compute, compute, master)

    def _choose_placements(self) -> None:
        """Choose the placements of new buckets. The last buckets come first and get the room on the host, because a
        forward uses them first."""
        placements = []
        for bucket in reversed(self.layout.buckets[len(self.compute) :]):
            persistent = all(self._is_persistent(self.parameters[slot.index]) for slot in bucket.slots)
            placements.append(self.placements.place_parameters(bucket.numel // self.layout.world_size, persistent))
        self._compute_placements += reversed(placements)

    def placement_of_compute(self, bucket: int) -> Placement:
        return self._compute_placements[bucket]
