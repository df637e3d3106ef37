"""Bucket: parameters whose gradients are reduced in one collective, with everything that this rank keeps of them.

    fill      p.grad --hook--> held ----> local      this rank's sum, as long as the bucket; small gradients wait in
                                            |        ``held`` and are copied together
    reduce                     launch       v
                                         pending     the collective in flight
                               finish       |
                                            v
    update    master, states <---------- reduced     mean over ranks: the whole bucket at stage 0, this rank's shard
                 |                                   at stages 1 to 3
    gather       +--> owned --> compute              the updated values, on all ranks

Stages 2 and 3 fill and reduce in every backward, and add to ``reduced``. Stages 0 and 1 add to ``local`` in every
backward, and go on from there in the last one of a step.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from zerolite.comm import Pending
from zerolite.offload.placement import Placement
from zerolite.utils.accelerator import address
from zerolite.utils.dtypes import HALF
from zerolite.utils.memory_tags import BUCKETS, DEVICE, GRADIENTS, MASTERS, tag_memory
from zerolite.utils.rounding import sync_master_from_param_
from zerolite.zero.flat import copy_assigned_data, dense_strides, destinations, zero_gap, zero_slot
from zerolite.zero.gradient_memory import GradientDtypes
from zerolite.zero.layout import BucketLayout, Fragment, Slot
from zerolite.zero.offload import OffloadedGradient
from zerolite.zero.small_gradients import BucketFiller, Segment, gaps_to_clear, many_small, plan_segments
from zerolite.zero.stage3.partitioned_parameter import handle_of

if TYPE_CHECKING:
    from zerolite.zero.buffer import ParameterBuffer
    from zerolite.zero.stage3.param_group import ParamGroup
    from zerolite.zero.update import OptimParamShard

_CLOSED: frozenset[int] = frozenset()


class BucketState(enum.Enum):
    """State of a bucket's gradients. :meth:`Bucket.open` begins a new round.

        FILL -- launch --> REDUCE -- mark_late --> LATE

    A late bucket is reduced once more at the end of the backward.
    """

    FILL = "its gradients are collected"
    REDUCE = "its reduction has been launched"
    LATE = "a gradient has come after that"


class Bucket:
    """Parameters of one bucket of the layout, and their tensors on this rank; see the module's picture.

    A *contribution* is one gradient that autograd has accumulated for one parameter. A shared parameter may get several
    in a backward.

    Attributes:
        layout: slots of the parameters.
        index: position of the bucket in the layout.
        place: position of the bucket in the order of launches.
        parameters: in the order of the slots.
        strides: strides of the full parameters, by index.
        fragments: the parts of the parameters that this rank updates.
        is_sharded: this rank updates its shard of the bucket, and keeps that shard of the mean gradient; False: all.
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
        state: see :class:`BucketState`.
        held: gradients that wait to be copied into ``local``, by index of the parameter.
        direct: indices of the parameters whose gradients hooks may put into ``held`` without another call.
        local: sum of this rank's gradients that have not been reduced yet [numel]; None before the first copy.
        written: indices of the parameters whose gradients ``local`` contains.
        waits_for: contributions of the current backward that are not in ``local`` yet. When so many are held, all have
            come. Below 0 if more came than expected.
        groups: parameter groups of stage 3. The bucket is launched when no backward of theirs is to come.
        ends_last: it has a persistent parameter, whose gradient may come at any time.
        ended_again: a group's backward has ended after the launch, and may have brought gradients; equal on all ranks.
        pending: the reduction in flight.
        reduced: mean over ranks, as it is stored: the whole bucket [numel] at stage 0, this rank's shard
            [numel / ranks] at stages 1 to 3. None before the first reduction.
        is_offloaded: ``reduced`` is stored off the device.
        is_lent: the user may have views of ``reduced``.
        reduces_in_place: the reduction runs in the memory that keeps full gradients anyway, so it needs no more.
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
        self.place = layout.index
        self._slots = {slot.index: slot for slot in layout.slots}
        self._parameter_of = {slot.index: p for slot, p in zip(layout.slots, parameters, strict=True)}
        self.strides = {
            index: dense_strides(p.data) if (sharded_param := handle_of(p)) is None else sharded_param.strides
            for index, p in self._parameter_of.items()
        }
        self.is_sharded = buffer.shard
        rank = buffer.rank if self.is_sharded else None
        self.fragments = list(buffer.layout.bucket_fragments(layout, rank))
        self._fragment_of = {fragment.slot.index: fragment for fragment in self.fragments}
        self.placement, self.compute_placement = placements.optimizer_placement(layout.index), compute_placement
        self.updates_on_host = self.placement.location != DEVICE
        self.compute, self.device = compute, placements.device
        self.owned = compute if layout.rows else buffer.owned_range(layout, compute)
        self.separate = master_dtype != compute.dtype
        self.master = self.owned
        if self.separate:
            self.master = self.placement.zeros(self.owned.numel(), master_dtype, MASTERS)
        self.update_dtype = master_dtype
        self.shards: list[OptimParamShard] = []
        self.states: dict[str, torch.Tensor] = {}
        self._views: list[torch.Tensor] = []  # each parameter's view of `compute`; none at stage 3
        self._memory = memory
        self._dtypes = GradientDtypes(compute.dtype, memory.options.communication_dtype(parameters[0]), memory.options)
        self._filler = BucketFiller(layout, self.strides, self.device) if many_small(layout) else None
        self._segments = [] if layout.rows else plan_segments(layout, self.strides)
        self._filled = frozenset(slot.index for slot in layout.slots if slot.numel)
        self._small = frozenset(index for segment in self._segments for index in segment.indices)
        # Padding must be zero, because it is sent and summed. Padding inside a segment is written with the segment.
        ends, begins = [0, *(segment.high for segment in self._segments)], [segment.low for segment in self._segments]
        self._gaps = [gap for gap in gaps_to_clear(layout) if gap.start >= ends[bisect.bisect(begins, gap.start)]]
        self.held: dict[int, torch.Tensor] = {}
        self.direct = _CLOSED
        self.local: torch.Tensor | None = None
        self.written: set[int] = set()
        self._staged = False  # `local` is the communicator's memory, which is sent without a copy
        self._launching = False  # `local` is being filled for a launch that follows at once
        self._came: set[int] = set()  # parameters with a contribution in this backward; those in `held` may be left out
        self._repeats: dict[int, int] = {}  # contributions in this backward, of parameters with more than one
        self._most: dict[int, int] = {}  # the most of them in any backward
        self.groups: list[ParamGroup] = []
        self.ends_last = self.ended_again = False
        self.open(multiple_backwards=False)
        self.pending: Pending | None = None
        self._sent: torch.Tensor | None = None  # input of `pending`
        self.reduced: torch.Tensor | None = None
        self.is_lent = False
        self._offloaded: OffloadedGradient | None = None
        if memory.offloads is not None and not placements.is_accessible(self.placement, on_host=False):
            numel = layout.numel // memory.groups.shard.world_size
            self._offloaded = OffloadedGradient(memory.offloads, self.index, self.placement, numel, self.mean_dtype)
        self.is_offloaded = self._offloaded is not None

    # ---------------------------------------------------------------- fill

    def open(self, multiple_backwards: bool) -> None:
        """Expect one launch: of a backward that begins, or of a step that reduces what no backward has.

        Args:
            multiple_backwards: ``local`` contains more than one backward when it is sent, so it may be sent in a wider
                dtype.
        """
        self.state = BucketState.FILL
        self.ended_again = False
        self._came.clear()
        self._repeats.clear()
        # A parameter may have several contributions if reentrant checkpointing runs a backward inside the backward.
        self.waits_for = len(self._filled) + sum(self._most.values()) - len(self._most)
        self._reduce_dtype = self._dtypes.reduce[multiple_backwards]
        self.reduces_in_place = self._dtypes.in_place[multiple_backwards]
        self._sent_item = GRADIENTS if self.reduces_in_place else BUCKETS

    def open_directly(self, by_group: bool) -> None:
        """Let hooks put small gradients into ``held`` without another call.

        Args:
            by_group: no gradient launches a bucket, so a whole bucket may be held until its group's backward ends.
        """
        if self.state is BucketState.FILL and not self.layout.rows:
            self.direct = self._small
        elif self.state is BucketState.FILL and by_group and self.local is None:
            self.direct = self._filled

    def close(self) -> None:
        """Let hooks put nothing into ``held`` any more."""
        self.direct = _CLOSED

    @property
    def is_complete(self) -> bool:
        """True if all contributions that are expected in this backward have come."""
        return len(self.held) >= self.waits_for

    def count(self, index: int) -> None:
        """Note a contribution that a hook has not put into ``held``."""
        if index in self._came or index in self.held:
            self._repeats[index] = self._repeats.get(index, 1) + 1
        self._came.add(index)

    def discard(self, index: int) -> None:
        """Count a contribution whose values are dropped."""
        self.count(index)
        self.waits_for -= 1

    def learn_contributions(self) -> None:
        """Expect as many contributions from now on as this complete backward has brought, if that is more."""
        for index, count in self._repeats.items():
            self._most[index] = max(count, self._most.get(index, 1))

    def set_groups(self, groups: Sequence[ParamGroup], ends_last: bool) -> None:
        """Set the parameter groups that fill the bucket."""
        self.groups, self.ends_last = [], ends_last
        for group in groups:
            group.add_bucket(self)

    def on_group_end(self) -> bool:
        """Note that a group's backward has ended. Return True if the bucket is to be launched now."""
        if self.state is not BucketState.FILL:
            self.ended_again = True
            return False
        return not (self.ends_last or any(group.unfinished for group in self.groups))

    def mark_late(self) -> None:
        """Note that a gradient has come after the launch in this backward."""
        assert self.state is not BucketState.FILL
        self.state = BucketState.LATE

    def add(self, slot: Slot, gradient: torch.Tensor, at_once: bool, factor: float, tag: bool) -> None:
        """Copy a contribution into ``local``, or hold it until it is copied with others.

        Args:
            slot: slot of the parameter.
            gradient: the contribution, in the parameter's shape.
            at_once: copy it now, unless it is small or the bucket is filled in one call.
            factor: factor of gradients that are copied.
            tag: tag the memory of a held gradient, because a tracker listens.
        """
        index = slot.index
        self.count(index)
        if index in self.held:
            self.copy_in_held(factor)
        holds = self.local is None and (self._filler is not None or not at_once)
        if holds or index in self._small:
            self.held[index] = tag_memory(gradient, self._memory.item()) if tag else gradient
        else:
            self.waits_for -= 1
            self._copy_in(slot, gradient, factor)

    def copy_in_held(self, factor: float) -> None:
        """Copy all held gradients into ``local``, in as few calls as possible."""
        held, self.held = self.held, {}
        self.waits_for -= len(held)
        self._came.update(held)
        if not held or (self.local is None and self._filler is not None and self._fill(held, factor)):
            return
        for segment in self._segments:
            if not segment.indices.isdisjoint(held):
                self._copy_in_segment(segment, held, factor)
        for index in sorted(held.keys() - self._small):
            self._copy_in(self._slots[index], held[index], factor)

    def _copy_in_segment(self, segment: Segment, held: Mapping[int, torch.Tensor], factor: float) -> None:
        joined, indices = segment.joined(held), segment.indices & held.keys()
        local = self._open_local(joined) if self.local is None else self.local
        target, written = local[segment.low : segment.high], self.written & segment.indices
        # One call writes all elements of the segment, and zeros where no gradient came. So either all its gradients
        # must be the first ones of their slots, or all must be added to earlier ones. A mixture is copied slot by slot.
        if not written:
            if factor != 1.0:
                torch.mul(joined, factor, out=target)
            else:
                target.copy_(joined)
        elif written >= indices:
            self._widen()[segment.low : segment.high].add_(joined, alpha=factor)
        else:
            for index in sorted(indices):
                self._copy_in(self._slots[index], held[index], factor)
        self.written |= indices

    def _copy_in(self, slot: Slot, gradient: torch.Tensor, factor: float) -> None:
        """Copy the first gradient of a slot into ``local``, times ``factor``; add later ones in accumulate_dtype."""
        local = self._open_local(gradient) if self.local is None else self.local
        first = slot.index not in self.written
        if not first:
            local = self._widen()
        for target, values in destinations(local, self.layout, slot, gradient, self.strides[slot.index]):
            if not first:
                target.add_(values, alpha=factor)
            elif factor != 1.0:
                torch.mul(values, factor, out=target)
            else:
                target.copy_(values)
        self.written.add(slot.index)

    def _fill(self, held: Mapping[int, torch.Tensor], factor: float) -> bool:
        """Write all of ``local`` in one call. Return False if that is not possible; ``local`` is then allocated."""
        assert self._filler is not None
        local = self._open_local(next(iter(held.values())), clear_gaps=False)
        if not self._filler.fill(local, held, factor):
            self._clear_gaps(local)
            return False
        self.written.update(held)
        return True

    def _open_local(self, gradient: torch.Tensor, clear_gaps: bool = True) -> torch.Tensor:
        """Allocate ``local`` for a first gradient like ``gradient``; only its padding is initialised."""
        dtype, sent = self._dtypes.accumulate or gradient.dtype, self._reduce_dtype
        # A bucket that is sent in a wider dtype is filled in it: a conversion would read and write it once more. It
        # takes more memory, so those that wait long for their launch are converted then.
        wider = self._dtypes.accumulate is None and dtype != sent and torch.promote_types(dtype, sent) == sent
        if wider and self._memory.is_launched_soon(self, self._launching):
            dtype = sent
        sendable = self._dtypes.communication in (None, dtype)
        self.local, self._staged = local, _ = self._memory.allocate(self, dtype, sendable, self._launching)
        if clear_gaps and self._gaps:
            self._clear_gaps(local)
        return local

    def _clear_gaps(self, local: torch.Tensor) -> None:
        for gap in self._gaps:
            zero_gap(local, self.layout, gap)

    def _widen(self) -> torch.Tensor:
        """Convert ``local`` to the dtype in which several contributions are summed."""
        dtype, local = self._memory.options.accumulate_dtype, self.local
        assert local is not None
        # In bf16 a small gradient vanishes in a large sum. A single gradient is sent as it came, with half the bytes.
        if dtype is not None and local.dtype in HALF:
            self.local, self._staged = local, _ = tag_memory(local.to(dtype), self._memory.item()), False
        return local

    def drop(self, index: int) -> None:
        """Drop the gradient of a parameter as far as it has not been reduced."""
        self.held.pop(index, None)
        if self.local is not None and index in self.written:
            zero_slot(self.local, self.layout, self._slots[index])

    # ---------------------------------------------------------------- reduce

    def prepare_launch(self, factor: float) -> torch.Tensor:
        """Copy in all held gradients, and return the full bucket [numel] for :meth:`launch`.

        It has zeros where no gradient came: every rank sends every bucket, whatever its own graph has used.
        """
        self._launching = True
        try:
            self.copy_in_held(factor)
        finally:
            self._launching = False
        if self.local is None:
            zeros = torch.zeros(self.layout.numel, dtype=self._reduce_dtype, device=self.device)
            return tag_memory(zeros, self._memory.item())
        if len(self.written) < len(self._filled):
            for segment in self._segments:  # a segment that was copied in already has these zeros
                if self.written.isdisjoint(segment.indices):
                    self.local[segment.low : segment.high].zero_()
            for index in sorted(self._filled - self._small - self.written):
                zero_slot(self.local, self.layout, self._slots[index])
        return self.local

    def launch(self, local: torch.Tensor) -> None:
        """Launch the reduction.

        Args:
            local: return value of :meth:`prepare_launch`.
        """
        assert self.pending is None, "a bucket has one reduction under way"
        options, groups, key = self._memory.options, self._memory.groups, self.index + 1
        if local.dtype != self._reduce_dtype:
            own, local = local, local.to(self._reduce_dtype)
            if not self._staged:
                self._memory.release(own)
            self._staged = False
        if options.predivide_factor != 1.0:
            local.div_(options.predivide_factor)
        divisor = groups.mean.world_size * options.copy_factor / options.predivide_factor
        if options.shard and options.use_reduce_scatter:
            self.pending = groups.reduce_scatter(local, "gradients", divisor, self.mean_dtype, key)
        else:
            self.pending = groups.mean.all_reduce(local, "gradients", divisor, key)
        # Kept, so that its memory can be reused after the reduction. The communicator reuses its own memory itself.
        self._sent = None if self._staged else tag_memory(local, self._sent_item)
        self.local, self._staged = None, False
        self.written.clear()
        if self.state is BucketState.FILL:  # the second launch of a late bucket leaves it late
            self.state = BucketState.REDUCE

    def finish(self) -> None:
        """Wait for the reduction, and add its result to ``reduced``."""
        assert self.pending is not None
        total, options = self.pending.wait(), self._memory.options
        self.pending = None
        if options.shard and not options.use_reduce_scatter:
            total = self._memory.groups.shard.shard(total).clone()
        dtype = self.mean_dtype
        mean = total.to(dtype) if self.reduced is None else self.fetch().to(dtype).add_(total)
        self.store(mean)
        sent, self._sent = self._sent, None
        # At stage 0 an all-reduce leaves the mean in the memory that was sent.
        if sent is not None and address(mean) != address(sent):
            self._memory.release(sent)

    # ---------------------------------------------------------------- the mean gradient

    @property
    def mean_dtype(self) -> torch.dtype:
        """Dtype of ``reduced`` after the next :meth:`finish`."""
        return self._dtypes.mean[self.reduced is not None]

    def store(self, mean: torch.Tensor) -> None:
        """Replace the mean gradient by ``mean``, which is on the device; write it back if it is offloaded."""
        if self._offloaded is None:
            self.reduced = tag_memory(mean, GRADIENTS)
        else:
            self.reduced = self._offloaded.write_back(mean)

    def round_mean(self) -> None:
        """Round the mean gradient, the sum of two reductions, to the dtype of a single contribution."""
        mean = self.fetch()
        if mean.dtype != self.compute.dtype:
            self.store(mean.to(self.compute.dtype))

    def fetch(self) -> torch.Tensor:
        """Return the mean gradient on the device, a copy if it is offloaded."""
        assert self.reduced is not None
        return self.reduced if self._offloaded is None else self._offloaded.stage_in()

    def mean(self) -> torch.Tensor:
        """Return the mean gradient as it is stored, after waiting for its write-back."""
        self.wait_for_storage()
        assert self.reduced is not None, "it is read after the reducer's finish()"
        return self.reduced

    def wait_for_storage(self) -> None:
        """Wait until an offloaded mean gradient is stored."""
        if self._offloaded is not None:
            self._offloaded.wait()

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

    def lend(self) -> torch.Tensor:
        """Return the mean gradient for the user, who may keep it: its memory is not used again."""
        self.is_lent = True
        return self.mean()

    def release(self) -> None:
        """Drop the mean gradient after its use. At stage 0 its memory is reused."""
        reduced, self.reduced = self.reduced, None
        if reduced is not None and not self.is_sharded and not self.is_lent:
            self._memory.release(reduced)
        self.is_lent = False

    def clear(self) -> None:
        """Drop all gradients. Called between backwards, with no reduction in flight."""
        if self.local is not None and not self._staged:
            self._memory.release(self.local)
        self.local, self._staged = None, False
        self.written.clear()
        self.held.clear()
        self.release()

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of this bucket's gradients with their items of memory."""
        item = self._memory.item()
        if self._offloaded is not None:
            yield GRADIENTS, self._offloaded.stored
        elif self.reduced is not None:
            yield GRADIENTS, self.reduced
        if self.local is not None:
            yield (BUCKETS if self._staged else item), self.local
        if self._sent is not None:
            yield self._sent_item, self._sent
        yield from ((item, gradient) for gradient in self.held.values())
        if self.pending is not None:
            yield from ((BUCKETS, tensor) for tensor in self.pending.memory())

    def set_place(self, place: int) -> None:
        """Set the position of the bucket in the order of launches."""
        self.place = place

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

    # ---------------------------------------------------------------- update and gather

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
