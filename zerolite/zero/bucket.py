"""Bucket: parameters whose gradients are reduced in one collective, with everything that this rank keeps of them.

    fill      p.grad --hook--> local.held, local.flat    this rank's sum, as long as the bucket; small gradients wait in
                                         |               ``held`` and are copied together (local_sum.py)
    reduce                     launch    v
                                   local.pending         the collective in flight
                               finish    |
                                         v
    update    master, states <------- reduced            mean over ranks: the whole bucket at stage 0, this rank's
                 |                                       shard at stages 1 to 3
    gather       +--> owned --> compute                  the updated values, on all ranks

Stages 2 and 3 fill and reduce in every backward, and add to ``reduced``. Stages 0 and 1 add to ``local`` in every
backward, and go on from there in the last one of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from zerolite.comm import Pending
from zerolite.offload.placement import Placement
from zerolite.utils.accelerator import address, is_fake
from zerolite.utils.dtypes import sync_master_from_param_
from zerolite.utils.memory_tags import COMPUTE, DEVICE, GRADIENTS, MASTERS, tag_memory
from zerolite.utils.torch_private import as_plain_tensors, deferred_tensor, storage_users, undeferred
from zerolite.zero.flat import copy_assigned_data, dense_strides
from zerolite.zero.gradient_dtypes import GradientDtypes
from zerolite.zero.layout import BucketLayout, Fragment
from zerolite.zero.local_sum import LocalSum
from zerolite.zero.offload import OffloadedGradient
from zerolite.zero.stage3.absent_parameter import AbsentParameter, in_flight_error
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of

if TYPE_CHECKING:
    from zerolite.zero.buffer import ParameterBuffer
    from zerolite.zero.update import OptimParamShard


class Bucket:
    """Parameters of one bucket of the layout, and their tensors on this rank; see the module's picture.

    Attributes:
        layout: slots of the parameters.
        index: position of the bucket in the layout.
        parameters: in the order of the slots.
        groups: the ranks that have this bucket, or parts of it.
        strides: strides of the full parameters, by index.
        fragments: the parts of the parameters that this rank updates.
        is_sharded: this rank updates its shard of the bucket, and keeps that shard of the mean gradient; False: all.
        compute: compute parameters: the full bucket [numel], of which every parameter's ``data`` is a view; at stage 3
            this rank's row of it, of which every ``ds_tensor`` is a view.
        owned: what this rank updates: a view of its range of ``compute``. Where gathers round values it has memory of
            its own, with the exact values; ``compute`` then has what has arrived.
        master: master weights of this range; ``owned`` itself, at no cost, if the dtypes are equal.
        separate: the masters have memory of their own, at ``placement``.
        shards: the parts of the parameters as the optimizer sees them, with the states that it keeps for each.
        owners: ranks that update the whole parameters, by index; empty where each rank updates its fragments.
        update_dtype: dtype in which the masters are updated.
        states: optimizer states that are laid out like ``master``, by name; of a torch optimizer, by name and dtype.
        placement: placement of separate masters, of optimizer states, and of gradients that wait for the step.
        compute_placement: placement of ``owned``.
        updates_on_host: the CPU updates the masters, because the states are on host or disk.
        dtypes: dtypes of the gradients.
        local: this rank's sum of gradients that have not been reduced yet, and their reduction.
        reduced: mean over ranks, as it is stored: the whole bucket [numel] at stage 0, this rank's shard
            [numel / ranks] at stages 1 to 3. None before the first reduction.
        is_offloaded: ``reduced`` is stored off the device.
        gathering: the all-gather of updated values in flight; the gatherer ends it.
        is_hidden: the parameters have no values meanwhile, and :attr:`absent_class` is their class.
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
        placements, memory = buffer.placements, buffer.gradient_memory
        self.layout, self.index, self.parameters = layout, layout.index, list(parameters)
        self.groups = memory.groups.of_spread(layout.spread)
        self._parameter_of = {slot.index: p for slot, p in zip(layout.slots, parameters, strict=True)}
        self.strides = {index: _strides_of(parameter) for index, parameter in self._parameter_of.items()}
        self.is_sharded = buffer.shard
        self.fragments = list(buffer.layout.bucket_fragments(layout, buffer.rank if self.is_sharded else None))
        self._fragment_of = {fragment.slot.index: fragment for fragment in self.fragments}
        self.placement, self.compute_placement = placements.optimizer_placement(layout.index), compute_placement
        self.updates_on_host = self.placement.location != DEVICE
        self.compute, self.device = compute, placements.device
        self.owned = self._range = buffer.owned_range(layout, compute)
        self.separate = master_dtype != compute.dtype
        self._rounding = memory.groups.compression if memory.groups.rounds_values else None
        if self._rounding is not None:
            self.owned = tag_memory(torch.zeros_like(self._range), COMPUTE if self.separate else MASTERS)
        self.master = self.placement.zeros(self.owned.numel(), master_dtype, MASTERS) if self.separate else self.owned
        self.update_dtype = master_dtype
        self.shards: list[OptimParamShard] = []
        self.owners: dict[int, int] = {}
        self.states: dict[str, torch.Tensor] = {}
        self._views: list[torch.Tensor] = []  # each parameter's view of `compute`; none at stage 3
        self._storage, self._own_users, self._has_readers = compute.untyped_storage(), 0, True
        self._stand_ins: list[torch.Tensor] = []  # of hidden parameters
        self.is_hidden = False
        self.absent_class: type = AbsentParameter
        self._memory = memory
        self.dtypes = GradientDtypes(compute.dtype, memory.options.communication_dtype(parameters[0]), memory.options)
        self.local = LocalSum(layout, self.strides, self.device, self.dtypes, memory)
        self.gathering: Pending | None = None
        self.reduced: torch.Tensor | None = None
        accessible = memory.offloads is None or placements.is_accessible(self.placement, on_host=False)
        self._offloaded = None if accessible else self._offload_gradient()
        self.is_offloaded = self._offloaded is not None

    def _offload_gradient(self) -> OffloadedGradient:
        offloads, numel = self._memory.offloads, self.layout.numel // self.groups.states.world_size
        assert offloads is not None
        return OffloadedGradient(offloads, self.index, self.placement, numel, self.dtypes.mean[0])

    # ---------------------------------------------------------------- the mean gradient

    def finish(self) -> None:
        """Wait for the reduction, and add its result to ``reduced``. May be called again after an error."""
        if self.local.pending is not None:
            self.reduced = self.local.finish(None if self.reduced is None else self.fetch())
        assert self.reduced is not None
        if self._offloaded is None:
            tag_memory(self.reduced, GRADIENTS)
        else:
            self.reduced = self._offloaded.write_back(self.reduced)

    def fetch(self) -> torch.Tensor:
        """Return the mean gradient on the device, a copy if it is offloaded."""
        assert self.reduced is not None
        offloaded = self._offloaded
        return self.reduced if offloaded is None or self.reduced is not offloaded.stored else offloaded.stage_in()

    def mean(self) -> torch.Tensor:
        """Return the mean gradient as it is stored, after waiting for its write-back; NaN if the disk has lost it."""
        assert self.reduced is not None, "it is read after the reducer's finish()"
        offloaded = self._offloaded
        return self.reduced if offloaded is None or self.reduced is not offloaded.stored else offloaded.values()

    def wait_for_storage(self) -> None:
        """Wait until an offloaded mean gradient is stored, or lost."""
        if self._offloaded is not None:
            self._offloaded.is_there()

    def clear_storage(self) -> None:
        """Forget an offloaded mean gradient, also one that the disk has lost."""
        if self._offloaded is not None:
            self._offloaded.clear()

    def mean_part(self, index: int) -> torch.Tensor | None:
        """Return this rank's part of a parameter's mean gradient, a view of its storage: flat, or in the parameter's
        shape if this rank keeps the whole. None if this rank owns nothing of the parameter."""
        fragment = self._fragment_of.get(index)
        if fragment is None:
            return None
        flat = self.mean()
        if self.is_sharded:
            return flat.narrow(0, fragment.shard_start, fragment.numel)
        shape, start = self._parameter_of[index].shape, flat.storage_offset() + fragment.bucket_start
        return flat.as_strided(shape, self.strides[index], start)

    def fragment_of(self, index: int) -> Fragment:
        """Return the range of a parameter's elements that :meth:`mean_part` has."""
        return self._fragment_of[index]

    def take_mean(self) -> torch.Tensor:
        """Return the mean gradient as it is stored, for an update that consumes it. At stage 0 the next backward
        reuses its memory."""
        mean = self.mean()
        self.release()
        return mean

    def release(self) -> None:
        """Drop the mean gradient after its use. At stage 0 its memory is reused."""
        reduced, self.reduced = self.reduced, None
        if reduced is not None and not self.is_sharded:
            self._memory.release(reduced)

    def clear(self) -> None:
        """Drop all gradients. Called between backwards, with no reduction in flight."""
        if self.local.flat is not None or self.local.held:
            self.local.clear()
        self.release()

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of this bucket's gradients with their items of memory."""
        if self._offloaded is not None:
            yield GRADIENTS, self._offloaded.stored
        elif self.reduced is not None:
            yield GRADIENTS, self.reduced
        yield from self.local.memory()

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

    def count_own_views(self) -> None:
        """Count the tensors over the memory of ``compute``. Called when the engine has made all of its own, and the
        user can have none yet."""
        self._own_users = storage_users(self._storage)

    def hide_parameters(self) -> bool:
        """Take the values out of the parameters, because a gather writes them: see :class:`AbsentParameter`.

        Return False, and do nothing, if something read them at the launch but through the ``Parameter`` objects: a view
        that was taken before, a graph that has saved one, another process, a class of the user.
        """
        if self.layout.rows:
            return True  # parameters of stage 3 have no values of the row, and gathers from it wait
        if self._has_readers or set(map(type, self.parameters)) != {torch.nn.Parameter}:
            return False
        if not self._stand_ins:
            source = self.absent_class.source  # type: ignore[attr-defined]
            for slot, view in zip(self.layout.slots, self._views, strict=True):
                data = view if is_fake(view) else deferred_tensor(view, source, in_flight_error(slot.name))
                self._stand_ins.append(data)
        # In this order, so that :meth:`reveal_parameters` also undoes what an exception (Ctrl-C) has cut short.
        self.is_hidden = True
        with undeferred(), as_plain_tensors():
            for parameter, data in zip(self.parameters, self._stand_ins, strict=True):
                parameter.__class__ = self.absent_class
                parameter.data = data
        return True

    def reveal_parameters(self) -> None:
        """Undo :meth:`hide_parameters`, after the gather. Other threads find the class only after the values."""
        with undeferred(), as_plain_tensors():
            for parameter, view in zip(self.parameters, self._views, strict=True):
                if type(parameter) is self.absent_class:
                    parameter.data = view
                    parameter.__class__ = torch.nn.Parameter
        self.is_hidden = False

    def collect_assigned_data(self) -> None:
        """Copy tensors that the user has assigned (``p.data = values``) into ``compute``, and restore the views.

        Raises:
            RuntimeError: an assigned tensor has another shape, dtype or device.
        """
        # Addresses of the views are read again: a storage that was emptied and filled has another one now.
        for slot, parameter, view in zip(self.layout.slots, self.parameters, self._views, strict=False):
            if address(parameter) != address(view):
                copy_assigned_data(slot.name, parameter, view)

    def view_of(self, fragment: Fragment, flat: torch.Tensor) -> torch.Tensor:
        """Return the fragment's elements of a tensor that is laid out like ``master``.

        They are flat, or have the parameter's shape and strides if this rank updates all buckets.
        """
        if self.is_sharded:
            return flat.narrow(0, fragment.shard_start, fragment.numel)
        index, start = fragment.slot.index, flat.storage_offset() + fragment.shard_start
        return flat.as_strided(self._parameter_of[index].shape, self.strides[index], start)

    def master_view(self, fragment: Fragment) -> torch.Tensor:
        """Return the fragment's elements of the master, as :meth:`view_of` does."""
        return self.view_of(fragment, self.master)

    # ---------------------------------------------------------------- update and gather

    def gather(self, rounded: bool = False) -> None:
        """Round the masters into this rank's range of the compute parameters, and launch the all-gather of all ranges.

        Args:
            rounded: the update has rounded them already.
        """
        if self.separate and not rounded:
            self.owned.copy_(self.master)
        if self._rounding is not None:
            self._range.copy_(self.owned)
        # The bucket was written. Parameters are views of it with version counters of their own, which have not changed.
        # With a new version autograd refuses a second backward through a graph from before the step. Without it that
        # backward would silently use the new weights.
        torch.autograd.graph.increment_version(self.parameters)
        if (updated := self.groups.updated) is not None:
            if self._own_users:  # asked before the launch, because collectives have views of their own
                is_shared = self.device.type == "cpu" and self._storage.is_shared()
                self._has_readers = is_shared or storage_users(self._storage) != self._own_users
            self.gathering = updated.all_gather(self.compute, "parameters", self.index + 1)

    @torch.no_grad()
    def collect_written(self) -> None:
        """Copy values that the user has written into the compute parameters to ``owned``, where that has memory of its
        own; called between updates.

        An element was written if it is not what arrives of ``owned``.
        """
        if self._rounding is None:
            return
        assert self.gathering is None, "the values are still on their way"
        bits = torch.int32 if self.owned.dtype == torch.float32 else torch.int16
        written = self._range.view(bits) != self._rounding.as_sent(self.owned).view(bits)
        if not is_fake(written) and (self.device.type != "cpu" or bool(written.any())):
            self.owned.copy_(torch.where(written, self._range, self.owned))

    @torch.no_grad()
    def sync_master_from_param(self) -> None:
        """Copy values that the user has written into the compute parameters to the masters.

        An element was written if it is not what its master rounds to. zerolite's kernels do this while they update.
        """
        self.collect_written()
        if self.separate:
            sync_master_from_param_(self.master, self.owned.to(self.master.device))

    @torch.no_grad()
    def copy_to_master(self, indices: Collection[int]) -> None:
        """Copy the compute parameters of these indices to the masters, also where a master rounds to the same value."""
        self.collect_written()
        for fragment in self.fragments if self.separate else ():
            if fragment.slot.index in indices:
                self.master_view(fragment).copy_(self.view_of(fragment, self.owned))


def _strides_of(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    sharded_param = sharded_param_of(parameter)
    return dense_strides(parameter.data) if sharded_param is None else sharded_param.strides
