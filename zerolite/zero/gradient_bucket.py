"""Gradient bucket: the gradients of one bucket on this rank, from the hooks to the mean over ranks."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator, Sequence

import torch

from zerolite.comm import Pending
from zerolite.utils.accelerator import address
from zerolite.utils.dtypes import HALF
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, tag_memory
from zerolite.zero.bucket_filler import BucketFiller, GradientHolder, Segment, many_small, plan_segments
from zerolite.zero.bucket_memory import BucketDtypes, BucketMemory
from zerolite.zero.buffer import destinations, zero_slot
from zerolite.zero.layout import Bucket, Slot


class BucketState(enum.Enum):
    """State of a bucket in the backward under way."""

    OPEN = "its gradients are collected"
    SENT = "its reduction has been launched"
    LATE = "a gradient has come after that"


class GradientBucket:
    """See the module. No other object writes its fields.

        hooks ─▶ held ─▶ local ─ launch ─▶ pending ─ finish_reduction ─▶ reduced

    Attributes:
        local: this rank's sum that no reduction has seen yet, the full bucket; None before a gradient is moved.
        written: indices of the parameters that ``local`` holds something of.
        held: gradients that have come and are not moved yet, without those of segments.
        holders: where hooks may put gradients without counting each: of neighbouring small slots, which are moved
            together, in a flat bucket; ``held`` itself in a sliced one.
        missing: contributions that the backward under way still waits for.
        expected: contributions that come in every backward.
        pending: the reduction under way.
        reduced: mean over ranks, where it rests: the full bucket at stage 0, this rank's part above.
        is_offloaded: it does not rest on the device.
        reduces_in_place: it is reduced in the memory in which gradients rest whole.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameter: torch.nn.Parameter,
        strides: Sequence[tuple[int, ...]],
        memory: BucketMemory,
    ) -> None:
        """
        Args:
            parameter: one of its own.
            strides: of all parameters, by index, when they are whole.
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
        # Ranges of no parameter, which are zeros; those in a segment are written with it.
        ends, begins = [0, *(segment.high for segment in self._segments)], [segment.low for segment in self._segments]
        self._gaps = [gap for gap in bucket.gaps if gap[0] >= ends[bisect.bisect(begins, gap[0])]]
        self.local: torch.Tensor | None = None
        self.written: set[int] = set()
        self._staged = False  # `local` is the communicator's memory
        self._launching = False  # it is being filled, to be launched at once
        self.expected = self._filled
        self.open(several=False)
        self.pending: Pending | None = None
        self._sent: torch.Tensor | None = None  # what `pending` reduces
        self.reduced: torch.Tensor | None = None
        if self._offloaded is not None:  # a disk that is full shows at once
            self._offloaded.stored(bucket.index, bucket.numel // memory.comm.world_size, self.mean_dtype)

    def holder_of(self, index: int) -> GradientHolder | None:
        """Return where the hook of a parameter may put its gradient, if there is such a place."""
        if not self.bucket.rows:
            return self._segment_of.get(index)
        return self.held if index in self.held.indices else None

    # ---------------------------------------------------------------- a backward

    def open(self, several: bool) -> None:
        """Let the reduction be launched, once: a backward begins, or the step reduces what none has.

        several: this rank's sums hold more than one backward when they are sent, which may ask for a wider dtype.
        """
        self.state = BucketState.OPEN
        self.missing = self.expected
        self._reduce_dtype, self.reduces_in_place = self._dtypes.reduce[several], self._dtypes.in_place[several]
        self._sent_item = GRADIENTS if self.reduces_in_place else BUCKETS

    def expect(self, contributions: int) -> None:
        self.expected = contributions

    def mark_late(self) -> None:
        """A gradient has come after the launch of this backward."""
        assert self.state is not BucketState.OPEN
        self.state = BucketState.LATE

    def count(self, contributions: int) -> None:
        """Count contributions that have come and were not given to :meth:`accumulate`."""
        self.missing -= contributions

    # ---------------------------------------------------------------- gradients into `local`

    def accumulate(self, slot: Slot, gradient: torch.Tensor, at_once: bool, factor: float, tag: bool) -> None:
        """Take a contribution: move it, or hold it until it is moved with others.

        Args:
            at_once: do not hold it.
            tag: memory is being counted.
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
        """Return the holders in which hooks may hold gradients now. by_group: no gradient launches anything, so that
        a whole bucket may be held until its group's backward ends."""
        if self.bucket.rows and not (by_group and self.local is None and self.state is BucketState.OPEN):
            return ()
        return self.holders

    def close_holder(self, holder: GradientHolder) -> list[int]:
        """Let no hook put gradients in ``holder``. Return the parameters whose gradients have not been counted."""
        held = holder.end()
        self.missing -= len(held)
        return held

    def copy_in_segment(self, segment: Segment, factor: float) -> None:
        """Move the gradients that a segment holds into ``local``, all in one call."""
        held, joined = segment.pop_flattened()
        local = self._open_local(joined) if self.local is None else self.local
        target, written = local[segment.low : segment.high], self.written & segment.indices
        # One call writes the whole segment, zeros too. That is right if nothing of it is there yet, or if all that
        # comes is added to what is there; a mixture is moved slot by slot.
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
        """Copy the first gradient of a slot into ``local``, times ``factor``; add later ones, in accumulate_dtype."""
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

    def add_between_backwards(self, slot: Slot, gradient: torch.Tensor, factor: float) -> None:
        """Add a gradient as :meth:`copy_in` does, between two backwards."""
        segment = self._segment_of.get(slot.index)
        if segment is not None:  # its other gradients may never come, and the segment is sent as a whole
            local = self._open_local(gradient) if self.local is None else self.local
            if self.written.isdisjoint(segment.indices):
                local[segment.low : segment.high].zero_()
        self.copy_in(slot, gradient, factor)

    def copy_in_held(self, factor: float) -> None:
        """Move what is held into ``local``, where none of it is yet: in one call if that is possible."""
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
        assert self._filler is not None
        local = self._open_local(next(iter(held.values())), clear_gaps=False)
        if not self._filler.fill(local, held):
            self._clear_gaps(local)
            return False
        self.written.update(held)
        if factor != 1.0:
            local.mul_(factor)
        return True

    def _open_local(self, gradient: torch.Tensor, clear_gaps: bool = True) -> torch.Tensor:
        """Allocate ``local``, for a first gradient like ``gradient``."""
        dtype = self._dtypes.accumulate or gradient.dtype
        sendable = self._dtypes.communication in (None, dtype)
        local, self._staged = self._memory.allocate(self.bucket, dtype, gradient.device, sendable, self._launching)
        self.local = local
        if clear_gaps and self._gaps:
            self._clear_gaps(local)
        return local

    def _clear_gaps(self, local: torch.Tensor) -> None:
        for low, high in self._gaps:
            local[low:high].zero_()

    def _widen(self) -> torch.Tensor:
        """Let ``local`` have the dtype in which several contributions are summed."""
        dtype, local = self._memory.options.accumulate_dtype, self.local
        assert local is not None
        # Small gradients vanish beside large sums in bf16. A single gradient is sent as it came, at half the bytes.
        if dtype is not None and local.dtype in HALF:
            self.local, self._staged = local, _ = tag_memory(local.to(dtype), self._memory.item()), False
        return local

    def prepare_launch(self, factor: float) -> torch.Tensor:
        """Move what is held, and return ``local``, which is launched next, with zeros where no gradient came: every
        rank sends every bucket, whatever its own graph has used."""
        self._launching = True
        try:
            self.copy_in_held(factor)
        finally:
            self._launching = False
        if self.local is None:
            zeros = torch.zeros(self.bucket.numel, dtype=self.dtype, device=self.device)
            return tag_memory(zeros, self._memory.item())
        if len(self.written) < self._filled:
            for segment in self._segments:  # those that are moved have zeros where no gradient came
                if self.written.isdisjoint(segment.indices):
                    self.local[segment.low : segment.high].zero_()
            for slot in self.bucket.slots:
                if slot.numel and slot.index not in self._segment_of and slot.index not in self.written:
                    zero_slot(self.local, self.bucket, slot)
        return self.local

    def drop(self, slot: Slot) -> None:
        """Forget what has come of a parameter's gradient and no reduction has seen."""
        self.held.gradients.pop(slot.index, None)
        segment = self._segment_of.get(slot.index)
        if segment is not None:
            segment.gradients.pop(slot.index, None)
        if self.local is not None and slot.index in self.written:
            zero_slot(self.local, self.bucket, slot)

    # ---------------------------------------------------------------- the reduction

    def launch(self, local: torch.Tensor) -> None:
        """Launch the reduction of what :meth:`prepare_launch` has returned."""
        assert self.pending is None, "a bucket has one reduction under way"
        options, comm, key = self._memory.options, self._memory.comm, self.bucket.index + 1
        if local.dtype != self._reduce_dtype:
            own, local = local, local.to(self._reduce_dtype)
            if not self._staged:
                self._memory.give_back(own)
            self._staged = False
        if options.predivide_factor != 1.0:
            local.div_(options.predivide_factor)
        divisor = comm.world_size * options.copy_factor / options.predivide_factor
        if options.shard and options.use_reduce_scatter:
            self.pending = comm.reduce_scatter(local, "gradients", divisor, self.mean_dtype, key)
        else:
            self.pending = comm.all_reduce(local, "gradients", divisor, key)
        # Remembered so that its memory is used again. The communicator looks after a bucket of its own.
        self._sent = None if self._staged else tag_memory(local, self._sent_item)
        self.local, self._staged = None, False
        self.written.clear()
        if self.state is BucketState.OPEN:  # a late bucket stays late: it has been sent before
            self.state = BucketState.SENT

    def finish_reduction(self) -> None:
        """Wait for the reduction, and add its result to the mean gradient."""
        assert self.pending is not None
        total, options, comm = self.pending.wait(), self._memory.options, self._memory.comm
        self.pending = None
        if options.shard and not options.use_reduce_scatter:
            total = comm.part(total).clone()
        dtype = self.mean_dtype
        mean = total.to(dtype) if self.reduced is None else self.fetch().to(dtype).add_(total)
        self.store(mean)
        sent, self._sent = self._sent, None
        # At stage 0 the mean may lie in the memory that was sent.
        if sent is not None and address(mean) != address(sent):
            self._memory.give_back(sent)

    @property
    def mean_dtype(self) -> torch.dtype:
        """Dtype of the mean gradient after the next :meth:`finish_reduction`."""
        return self._dtypes.mean[self.reduced is not None]

    # ---------------------------------------------------------------- the mean gradient

    def store(self, mean: torch.Tensor) -> None:
        """The mean gradient is ``mean``, on the device, from now on."""
        if self._offloaded is None:
            self.reduced = tag_memory(mean, GRADIENTS)
        else:
            self.reduced = self._offloaded.write_back(self.bucket.index, mean)

    def fetch(self) -> torch.Tensor:
        """Return the mean gradient on the device."""
        assert self.reduced is not None
        return self.reduced if self._offloaded is None else self._offloaded.stage_in(self.bucket.index, self.reduced)

    def mean(self) -> torch.Tensor:
        """Return the mean gradient where it rests, when it has arrived there."""
        if self._offloaded is not None:
            self._offloaded.wait(self.bucket.index)
        assert self.reduced is not None, "it is read after finish()"
        return self.reduced

    def release(self, reuse: bool) -> None:
        """The mean gradient has been consumed. reuse: its memory may be used again."""
        reduced, self.reduced = self.reduced, None
        if reduced is not None and reuse:
            self._memory.give_back(reduced)

    def clear(self) -> None:
        """Drop this rank's sums. Called when no backward is open and no reduction is under way."""
        if self.local is not None and not self._staged:
            self._memory.give_back(self.local)
        self.local, self._staged = None, False
        self.written.clear()
        self.held.gradients.clear()
        for segment in self._segments:
            segment.gradients.clear()

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are kept here now, with their items."""
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
