"""Gradient bucket: the gradients of one bucket on this rank, from the hooks to the mean over ranks."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zerolite.comm import Communicator, Pending
from zerolite.offload.offloaded_gradients import OffloadedGradients
from zerolite.utils.accelerator import address
from zerolite.utils.dtypes import HALF
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, tag_memory
from zerolite.zero.bucket_filler import BucketFiller, Held, Run, many_small, runs_of
from zerolite.zero.bucket_state import BucketDtypes, BucketPool, ReductionOptions
from zerolite.zero.buffer import destinations, zero_slot
from zerolite.zero.launch_order import LaunchOrder
from zerolite.zero.layout import Bucket, Slot


class PassState(enum.Enum):
    """State of a bucket in the pass under way."""

    OPEN = "its gradients are collected"
    SENT = "its reduction has been launched"
    LATE = "a gradient has come after that"


@dataclass
class Pass:
    """The backward under way, or the last one, as buckets need to know it.

    Attributes:
        factor: by which gradients are multiplied when they are moved into a bucket.
        open: it has begun and not ended.
        reducing: it reduces every bucket.
        void: what comes in it counts as nothing.
        follows_units: buckets are launched at the ends of units' backwards, and not in their order.
        learning: it is still to be learned at which of these ends.
        in_local: backwards since this rank's sums were last reduced; equal on all ranks.
        in_window: backwards since the last step.
    """

    factor: float
    open: bool = False
    reducing: bool = False
    void: bool = False
    follows_units: bool = False
    learning: bool = False
    in_local: int = 0
    in_accumulation: int = 0

    def begin(self, reducing: bool, void: bool, learning: bool) -> None:
        self.open, self.reducing, self.void, self.learning = True, reducing, void, learning
        self.in_local += 1
        self.in_accumulation += 1

    def end(self) -> None:
        self.open = False

    def on_all_reduced(self) -> None:
        """This rank's sums have been reduced."""
        self.in_local = 0

    def end_accumulation(self) -> None:
        """The gradients have been consumed, or dropped."""
        self.in_local = self.in_accumulation = 0

    def follow_units(self) -> None:
        """Launch buckets at the ends of units' backwards from now on."""
        self.follows_units = True

    def multiply_by(self, factor: float) -> None:
        self.factor = factor


