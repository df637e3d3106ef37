"""Bucket: parameters whose gradients are reduced in one collective, with everything that this rank keeps of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from zerolite.offload.placements import Placement
from zerolite.utils.accelerator import address
from zerolite.utils.memory_tags import MASTERS
from zerolite.utils.rounding import sync_master_from_param_
from zerolite.zero.flat import copy_assigned_data, dense_strides
from zerolite.zero.layout import BucketLayout, Fragment, Slot

if TYPE_CHECKING:
    from zerolite.zero.buffer import ParameterBuffer
    from zerolite.zero.optim_shards import OptimParamShard


class Bucket:
    """Parameters of one bucket of the layout, and their tensors on this rank.

    Attributes:
        layout: slots of the parameters.
        index: position of the bucket in the layout.
        parameters: in the order of the slots.
        fragments: the parts of the parameters that this rank updates.
        is_sharded: this rank updates its shard of the bucket; False: all of it.
        compute: compute parameters: the full bucket [numel], of which every parameter's ``data`` is a view; at stage 3
            this rank's row of it, of which every ``ds_tensor`` is a view.
        owned: the range of ``compute`` that this rank updates, a view.
        master: master weights of this range; ``owned`` itself, at no cost, if the dtypes are equal.
        separate: the masters have memory of their own, at ``placement``.
        shards: the parts of the parameters as the optimizer sees them.
        update_dtype: dtype in which the masters are updated.
        states: optimizer states that are laid out like ``master``, by name.
        placement: placement of separate masters, of optimizer states, and of gradients that wait for the step.
        compute_placement: placement of ``owned``.
        updates_on_host: the CPU updates the masters, because the states are on host or disk.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[torch.nn.Parameter],
        buffer: ParameterBuffer,
        compute: torch.Tensor,
        compute_placement: Placement,
        master_dtype: torch.dtype,
    ) -> None:
        """
        Args:
            layout, parameters, compute, compute_placement: see the class.
            buffer: the buckets of the model. It is not kept.
            master_dtype: dtype of the masters. If they are separate, the caller gives them their values.
        """
        self.layout, self.index, self.parameters = layout, layout.index, list(parameters)
        self._parameter_of = {slot.index: p for slot, p in zip(layout.slots, parameters, strict=True)}
        self.is_sharded = buffer.shard
        rank = buffer.rank if self.is_sharded else None
        self.fragments = list(buffer.layout.bucket_fragments(layout, rank))
        self.placement, self.compute_placement = buffer.placements.optimizer_placement(layout.index), compute_placement
        self.updates_on_host = buffer.placements.updates_on_host(layout.index)
        self.compute = compute
        self.owned = compute if layout.rows else buffer.owned_range(layout, compute)
        self.separate = master_dtype != compute.dtype
        self.master = self.owned
        if self.separate:
            self.master = self.placement.zeros(self.owned.numel(), master_dtype, MASTERS)
        self.update_dtype = master_dtype
        self.shards: list[OptimParamShard] = []
        self.states: dict[str, torch.Tensor] = {}
        self._views: list[torch.Tensor] = []  # each parameter's view of `compute`; none at stage 3

    @property
    def master_placement(self) -> Placement:
        return self.placement if self.separate else self.compute_placement

    # ---------------------------------------------------------------- views

    def show_parameters(self) -> None:
        """Make the data of each parameter a view of ``compute``, which has the values."""
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            start = self.compute.storage_offset() + slot.start
            parameter.data = self.compute.as_strided(parameter.shape, dense_strides(parameter.data), start)
            self._views.append(parameter.data)

    def collect_assigned_data(self) -> None:
        """Copy tensors that the user has assigned (``p.data = values``) into ``compute``, and restore the views.

        Raises:
            RuntimeError: an assigned tensor has another shape, dtype or device.
        """
        # Addresses of the views are read again: a storage that was emptied and filled has another one now.
        for slot, parameter, view in zip(self.layout.slots, self.parameters, self._views, strict=False):
            if address(parameter) != address(view):
                copy_assigned_data(slot.name, parameter, view)

    def keeps_shape(self, slot: Slot) -> bool:
        """Return True if the shard has the parameter's shape and is not flat: this rank updates all of it."""
        return slot.whole or not self.is_sharded

    def view_of(self, fragment: Fragment, flat: torch.Tensor) -> torch.Tensor:
        """Return the fragment's elements of a tensor that is laid out like ``master``.

        They are flat, or have the parameter's shape and strides if :meth:`keeps_shape`.
        """
        if not self.keeps_shape(fragment.slot):
            return flat.narrow(0, fragment.shard_start, fragment.numel)
        like = self._parameter_of[fragment.slot.index].data
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset() + fragment.shard_start)

    def master_view(self, fragment: Fragment) -> torch.Tensor:
        """Return the fragment's elements of the master, as :meth:`view_of` does."""
        return self.view_of(fragment, self.master)

    # ---------------------------------------------------------------- masters and compute parameters

    def sync_param_from_master(self, rounded: bool = False) -> None:
        """Round the masters into this rank's range of the compute parameters.

        Args:
            rounded: the update has done so already.
        """
        if self.separate and not rounded:
            self.owned.copy_(self.master)
        # The bucket was written. Parameters are views of it with version counters of their own, which have not changed.
        # With a new version autograd refuses a second backward through a graph from before the step. Without it that
        # backward would silently use the new weights.
        torch.autograd.graph.increment_version(self.parameters)

    @torch.no_grad()
    def sync_master_from_param(self) -> list[torch.Tensor]:
        """Copy values that the user has written into the compute parameters to the masters. Return the master if it
        was written.

        An element was written if it is not what its master rounds to. zerolite's kernels do this while they update.
        """
        master = self.master
        written = self.separate and sync_master_from_param_(master, self.owned.to(master.device))
        return [master] if written else []

    @torch.no_grad()
    def copy_to_master(self, indices: Collection[int]) -> list[torch.Tensor]:
        """Copy the compute parameters of these indices to the masters, also where a master rounds to the same value.
        Return the parts of the master that were written."""
        chosen = [f for f in self.fragments if f.slot.index in indices] if self.separate else []
        return [self.master_view(f).copy_(self.view_of(f, self.owned)) for f in chosen]
