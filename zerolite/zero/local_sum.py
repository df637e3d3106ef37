"""Local sum: a bucket's gradients on this rank, from the hooks to the collective that reduces them.

A model has thousands of biases and norms, and copying one by itself costs a call for a few hundred elements. So small
gradients are held until the bucket is launched, and then copied together. Large ones are copied when
they come, which frees their memory.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from zerolite.comm import Pending, done
from zerolite.utils.accelerator import addresses
from zerolite.utils.dtypes import HALF
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, listeners, tag_memory
from zerolite.zero.flat import flattened
from zerolite.zero.gradient_dtypes import ALONE_NUMEL, IN_FLIGHT, GradientDtypes, ReductionOptions
from zerolite.zero.groups import RankGroups
from zerolite.zero.layout import BucketLayout, Gap, Slot

if TYPE_CHECKING:
    from zerolite.zero.backward import Backward
    from zerolite.zero.offload import GradientTransfers
    from zerolite.zero.stage3.param_group import ParamGroup


SMALL_SLOT = 2048
"""Most elements of a slot whose gradient is copied together with others: a call for it alone costs more."""


class BucketState(enum.Enum):
    """State of a bucket's gradients. :meth:`LocalSum.open` begins a new round.

        FILL -- launch --> REDUCE -- mark_late --> LATE -- launch --> REDUCE

    A late bucket is reduced once more at the end of the backward.
    """

    FILL = "its gradients are collected"
    REDUCE = "its reduction has been launched"
    LATE = "a gradient has come after that"


class LocalSum:
    """Sum of this rank's gradients of one bucket that have not been reduced yet, and their reduction.

    A *contribution* is one gradient that autograd has accumulated for one parameter. A shared parameter may get several
    in a backward.

    Attributes:
        layout: slots of the bucket.
        place: position of the bucket in the order of launches.
        state: see :class:`BucketState`.
        missing: contributions that this backward is still expected to bring; below 0 if more came than expected.
        repeats: contributions in this backward, of parameters with more than one.
        held: gradients that wait to be copied, by index of the parameter.
        flat: the sum [numel]; None before the first copy.
        pending: the reduction in flight.
        groups: parameter groups of stage 3. The bucket is launched when no backward of theirs is to come.
        ends_last: it has a persistent parameter, whose gradient may come at any time.
        again: the bucket is launched once more at the end of the backward, because a late gradient may have come on
            some rank; equal on all ranks.
        late_name: parameter whose gradient has come late, in a late bucket.
        adds_to_mean: the reduction in flight is one of several of this step, whose sum may need a wider dtype.
        rounds: that sum is rounded to the dtype of a single contribution: it has the late gradients of one backward.
    """

    def __init__(
        self,
        layout: BucketLayout,
        strides: Mapping[int, tuple[int, ...]],
        device: torch.device,
        dtypes: GradientDtypes,
        memory: GradientMemory,
    ) -> None:
        """
        Args:
            layout: see the class.
            strides: dense strides of the full parameters, by index.
            device: device of the gradients.
            dtypes: dtypes of the bucket's gradients.
            memory: allocates full buckets.
        """
        self.layout, self.place = layout, layout.index
        self._strides, self._device, self._dtypes, self._memory = strides, device, dtypes, memory
        self._groups = memory.groups.of_spread(layout.spread)
        self._slots = {slot.index: slot for slot in layout.slots}
        self._row = layout.numel // max(1, layout.rows)
        self._starts = {slot.index: slot.start for slot in layout.slots}
        self._not_empty = frozenset(slot.index for slot in layout.slots if slot.numel)
        self._small = frozenset(slot.index for slot in layout.slots if 0 < slot.numel <= SMALL_SLOT)
        # At stage 3 all gradients are held: the bucket is launched when the backward of its group ends, soon after.
        self._holds_large = layout.rows > 0 or not memory.options.copy_on_arrival
        self._gaps = gaps_to_clear(layout)  # padding must be zero, because it is sent and summed
        self.held: dict[int, torch.Tensor] = {}
        self.flat: torch.Tensor | None = None
        self._written: set[int] = set()  # parameters whose gradients `flat` contains
        self._came: set[int] = set()  # parameters with a contribution in this backward
        self.repeats: dict[int, int] = {}
        self._most: dict[int, int] = {}  # the most of them in any backward
        self._expected = len(self._not_empty)
        self.groups: list[ParamGroup] = []
        self.ends_last, self.late_name = False, ""
        self.pending: Pending | None = None
        self.adds_to_mean = self.rounds = False
        self._sent: torch.Tensor | None = None  # input of `pending`
        self._sent_category = BUCKETS
        self.open(multiple_backwards=False)

    # ---------------------------------------------------------------- contributions

    def open(self, multiple_backwards: bool) -> None:
        """Expect the contributions of one backward and one launch, or the launch of a step that reduces what no
        backward has.

        Args:
            multiple_backwards: the sum contains more than one backward when it is sent, so it may be sent in a wider
                dtype.
        """
        self.state, self.again, self.missing = BucketState.FILL, False, self._expected
        if multiple_backwards != self._dtypes.multiple_backwards:
            self._dtypes.open(multiple_backwards)
        self._came.clear()
        self.repeats.clear()

    def add(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Copy a contribution into ``flat``, or hold it until it is copied with others.

        Args:
            slot: slot of the parameter.
            gradient: the contribution, in the parameter's shape; None if its values are dropped.
        """
        index = slot.index
        self.missing -= 1
        if index in self._came:
            self.repeats[index] = self.repeats.get(index, 1) + 1
            if index in self.held:
                self.copy_in_held()
        self._came.add(index)
        if gradient is None:
            return
        if index in self._small or (self._holds_large and self.flat is None):
            self.held[index] = gradient
            if listeners:
                tag_memory(gradient, self._memory.current.memory_category)
        else:
            self._copy_in(slot, gradient)

    def learn_contributions(self) -> None:
        """Expect as many contributions from now on as this complete backward has brought, if that is more."""
        # A parameter may have several contributions if reentrant checkpointing runs a backward inside the backward.
        for index, count in self.repeats.items():
            self._most[index] = max(count, self._most.get(index, 1))
        self._expected = len(self._not_empty) + sum(self._most.values()) - len(self._most)

    def drop(self, index: int) -> None:
        """Drop the gradient of a parameter."""
        self.held.pop(index, None)
        if self.flat is not None and index in self._written:
            self._clear_slot(self.flat, self._slots[index])

    # ---------------------------------------------------------------- copies

    def complete(self) -> torch.Tensor:
        """Copy in all held gradients, and return the full bucket [numel], which is launched next.

        It has zeros where no gradient came: every rank sends every bucket, whatever its own graph has used.
        """
        if self._sent is not None and self.pending is None:  # its launch has raised, and is made again
            return self._sent
        if self.flat is None and self.held:
            self._allocate(next(iter(self.held.values())).dtype, launching=True)
        self.copy_in_held()
        if self.flat is None:
            zeros = torch.zeros(self.layout.numel, dtype=self._dtypes.sent, device=self._device)
            return tag_memory(zeros, self._memory.current.memory_category)
        if len(self._written) < len(self._not_empty):
            for index in sorted(self._not_empty - self._written):
                self._clear_slot(self.flat, self._slots[index])
        return self.flat

    def copy_in_held(self) -> None:
        """Copy all held gradients into ``flat``. Of small ones the first of their slots are copied in one call, and
        later ones are added in another."""
        if not self.held:
            return
        small, factor = self.held.keys() & self._small, self._memory.current.factor
        try:
            for adds, chosen in ((False, small - self._written), (True, small & self._written)):
                if not chosen:
                    continue
                sources = list(map(self.held.__getitem__, chosen))
                flat = self._allocate(sources[0].dtype) if self.flat is None else self._widen() if adds else self.flat
                if self.layout.rows:
                    pairs = [pair for i in chosen for pair in self._destinations(flat, self._slots[i], self.held[i])]
                    targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
                else:  # with little in each pass, because this runs for all small gradients
                    base, of, starts = int(flat.storage_offset()), self._strides, self._starts
                    placed = zip(sources, map(of.__getitem__, chosen), map(starts.__getitem__, chosen), strict=True)
                    targets = [flat.as_strided(held.shape, strides, base + start) for held, strides, start in placed]
                if adds:
                    torch._foreach_add_(targets, sources, alpha=factor)
                else:
                    torch._foreach_copy_(targets, sources if factor == 1.0 else torch._foreach_mul(sources, factor))
            self._written |= small
            for index in sorted(self.held.keys() - small):
                self._copy_in(self._slots[index], self.held[index])
        finally:
            self.held = {}  # until they are copied, the bucket reports them as its memory

    def _copy_in(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Copy the first gradient of a slot into ``flat``, times the backward's factor; add later ones in
        accumulate_dtype."""
        flat, factor = self._allocate(gradient.dtype) if self.flat is None else self.flat, self._memory.current.factor
        first = slot.index not in self._written
        if not first:
            flat = self._widen()
        for target, values in self._destinations(flat, slot, gradient):
            if not first:
                target.add_(values, alpha=factor)
            elif factor != 1.0:
                torch.mul(values, factor, out=target)
            else:
                target.copy_(values)
        self._written.add(slot.index)

    def _destinations(
        self, flat: torch.Tensor, slot: Slot, gradient: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the copies that bring a gradient into its slot, as pairs (target, source)."""
        offset, strides = flat.storage_offset() + slot.start, self._strides[slot.index]
        if not self.layout.rows:
            return [(flat.as_strided(gradient.shape, strides, offset), gradient)]
        if not slot.numel:
            return []
        part, row, is_dense = slot.part, self._row, gradient.stride() == strides
        values = gradient.as_strided((slot.numel,), (1,)) if is_dense else flattened(gradient, strides)
        full_rows = slot.numel // part  # rows whose part is full; the row after them has the rest
        pairs = []
        if full_rows:
            target = flat.as_strided((full_rows, part), (row, 1), offset)
            pairs.append((target, values[: full_rows * part].view(full_rows, part)))
        rest = slot.numel - full_rows * part
        if rest:
            pairs.append((flat.as_strided((rest,), (1,), offset + full_rows * row), values[full_rows * part :]))
        return pairs

    def _clear_slot(self, flat: torch.Tensor, slot: Slot) -> None:
        rows, part = (self.layout.rows, slot.part) if self.layout.rows else (1, slot.numel)
        flat.as_strided((rows, part), (self._row, 1), flat.storage_offset() + slot.start).zero_()

    # ---------------------------------------------------------------- memory

    def _allocate(self, dtype: torch.dtype, launching: bool = False) -> torch.Tensor:
        """Allocate ``flat`` for first gradients of ``dtype``; only its padding is initialised. launching: it is filled
        to be launched at once."""
        dtypes = self._dtypes
        dtype = dtypes.accumulate or dtype
        # A bucket that is sent in a wider dtype is filled in it: a conversion would read and write it once more. It
        # takes more memory, so those that wait long for their launch are converted then.
        wider = dtypes.accumulate is None and dtype != dtypes.sent
        wider = wider and torch.promote_types(dtype, dtypes.sent) == dtypes.sent
        if wider and self._memory.is_launched_soon(self, launching):
            dtype = dtypes.sent
        self.flat = flat = self._memory.allocate(self.layout.numel, dtype, self._device)
        tag_memory(flat, self._memory.current.memory_category)
        for gap in self._gaps:
            flat.as_strided((gap.rows, gap.width), (self._row, 1), flat.storage_offset() + gap.start).zero_()
        return flat

    def _widen(self) -> torch.Tensor:
        """Convert ``flat`` to the dtype in which several contributions are summed."""
        dtype, flat = self._memory.options.accumulate_dtype, self.flat
        assert flat is not None
        # In bf16 a small gradient vanishes in a large sum. A single gradient is sent as it came, with half the bytes.
        if dtype is not None and flat.dtype in HALF:
            self.flat = flat = tag_memory(flat.to(dtype), self._memory.current.memory_category)
        return flat

    def clear(self) -> None:
        """Drop all gradients. Called between backwards, with no reduction in flight."""
        self.held.clear()
        flat, self.flat = self.flat, None
        self._written.clear()
        if flat is not None:
            self._memory.release(flat)

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors with their categories of memory."""
        category = self._memory.current.memory_category
        if self.flat is not None:
            yield category, self.flat
        yield from ((category, gradient) for gradient in self.held.values())
        if self._sent is not None:
            yield self._sent_category, self._sent
        if self.pending is not None:
            yield from ((BUCKETS, tensor) for tensor in self.pending.memory())

    # ---------------------------------------------------------------- the reduction

    def set_place(self, place: int) -> None:
        """Set the position of the bucket in the order of launches."""
        self.place = place

    def set_groups(self, groups: Sequence[ParamGroup], ends_last: bool) -> None:
        """Set the parameter groups whose backwards bring the gradients; see the class."""
        self.groups, self.ends_last = list(groups), ends_last

    def on_group_end(self) -> bool:
        """Note that a group's backward has ended. Return True if the bucket is to be launched now."""
        if self.state is not BucketState.FILL:
            self.again = True
            return False
        return not (self.ends_last or any(group.unfinished for group in self.groups))

    def mark_late(self, name: str) -> None:
        """Note that a gradient of parameter ``name`` has come after the launch in this backward."""
        assert self.state is not BucketState.FILL
        self.state, self.late_name = BucketState.LATE, name

    def expect_again(self) -> None:
        """Note that the bucket is launched once more, as all ranks have agreed."""
        self.again = True

    def use_pending(self, pending: Pending) -> None:
        """Wait for ``pending`` next, which goes on from the last reduction."""
        assert self.pending is None, "a bucket has one reduction under way"
        self.pending = pending

    def launch(self, full: torch.Tensor, has_mean: bool) -> None:
        """Launch the reduction.

        Args:
            full: return value of :meth:`complete`.
            has_mean: the result will be added to the mean of earlier gradients.
        """
        assert self.pending is None, "a bucket has one reduction under way"
        options, groups, dtypes = self._memory.options, self._groups, self._dtypes
        key, sent = self.layout.index + 1, full.to(dtypes.sent)  # first: without memory for it nothing changes
        if full is not self._sent:  # otherwise a launch that has raised is made again
            self.flat = None
            self._written.clear()
            if sent is not full:
                self._memory.release(full)
            if options.predivide_factor != 1.0:
                sent.div_(options.predivide_factor)
            # Kept, so that its memory can be reused after the reduction. Set before it is tagged and launched, so that
            # no report of the memory misses it.
            self._sent_category = GRADIENTS if dtypes.reduces_in_place else BUCKETS
            self._sent = sent
            tag_memory(sent, self._sent_category)
        divisor = groups.divisor * options.copy_factor / options.predivide_factor
        self.adds_to_mean = has_mean
        self.rounds = self.again and self._memory.current.accumulated <= 1 and not options.several_expected
        if options.shard and options.use_reduce_scatter:
            self.pending = groups.reduce_scatter(sent, "gradients", divisor, dtypes.mean[has_mean], key)
        else:
            self.pending = groups.mean.all_reduce(sent, "gradients", divisor, key)
        self.state, self.again = BucketState.REDUCE, False

    def finish(self, earlier: torch.Tensor | None) -> torch.Tensor:
        """Wait for the reduction, and release the memory that was sent. May be called again after an error.

        Args:
            earlier: the mean gradient so far, on the device, which may be written to.

        Returns:
            The mean gradient: the result of the reduction, or the sum. At stage 0 an all-reduce leaves it in the memory
            that was sent.
        """
        assert self.pending is not None
        total, options = self.pending.wait(), self._memory.options
        self.pending = done(total)  # what the collective has kept is freed
        if options.shard and not options.use_reduce_scatter:
            total = self._groups.shard.shard(total).clone()
        dtype = self._dtypes.mean[self.adds_to_mean]
        mean = total.to(dtype) if earlier is None else earlier.to(dtype).add_(total)
        if self.rounds:
            mean = mean.to(self._dtypes.own)
        sent, self._sent, self.pending = self._sent, None, None
        if sent is not None and len(set(addresses((mean, sent)))) > 1:
            self._memory.release(sent)
        return mean


class GradientMemory:
    """Memory of full buckets of gradients on their way to a reduction.

    The memory of an earlier bucket is reused, on the CPU only. A large allocation there is new memory from the kernel.
    Touching it for the first time costs several times as much as a copy. CUDA's caching allocator has no such cost.

    Attributes:
        groups: groups of the reductions.
        options: of all buckets.
        current: the current backward.
        offloads: copies of offloaded mean gradients; None if all stay on the device.
    """

    def __init__(
        self, groups: RankGroups, options: ReductionOptions, current: Backward, offloads: GradientTransfers | None
    ) -> None:
        self.groups, self.options, self.current, self.offloads = groups, options, current, offloads
        self._limit = 0  # most full buckets in `_free`
        self._free: list[torch.Tensor] = []

    def use(self, buckets: int, widest: int) -> None:
        """Prepare for a layout. What is kept for reuse is freed.

        Args:
            buckets: number of buckets.
            widest: elements of the largest one, on all ranks that have other parameters in it.
        """
        # Stage 0 keeps full gradients, so it keeps the memory of all buckets between steps. The other stages need
        # memory for the buckets in flight, for one that is completed, and for the next one that fills.
        limit = IN_FLIGHT + 2 if self.options.shard else buckets
        self._limit, self._free = limit if self.options.keep_buckets else 0, []
        if self.offloads is not None:
            self.offloads.set_max_nbytes(4 * widest // self.groups.states.world_size)  # sums are in fp32

    def is_launched_soon(self, bucket: LocalSum, launching: bool) -> bool:
        """Return True if few buckets are launched before this one, so that few are kept like it.

        Args:
            bucket: local sum of the bucket.
            launching: it is filled to be launched. One that is in flight alone waits for the one before it all the
                same, when it has been filled.
        """
        current = self.current
        if launching or current.launches_by_group or not (current.reducing and current.open):
            return launching and not (current.launches_by_group and bucket.layout.numel >= ALONE_NUMEL)
        return bucket.place - current.launched <= IN_FLIGHT

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory [numel] for a full bucket, which the caller tags."""
        for index, tensor in enumerate(self._free):
            if tensor.numel() == numel and tensor.dtype == dtype:
                return self._free.pop(index)
        return torch.empty(numel, dtype=dtype, device=device)

    def release(self, full: torch.Tensor) -> None:
        """Keep the memory of a full bucket for reuse."""
        if self._limit:
            self._free.append(tag_memory(full, BUCKETS if self.options.shard else GRADIENTS))
            del self._free[: -self._limit]

    def clear(self) -> None:
        """Free the memory that is not in use."""
        self._free.clear()

    def unused(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the memory that is kept for reuse, with its categories."""
        for full in self._free:
            yield (BUCKETS if self.options.shard else GRADIENTS), full


def gaps_to_clear(bucket: BucketLayout) -> Sequence[Gap]:
    """Return what is cleared before a bucket is filled: its padding, with what is small between two gaps, or all of a
    sliced bucket if one call costs less than a call for each gap."""
    if bucket.rows:
        cost = sum(gap.numel + SMALL_SLOT for gap in bucket.gaps)
        return (Gap(0, 1, bucket.numel),) if cost > bucket.numel else bucket.gaps
    merged: list[Gap] = []
    for gap in bucket.gaps:
        start = merged[-1].start if merged else 0
        if merged and gap.start - start - merged[-1].width <= SMALL_SLOT:
            merged[-1] = Gap(start, 1, gap.start + gap.width - start)
        else:
            merged.append(gap)
    return merged
