"""Gradient bucket: the gradients of one bucket on this rank, from the hooks to the mean over ranks.

    p.grad ─ hook ─▶ held ─ copy_in ─▶ local ─ launch ─▶ pending ─ finish_reduction ─▶ reduced
                     small gradients   this rank's       the collective                mean over ranks:
                     that wait for     sum, as long      in flight                     the whole bucket at stage 0,
                     their neighbours  as the bucket                                   this rank's shard at 1 to 3

Stages 2 and 3 go all the way in every backward, and add to ``reduced``. Stages 0 and 1 add to ``local`` in every
backward, and go on from there in the last one of a step.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator, Sequence

import torch

from zerolite.comm import Pending
from zerolite.utils.accelerator import address
from zerolite.utils.dtypes import HALF
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, tag_memory
from zerolite.zero.bucket_filler import BucketFiller, GradientHolder, Segment, gaps_to_clear, many_small, plan_segments
from zerolite.zero.bucket_memory import BucketDtypes, BucketMemory
from zerolite.zero.flat import destinations, zero_gap, zero_slot
from zerolite.zero.layout import BucketLayout, Slot


class BucketState(enum.Enum):
    """State of a bucket in the current backward. :meth:`GradientBucket.open` begins a new round.

        OPEN ─ launch ─▶ SENT ─ mark_late ─▶ LATE

    A late bucket is reduced once more at the end of the backward.
    """

    OPEN = "its gradients are collected"
    SENT = "its reduction has been launched"
    LATE = "a gradient has come after that"


class GradientBucket:
    """Gradients of one bucket on this rank; see the module's picture. No other object writes its fields.

    A *contribution* is one gradient that autograd has accumulated for one parameter. A shared parameter may get several
    in a backward.

    Attributes:
        bucket: slots of the parameters.
        dtype: dtype of the parameters.
        device: device of the parameters.
        state: see :class:`BucketState`.
        local: sum of this rank's gradients that have not been reduced yet [numel]; None before the first copy.
        written: indices of the parameters whose gradients ``local`` contains.
        held: gradients that wait to be copied, except those in segments.
        holders: holders to which hooks may give gradients without counting each. In a flat bucket these are its
            segments; in a sliced one it is ``held``.
        missing: contributions that the current backward still waits for; below 0 if more came than expected.
        expected: contributions of a backward.
        pending: the reduction in flight.
        reduced: mean over ranks, as it is stored: the whole bucket [numel] at stage 0, this rank's shard
            [numel / world_size] at stages 1 to 3. None before the first reduction.
        is_offloaded: ``reduced`` is stored off the device.
        reduces_in_place: the reduction runs in the memory that keeps full gradients anyway, so it needs no more.
    """

    def __init__(
        self,
        bucket: BucketLayout,
        parameter: torch.nn.Parameter,
        strides: Sequence[tuple[int, ...]],
        memory: BucketMemory,
    ) -> None:
        """
        Args:
            bucket: slots of the parameters.
            parameter: one of the bucket's parameters, which all have one dtype and device.
            strides: strides of all whole parameters, by index.
            memory: allocates full buckets.
        """
        self.bucket, self.dtype, self.device = bucket, parameter.dtype, parameter.device
        self._memory = memory
        options = memory.options
        self._dtypes = BucketDtypes(self.dtype, options.communication_dtype(parameter), options)
        self.is_offloaded = memory.offloaded is not None and memory.offloaded.is_offloaded(bucket.index)
        self._offloaded = memory.offloaded if self.is_offloaded else None
        self._slots = {slot.index: slot for slot in bucket.slots}
        self._strides = {slot.index: strides[slot.index] for slot in bucket.slots}
        self._filler = BucketFiller(bucket, strides, self.device) if many_small(bucket) else None
        filled = [slot for slot in bucket.slots if slot.numel]
        self._filled = len(filled)
        self._segments = [] if bucket.rows else plan_segments(bucket, strides)
        self._segment_of = {index: segment for segment in self._segments for index in segment.indices}
        self.held = GradientHolder(filled or bucket.slots)
        self.holders: Sequence[GradientHolder] = [self.held] if bucket.rows and filled else self._segments
        # Padding must be zero, because it is sent and summed. Padding inside a segment is written with the segment.
        ends, begins = [0, *(segment.high for segment in self._segments)], [segment.low for segment in self._segments]
        self._gaps = [gap for gap in gaps_to_clear(bucket) if gap.start >= ends[bisect.bisect(begins, gap.start)]]
        self.local: torch.Tensor | None = None
        self.written: set[int] = set()
        self._staged = False  # `local` is the communicator's memory, which is sent without a copy
        self._launching = False  # `local` is being filled for a launch that follows at once
        self.expected = self._filled
        self.open(several=False)
        self.pending: Pending | None = None
        self._sent: torch.Tensor | None = None  # input of `pending`
        self.reduced: torch.Tensor | None = None
        if self._offloaded is not None:  # allocate now, so that a full disk is an error before training
            self._offloaded.stored(bucket.index, bucket.numel // memory.groups.shard.world_size, self.mean_dtype)

    def holder_of(self, index: int) -> GradientHolder | None:
        """Return the holder for the gradient of a parameter; None if it is copied by itself."""
        if not self.bucket.rows:
            return self._segment_of.get(index)
        return self.held if index in self.held.indices else None

    # ---------------------------------------------------------------- a backward

    def open(self, several: bool) -> None:
        """Expect one launch: of a backward that begins, or of a step that reduces what no backward has.

        Args:
            several: ``local`` contains more than one backward when it is sent, so it may be sent in a wider dtype.
        """
        self.state = BucketState.OPEN
        self.missing = self.expected
        self._reduce_dtype, self.reduces_in_place = self._dtypes.reduce[several], self._dtypes.in_place[several]
        self._sent_item = GRADIENTS if self.reduces_in_place else BUCKETS

    def expect(self, contributions: int) -> None:
        """Expect this many contributions in each backward from the next one on."""
        self.expected = contributions

    def mark_late(self) -> None:
        """Note that a gradient has come after the launch in this backward."""
        assert self.state is not BucketState.OPEN
        self.state = BucketState.LATE

    def count(self, contributions: int) -> None:
        """Count contributions that are not passed to :meth:`accumulate`."""
        self.missing -= contributions

    # ---------------------------------------------------------------- gradients into `local`

    def accumulate(self, slot: Slot, gradient: torch.Tensor, at_once: bool, factor: float, tag: bool) -> None:
        """Count a contribution, and copy it into ``local`` or hold it until it is copied with others.

        Args:
            slot: slot of the parameter.
            gradient: the contribution, in the parameter's shape.
            at_once: copy it now, unless the bucket is filled by segments or in one call.
            factor: factor of gradients that are copied.
            tag: tag the memory of a held gradient, because a tracker listens.
        """
        self.missing -= 1
        index, segment = slot.index, self._segment_of.get(slot.index)
        if segment is not None:
            if index in segment.gradients:
                self.copy_in_segment(segment, factor)
            segment.gradients[index] = tag_memory(gradient, self._memory.item()) if tag else gradient
            if len(segment.gradients) == segment.count:
                self.copy_in_segment(segment, factor)
        elif (at_once and self._filler is None) or self.local is not None:
            self.copy_in(slot, gradient, factor)
        elif index in self.held.gradients:
            self.copy_in_held(factor)
            self.copy_in(slot, gradient, factor)
        else:
            self.held.gradients[index] = tag_memory(gradient, self._memory.item()) if tag else gradient

    def holders_to_open(self, by_group: bool) -> Sequence[GradientHolder]:
        """Return the holders to which hooks may give gradients now.

        Args:
            by_group: no gradient launches a bucket, so a whole bucket may be held until its group's backward ends.
        """
        if self.state is not BucketState.OPEN or (self.bucket.rows and not (by_group and self.local is None)):
            return ()
        return self.holders

    def close_holder(self, holder: GradientHolder) -> list[int]:
        """Close ``holder`` to hooks, and count its gradients. Return the parameters of those that it counts."""
        held = holder.end()
        self.missing -= len(held)
        return held

    def copy_in_segment(self, segment: Segment, factor: float) -> None:
        """Copy the gradients of a segment into ``local`` in one call."""
        held, joined = segment.pop_flattened()
        local = self._open_local(joined) if self.local is None else self.local
        target, written = local[segment.low : segment.high], self.written & segment.indices
        # One call writes all elements of the segment, and zeros where no gradient came. So either all its gradients
        # must be the first ones of their slots, or all must be added to earlier ones. A mixture is copied slot by slot.
        if not written:
            if factor != 1.0:
                torch.mul(joined, factor, out=target)
            else:
                target.copy_(joined)
        elif written >= held.keys():
            self._widen()[segment.low : segment.high].add_(joined, alpha=factor)
        else:
            for index, gradient in held.items():
                self.copy_in(self._slots[index], gradient, factor)
        self.written.update(held)

    def copy_in(self, slot: Slot, gradient: torch.Tensor, factor: float) -> None:
        """Copy the first gradient of a slot into ``local``, times ``factor``; add later ones in accumulate_dtype."""
        local = self._open_local(gradient) if self.local is None else self.local
        first = slot.index not in self.written
        if not first:
            local = self._widen()
        for target, values in destinations(local, self.bucket, slot, gradient, self._strides[slot.index]):
            if not first:
                target.add_(values, alpha=factor)
            elif factor != 1.0:
                torch.mul(values, factor, out=target)
            else:
                target.copy_(values)
        self.written.add(slot.index)

    def copy_in_held(self, factor: float) -> None:
        """Copy all held gradients into ``local``, in as few calls as possible."""
        for segment in self._segments:
            if segment.gradients:
                self.copy_in_segment(segment, factor)
        if not self.held.gradients:
            return
        held = self.held.pop_all()
        if self.local is None and self._filler is not None and self._fill(held, factor):
            return
        for index in sorted(held):
            self.copy_in(self._slots[index], held[index], factor)

    def _fill(self, held: dict[int, torch.Tensor], factor: float) -> bool:
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
        if wider and self._memory.is_launched_soon(self.bucket, self._launching):
            dtype = sent
        sendable = self._dtypes.communication in (None, dtype)
        local, self._staged = self._memory.allocate(self.bucket, dtype, gradient.device, sendable, self._launching)
        self.local = local
        if clear_gaps and self._gaps:
            self._clear_gaps(local)
        return local

    def _clear_gaps(self, local: torch.Tensor) -> None:
        for gap in self._gaps:
            zero_gap(local, self.bucket, gap)

    def _widen(self) -> torch.Tensor:
        """Convert ``local`` to the dtype in which several contributions are summed."""
        dtype, local = self._memory.options.accumulate_dtype, self.local
        assert local is not None
        # In bf16 a small gradient vanishes in a large sum. A single gradient is sent as it came, with half the bytes.
        if dtype is not None and local.dtype in HALF:
            self.local, self._staged = local, _ = tag_memory(local.to(dtype), self._memory.item()), False
        return local

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
            zeros = torch.zeros(self.bucket.numel, dtype=self._reduce_dtype, device=self.device)
            return tag_memory(zeros, self._memory.item())
        if len(self.written) < self._filled:
            for segment in self._segments:  # a segment that was copied in already has these zeros
                if self.written.isdisjoint(segment.indices):
                    self.local[segment.low : segment.high].zero_()
            for slot in self.bucket.slots:
                if slot.numel and slot.index not in self._segment_of and slot.index not in self.written:
                    zero_slot(self.local, self.bucket, slot)
        return self.local

    def drop(self, slot: Slot) -> None:
        """Drop the gradient of a parameter as far as it has not been reduced."""
        self.held.gradients.pop(slot.index, None)
        segment = self._segment_of.get(slot.index)
        if segment is not None:
            segment.gradients.pop(slot.index, None)
        if self.local is not None and slot.index in self.written:
            zero_slot(self.local, self.bucket, slot)

    # ---------------------------------------------------------------- the reduction

    def launch(self, local: torch.Tensor) -> None:
        """Launch the reduction.

        Args:
            local: return value of :meth:`prepare_launch`.
        """
        assert self.pending is None, "a bucket has one reduction under way"
        options, groups, key = self._memory.options, self._memory.groups, self.bucket.index + 1
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
        if self.state is BucketState.OPEN:  # the second launch of a late bucket leaves it late
            self.state = BucketState.SENT

    def finish_reduction(self) -> None:
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

    @property
    def mean_dtype(self) -> torch.dtype:
        """Dtype of ``reduced`` after the next :meth:`finish_reduction`."""
        return self._dtypes.mean[self.reduced is not None]

    # ---------------------------------------------------------------- the mean gradient

    def store(self, mean: torch.Tensor) -> None:
        """Replace the mean gradient by ``mean``, which is on the device; write it back if it is offloaded."""
        if self._offloaded is None:
            self.reduced = tag_memory(mean, GRADIENTS)
        else:
            self.reduced = self._offloaded.write_back(self.bucket.index, mean)

    def fetch(self) -> torch.Tensor:
        """Return the mean gradient on the device, a copy if it is offloaded."""
        assert self.reduced is not None
        return self.reduced if self._offloaded is None else self._offloaded.stage_in(self.bucket.index, self.reduced)

    def mean(self) -> torch.Tensor:
        """Return the mean gradient as it is stored, after waiting for its write-back."""
        if self._offloaded is not None:
            self._offloaded.wait(self.bucket.index)
        assert self.reduced is not None, "it is read after finish()"
        return self.reduced

    def release(self, reuse: bool) -> None:
        """Drop the mean gradient. reuse: keep its memory for other buckets."""
        reduced, self.reduced = self.reduced, None
        if reduced is not None and reuse:
            self._memory.release(reduced)

    def clear(self) -> None:
        """Drop gradients that have not been reduced. Called between backwards, with no reduction in flight."""
        if self.local is not None and not self._staged:
            self._memory.release(self.local)
        self.local, self._staged = None, False
        self.written.clear()
        self.held.gradients.clear()
        for segment in self._segments:
            segment.gradients.clear()

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of this bucket with their items of memory."""
        item = self._memory.item()
        if self.reduced is not None and self._offloaded is None:
            yield GRADIENTS, self.reduced
        if self.local is not None:
            yield (BUCKETS if self._staged else item), self.local
        if self._sent is not None:
            yield self._sent_item, self._sent
        for held in (self.held, *self._segments):
            yield from ((item, gradient) for gradient in held.gradients.values())
        if self.pending is not None:
            yield from ((BUCKETS, tensor) for tensor in self.pending.memory())