class BucketMemory:
    """Memory of full buckets: the communicator's own for a bucket that travels next, else memory that is used again,
    or new; and which items of memory (memory_tags.py) it belongs to. offloaded: where mean gradients rest, None where
    that is the device."""

    def __init__(
        self,
        comm: Communicator,
        options: ReductionOptions,
        order: LaunchOrder,
        current: Pass,
        offloaded: OffloadedGradients | None,
    ) -> None:
        self.current, self.options, self.offloaded = current, options, offloaded
        self._comm, self._order = comm, order
        self._pool = BucketPool(0)

    def use(self, buckets: int) -> None:
        """Keep so many full buckets at most to be used again."""
        self._pool = BucketPool(buckets if self.options.keep_buckets else 0)

    def new(
        self, bucket: Bucket, dtype: torch.dtype, device: torch.device, travels: bool, launching: bool
    ) -> tuple[torch.Tensor, bool]:
        """Return an uninitialised full bucket, and whether it is the communicator's, which travels without a copy.

        Args:
            travels: it may be sent in this dtype.
            launching: it is launched as soon as it is filled.
        """
        options, current = self.options, self.current
        in_pass = current.reducing and (current.open or launching)  # between passes others may launch before it
        exchanged = options.shard and options.use_reduce_scatter and in_pass
        if exchanged and travels:
            # Its place in the order of collectives is known: this pass launches every bucket before it, and nothing
            # else. With units what is launched next is known only when it is.
            if not current.follows_units or launching:
                ahead = 0 if current.follows_units else self._order.ahead(bucket.index)
                staged = self._comm.staging(bucket.numel, dtype, ahead)
                if staged is not None:
                    return staged, True
        return tag_memory(self._pool.take(bucket.numel, dtype, device), self.item()), False

    def item(self) -> str:
        """Item of this rank's sums: gradients where they rest whole, and buckets on their way elsewhere."""
        travels = self.options.shard and self.current.reducing and self.current.in_local <= 1
        return BUCKETS if travels else GRADIENTS

    def give_back(self, bucket: torch.Tensor) -> None:
        self._pool.give_back(tag_memory(bucket, BUCKETS if self.options.shard else GRADIENTS))

    def clear(self) -> None:
        """Let go of what is not in use."""
        self._pool.clear()

    def waiting(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Memory that waits to be used again, with its items."""
        for bucket in self._pool.memory():
            yield (BUCKETS if self.options.shard else GRADIENTS), bucket


class GradientBucket:
    """See the module. No other object writes its fields.

        hooks ─▶ held ─▶ local ─ launch ─▶ pending ─ receive ─▶ reduced

    Attributes:
        local: this rank's sum that no reduction has seen yet, the full bucket; None before a gradient is moved.
        written: indices of the parameters that ``local`` holds something of.
        held: gradients by index of the parameter that have come and are not moved yet.
        runs: neighbouring small gradients that are moved together (flat buckets).
        hooked: gradients that hooks have taken without counting each (sliced buckets).
        missing: contributions that the pass under way still waits for.
        pending: the reduction under way, of ``sent``.
        reduced: mean over ranks, where it rests: the full bucket at stage 0, this rank's part above.
        away: it does not rest on the device.
        expected: contributions that come in every pass.
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
        self._offloaded = (
            memory.offloaded if memory.offloaded is not None and memory.offloaded.away(bucket.index) else None
        )
        self._slots = {slot.index: slot for slot in bucket.slots}
        self._strides = {slot.index: strides[slot.index] for slot in bucket.slots}
        self._filler = BucketFiller(bucket, strides, self.device) if many_small(bucket) else None
        self.runs: list[Run] = [] if bucket.rows else runs_of(bucket, strides)
        self._run_of = {index: run for run in self.runs for index in run.indices}
        filled = [slot for slot in bucket.slots if slot.numel]
        self.hooked = Held(filled) if bucket.rows and filled else None
        self._filled = len(filled)
        # Ranges of no parameter, which are zeros; those in a run are written with it.
        ends, begins = [0, *(run.high for run in self.runs)], [run.low for run in self.runs]
        self._gaps = [gap for gap in bucket.gaps if gap[0] >= ends[bisect.bisect(begins, gap[0])]]
        self.held: dict[int, torch.Tensor] = {}
        self.local: torch.Tensor | None = None
        self.written: set[int] = set()
        self._staged = False  # `local` is the communicator's memory
        self._launching = False  # it is being filled, to be launched at once
        self.expected = self._filled
        self.missing = 0
        self.state = PassState.OPEN
        self.pending: Pending | None = None
        self._sent: torch.Tensor | None = None  # what `pending` reduces
        self.reduced: torch.Tensor | None = None

    def hooks_of(self, index: int) -> Held | None:
        """Return where the hook of a parameter may put its gradient, if there is such a place."""
        if self.hooked is None:
            return self._run_of.get(index)
        return self.hooked if index in self.hooked.indices else None

    # ---------------------------------------------------------------- a pass

    def begin_pass(self) -> None:
        self.state = PassState.OPEN
        self.missing = self.expected

    def expect(self, contributions: int) -> None:
        self.expected = contributions

    def reopen(self) -> None:
        """Its reduction may be launched again, outside of any pass."""
        self.state = PassState.OPEN

    @property
    def launched(self) -> bool:
        return self.state is not PassState.OPEN

    def note_late(self) -> None:
        """A gradient has come after the launch of this pass."""
        assert self.state is not PassState.OPEN
        self.state = PassState.LATE

    def count(self, contributions: int) -> None:
        """So many contributions have come that :meth:`accept` has not been given."""
        self.missing -= contributions

    # ---------------------------------------------------------------- gradients into `local`

    def accept(self, slot: Slot, gradient: torch.Tensor, at_once: bool, factor: float, tag: bool) -> None:
        """Take a contribution: move it, or hold it until it is moved with others.

        Args:
            at_once: do not hold it.
            tag: memory is being counted.
        """
        self.missing -= 1
        index, run = slot.index, self._run_of.get(slot.index)
        if run is not None:
            if index in run.held:
                self.put_run(run, factor)
            run.held[index] = tag_memory(gradient, self._memory.item()) if tag else gradient
            if len(run.held) == run.count:
                self.put_run(run, factor)
        elif (at_once and self._filler is None) or self.local is not None:
            self.put(slot, gradient, factor)
        elif index in self.held:
            self.put_held(factor)
            self.put(slot, gradient, factor)
        else:
            self.held[index] = tag_memory(gradient, self._memory.item()) if tag else gradient

    def swap_hooked(self) -> None:
        """Exchange what hooks have taken with what is held: before they begin to take, and when they have ended."""
        assert self.hooked is not None
        self.hooked.held, self.held = self.held, self.hooked.held

    def put_run(self, run: Run, factor: float) -> None:
        """Move the gradients that a run holds into ``local``, all in one call."""
        held, joined = run.take()
        local = self._open_local(joined) if self.local is None else self.local
        place, written = local[run.low : run.high], self.written & run.indices
        if not written:
            if factor != 1.0:
                torch.mul(joined, factor, out=place)
            else:
                place.copy_(joined)
        elif written >= held.keys():
            self._widen()[run.low : run.high].add_(joined, alpha=factor)
        else:
            for index, gradient in held.items():
                self.put(self._slots[index], gradient, factor)
        self.written.update(held)

    def put(self, slot: Slot, gradient: torch.Tensor, factor: float) -> None:
        """Copy the first gradient of a slot into ``local``, times ``factor``; add later ones, in accumulate_dtype."""
        local = self._open_local(gradient) if self.local is None else self.local
        first = slot.index not in self.written
        if not first:
            local = self._widen()
        for place, values in destinations(local, self.bucket, slot, gradient, self._strides[slot.index]):
            if not first:
                place.add_(values, alpha=factor)
            elif factor != 1.0:
                torch.mul(values, factor, out=place)
            else:
                place.copy_(values)
        self.written.add(slot.index)

    def add(self, slot: Slot, gradient: torch.Tensor, factor: float) -> None:
        """:meth:`put` between two passes, where the other gradients of a run may never come."""
        run = self._run_of.get(slot.index)
        if run is not None:
            local = self._open_local(gradient) if self.local is None else self.local
            if self.written.isdisjoint(run.indices):
                local[run.low : run.high].zero_()
        self.put(slot, gradient, factor)

    def put_held(self, factor: float) -> None:
        """Move what is held into ``local``, where none of it is yet: in one call if that is possible."""
        for run in self.runs:
            if run.held:
                self.put_run(run, factor)
        held, self.held = self.held, {}
        if self.local is None and self._filler is not None and held and self._fill(held, factor):
            return
        for index in sorted(held):
            self.put(self._slots[index], held[index], factor)

    def _fill(self, held: dict[int, torch.Tensor], factor: float) -> bool:
        assert self._filler is not None
        local, staged = self._new_local(next(iter(held.values())))
        if not self._filler.fill(local, held):
            if not staged:
                self._memory.give_back(local)
            return False
        self.local, self._staged = local, staged
        self.written.update(held)
        if factor != 1.0:
            local.mul_(factor)
        return True

    def _open_local(self, gradient: torch.Tensor) -> torch.Tensor:
        local, self._staged = self._new_local(gradient)
        self.local = local
        for low, high in self._gaps:
            local[low:high].zero_()
        return local

    def _new_local(self, gradient: torch.Tensor) -> tuple[torch.Tensor, bool]:
        dtype = self._dtypes.summed or gradient.dtype
        travels = self._dtypes.asked in (None, dtype)
        return self._memory.new(self.bucket, dtype, gradient.device, travels, self._launching)

    def _widen(self) -> torch.Tensor:
        """Let ``local`` have the dtype in which several contributions are summed."""
        dtype, local = self._memory.options.accumulate_dtype, self.local
        assert local is not None
        if dtype is not None and local.dtype in HALF:
            self.local, self._staged = local, _ = tag_memory(local.to(dtype), self._memory.item()), False
        return local

    def complete(self, factor: float) -> torch.Tensor:
        """Move what is held, and return ``local``, which is launched next, with zeros where no gradient came."""
        self._launching = True
        try:
            self.put_held(factor)
        finally:
            self._launching = False
        if self.local is None:
            zeros = torch.zeros(self.bucket.numel, dtype=self.dtype, device=self.device)
            return tag_memory(zeros, self._memory.item())
        if len(self.written) < self._filled:
            for run in self.runs:  # those that are moved have zeros where no gradient came
                if self.written.isdisjoint(run.indices):
                    self.local[run.low : run.high].zero_()
            for slot in self.bucket.slots:
                if slot.numel and slot.index not in self._run_of and slot.index not in self.written:
                    zero_slot(self.local, self.bucket, slot)
        return self.local

    def drop(self, slot: Slot) -> None:
        """Forget what has come of a parameter's gradient and no reduction has seen."""
        self.held.pop(slot.index, None)
        run = self._run_of.get(slot.index)
        if run is not None:
            run.held.pop(slot.index, None)
        if self.local is not None and slot.index in self.written:
            zero_slot(self.local, self.bucket, slot)

    # ---------------------------------------------------------------- the reduction

    def convert(self, local: torch.Tensor) -> torch.Tensor:
        """Return what :meth:`complete` has given in the dtype that travels."""
        dtype = self._dtypes.sent[self._memory.current.in_local > 1]
        if local.dtype == dtype:
            return local
        converted = tag_memory(local.to(dtype), self._sent_item())
        if not self._staged:
            self._memory.give_back(local)
        self._staged = False
        return converted

    def launch(self, pending: Pending, sent: torch.Tensor) -> None:
        """Remember the reduction of ``sent``, which has been launched."""
        assert self.pending is None, "a bucket has one reduction under way"
        self.pending = pending
        self._sent = None if self._staged else tag_memory(sent, self._sent_item())
        self.local, self._staged = None, False
        self.written.clear()
        if self.state is PassState.OPEN:
            self.state = PassState.SENT

    def receive(self) -> torch.Tensor:
        """Wait for the reduction, and return its result."""
        assert self.pending is not None
        total = self.pending.wait()
        self.pending = None
        return total

    def keep(self, total: torch.Tensor) -> None:
        """Add the mean of what :meth:`receive` has given to the mean gradient."""
        dtype = self.mean_dtype
        mean = total.to(dtype) if self.reduced is None else self.fetch().to(dtype).add_(total)
        self.rest(mean)
        sent, self._sent = self._sent, None
        if sent is not None and address(mean) != address(sent):
            self._memory.give_back(sent)

    @property
    def travels_in_place(self) -> bool:
        """True if it is reduced in the memory in which gradients rest whole."""
        return self._dtypes.in_place[self._memory.current.in_local > 1]

    @property
    def mean_dtype(self) -> torch.dtype:
        """Dtype of the mean gradient once :meth:`keep` has been called again."""
        return self._dtypes.mean[self.reduced is not None]

    def _sent_item(self) -> str:
        return GRADIENTS if self.travels_in_place else BUCKETS

    # ---------------------------------------------------------------- the mean gradient

    @property
    def away(self) -> bool:
        return self._offloaded is not None

    def reserve(self, numel: int) -> None:
        """Make room for the mean gradient of so many elements, where it does not rest on the device."""
        if self._offloaded is not None:
            self._offloaded.home(self.bucket.index, numel, self.mean_dtype)

    def rest(self, mean: torch.Tensor) -> None:
        """The mean gradient is ``mean``, on the device, from now on."""
        self.reduced = (
            tag_memory(mean, GRADIENTS) if self._offloaded is None else self._offloaded.keep(self.bucket.index, mean)
        )

    def fetch(self) -> torch.Tensor:
        """Return the mean gradient on the device."""
        assert self.reduced is not None
        return self.reduced if self._offloaded is None else self._offloaded.fetch(self.bucket.index, self.reduced)

    def offloaded_mean(self) -> torch.Tensor:
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
        """Drop this rank's sums. Called when no pass is open and no reduction is under way."""
        if self.local is not None and not self._staged:
            self._memory.give_back(self.local)
        self.local, self._staged = None, False
        self.written.clear()
        self.held.clear()
        for run in self.runs:
            run.held.clear()

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are kept here now, with their items."""
        item = self._memory.item()
        if self.reduced is not None and self._offloaded is None:
            yield GRADIENTS, self.reduced
        if self.local is not None:
            yield (BUCKETS if self._staged else item), self.local
        if self._sent is not None:
            yield self._sent_item(), self._sent
        taken = [] if self.hooked is None else [self.hooked.held]
        for held in (self.held, *taken, *(run.held for run in self.runs)):
            yield from ((item, gradient) for gradient in held.values())
        if self.pending is not None:
            yield from ((BUCKETS, tensor) for tensor in self.pending.memory())
