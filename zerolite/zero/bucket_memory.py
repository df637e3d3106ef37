"""Options of the gradient reductions, dtypes and memory of the buckets, and the current backward as they see it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from zerolite.offload.offloaded_gradients import OffloadedGradients
from zerolite.utils.dtypes import HALF
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, tag_memory
from zerolite.zero.groups import RankGroups
from zerolite.zero.launch_order import LaunchOrder
from zerolite.zero.layout import BucketLayout

IN_FLIGHT = 2
"""Most reductions in flight at once, if each holds a full bucket of memory that would otherwise be free."""
ALONE_NUMEL = 1 << 27
"""Elements from which such a bucket is in flight alone: in fp32 a second one would cost at least half a gigabyte."""


@dataclass(frozen=True)
class ReductionOptions:
    """Dtypes and algorithm of the gradient reductions. A dtype is None where the gradient's own dtype is kept.

    The division by the number of ranks is split in three: ``copy_factor`` during the copy into the bucket, which is
    free; ``predivide_factor`` before the sum, which avoids overflow in 16 bits; the rest after the sum.

    Attributes:
        reduce_each_backward: reduce in every backward (stages 2 and 3), not only in the last one of a step.
        shard: keep this rank's shard of the mean (stages 1 to 3), not the whole.
        use_reduce_scatter: reduce-scatter, if ``shard``; otherwise all-reduce, and take a part of the result.
        accumulate_dtype: dtype of sums over several contributions.
        several_expected: a step has several backwards (accumulation > 1).
        communication_dtype: returns the dtype in which the bucket of a parameter is sent.
        copy_factor: 1 / number of ranks where that is exact, otherwise 1.
        predivide_factor: divisor of each bucket before the sum.
        copy_on_arrival: copy a large gradient into its bucket when it comes, so that its own memory is freed.
        overlap: launch during backward, and let reductions run while the next bucket fills.
        keep_buckets: reuse the memory of full buckets.
        sum_buckets: sum each bucket before it is sent: a sum that is not finite names the rank.
    """

    reduce_each_backward: bool
    shard: bool
    use_reduce_scatter: bool
    accumulate_dtype: torch.dtype | None
    several_expected: bool
    communication_dtype: Callable[[torch.nn.Parameter], torch.dtype | None]
    copy_factor: float
    predivide_factor: float
    copy_on_arrival: bool
    overlap: bool
    keep_buckets: bool
    sum_buckets: bool


class BucketDtypes:
    """Dtypes of one bucket's gradients.

    They follow from options that all ranks share. What this rank's bucket happens to hold (nothing, or several
    contributions) must not decide the dtype of a collective.

    Attributes:
        communication: dtype in which the config wants gradients to be sent; None for the dtype of ``local``.
        accumulate: dtype of ``local``, if it keeps a sum between backwards; None for the gradients' own dtype.
        reduce: dtype in which the bucket is sent: [0] one backward, [1] the sum of several.
        in_place: the bucket is reduced in the memory that keeps full gradients; [0] and [1] as in ``reduce``.
        mean: dtype of the mean over ranks: [0] of the first reduction, [1] after it was added to an earlier one.
    """

    def __init__(self, own: torch.dtype, communication: torch.dtype | None, options: ReductionOptions) -> None:
        """
        Args:
            own: dtype of the bucket's parameters.
            communication: see the class.
            options: of all buckets.
        """
        accumulate = options.accumulate_dtype
        if accumulate is not None and own not in HALF:  # never narrower than the gradients of fp32 parameters
            accumulate = torch.promote_types(accumulate, own)
        several = accumulate or own
        sums_locally = options.several_expected and not options.reduce_each_backward
        self.communication = communication
        self.accumulate = accumulate if sums_locally else None
        self.reduce = (communication or (several if sums_locally else own), communication or several)
        offloaded = several if sums_locally else own
        kept = sums_locally or not options.shard
        self.in_place = (kept and self.reduce[0] == offloaded, kept and self.reduce[1] == offloaded)
        self.mean = (several if options.several_expected else own, several)


@dataclass(eq=False)
class Backward:
    """The current backward, or the last one, as the buckets see it. Only the reducer writes it.

    Backwards of several engines may be open at once, for a loss through all of them. Then none of them launches before
    its end, because each rank would mix their launches in an order of its own.

    Attributes:
        factor: factor of gradients that are copied into a bucket.
        open: it has begun and not ended.
        reducing: it reduces every bucket; equal on all ranks.
        discards_gradients: its gradients are dropped when they come, because its loss has weight 0.
        launches_by_group: a bucket is launched when the backward of a parameter group ends (stage 3), and not when its
            own gradients have come.
        learning: the launch plan does not know yet which of these ends is late enough.
        launches_at_end: no bucket is launched before it has ended.
        launched: number of buckets that it has launched, in launch order.
        unreduced: backwards since ``local`` was last reduced; equal on all ranks.
        accumulated: backwards since the last step.
        early: buckets that were launched between backwards, before the one that reduces the others.
        ended_by_call: a call of the engine ends it, after autograd has ended.
        outer: backward of another engine that was open when this one began, and that a call ends; None without one.
        waiting: ends of such inner backwards, which come behind the end of this one.
    """

    factor: float
    open: bool = False
    reducing: bool = False
    discards_gradients: bool = False
    launches_by_group: bool = False
    learning: bool = False
    launches_at_end: bool = False
    launched: int = 0
    unreduced: int = 0
    accumulated: int = 0
    early: list[int] = field(default_factory=list)
    ended_by_call: bool = False
    outer: Backward | None = None
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def begin(
        self, factor: float, reducing: bool, discards_gradients: bool, launches_by_group: bool, learning: bool
    ) -> None:
        self.factor, self.open, self.reducing, self.discards_gradients = factor, True, reducing, discards_gradients
        self.launches_by_group, self.learning, self.launched = launches_by_group, learning, len(self.early)
        self.launches_at_end = False
        for other in _open:
            # Ends of groups come in one order on all ranks, also those of several engines.
            if not (launches_by_group and other.launches_by_group):
                self.launches_at_end = other.launches_at_end = True
            if other.ended_by_call:
                self.outer = other
        _open.add(self)
        self.unreduced += 1
        self.accumulated += 1

    def end(self) -> list[Callable[[], None]]:
        """End the backward. Return ``waiting``, which the caller runs when this one has launched everything."""
        self.open, self.outer = False, None
        _open.discard(self)
        waiting, self.waiting = self.waiting, []
        return waiting

    def on_launch(self, buckets: int) -> None:
        """Note that this many buckets have been launched."""
        self.launched = buckets

    def on_all_reduced(self, consumed: bool = False) -> None:
        """Note that no bucket has unreduced gradients. consumed: a step has also used them, or they were dropped."""
        self.unreduced = 0
        self.early.clear()
        if consumed:
            self.accumulated = 0


_open: weakref.WeakSet[Backward] = weakref.WeakSet()  # backwards that have begun and not ended, of all engines


class BucketMemory:
    """Allocator of full buckets, and their items of memory (memory_tags.py).

    A bucket that is sent next may get the communicator's own memory. This is shared memory between processes of a host,
    which is sent without a copy. Otherwise the memory of an earlier bucket is reused, on the CPU only. A large
    allocation there is new memory from the kernel. Touching it for the first time costs several times as much as a
    copy. CUDA's caching allocator has no such cost.

    Attributes:
        groups: groups of the reductions.
        options: of all buckets.
        current: the current backward.
        offloaded: storage of offloaded mean gradients; None if they stay on the device.
    """

    def __init__(
        self,
        groups: RankGroups,
        options: ReductionOptions,
        order: LaunchOrder,
        current: Backward,
        offloaded: OffloadedGradients | None,
    ) -> None:
        """
        Args:
            order: launch order of the buckets.
            groups, options, current, offloaded: see the class.
        """
        self.groups, self.current, self.options, self.offloaded = groups, current, options, offloaded
        self._order = order
        self._limit = 0  # most full buckets in `_free`
        self._free: list[torch.Tensor] = []

    def set_limit(self, buckets: int) -> None:
        """Keep at most this many full buckets for reuse, and drop those that are kept now."""
        self._limit, self._free = buckets if self.options.keep_buckets else 0, []

    def is_launched_soon(self, bucket: BucketLayout, launching: bool) -> bool:
        """Return True if few buckets are launched before this one, so that few are kept like it.

        Args:
            bucket: the bucket.
            launching: it is filled to be launched. One that is in flight alone waits for the one before it all the
                same, when it has been filled.
        """
        current = self.current
        if launching or current.launches_by_group or not (current.reducing and current.open):
            return launching and not (current.launches_by_group and bucket.numel >= ALONE_NUMEL)
        return self._order.positions[bucket.index] - current.launched <= IN_FLIGHT

    def allocate(
        self, bucket: BucketLayout, dtype: torch.dtype, device: torch.device, sendable: bool, launching: bool
    ) -> tuple[torch.Tensor, bool]:
        """Allocate a full bucket.

        Args:
            bucket: the bucket.
            dtype: dtype of the memory.
            device: device of the memory.
            sendable: it is sent in this dtype.
            launching: it is launched as soon as it is filled.

        Returns:
            Uninitialised memory [numel].
            True if it is the communicator's own.
        """
        options, current = self.options, self.current
        # The communicator's memory belongs to one position in the sequence of its collectives. Outside of a backward
        # that reduces, another collective may be launched before this bucket.
        in_backward = current.reducing and (current.open or launching)
        if sendable and in_backward and options.shard and options.use_reduce_scatter:
            # The position is known in a backward: it launches every bucket before this one in launch order, and nothing
            # else. At stage 3 the next bucket is known only when it is launched.
            if not current.launches_by_group or launching:
                ahead = 0 if current.launches_by_group else self._order.positions[bucket.index] - current.launched
                staged = self.groups.shard.staging(bucket.numel, dtype, ahead)
                if staged is not None:
                    return staged, True
        for index, tensor in enumerate(self._free):
            if tensor.numel() == bucket.numel and tensor.dtype == dtype:
                return tag_memory(self._free.pop(index), self.item()), False
        return tag_memory(torch.empty(bucket.numel, dtype=dtype, device=device), self.item()), False

    def item(self) -> str:
        """Return the item of ``local``: BUCKETS if it is only in transit to a reduction, otherwise GRADIENTS."""
        in_transit = self.options.shard and self.current.reducing and self.current.unreduced <= 1
        return BUCKETS if in_transit else GRADIENTS

    def release(self, bucket: torch.Tensor) -> None:
        """Keep the memory of a full bucket for reuse."""
        if self._limit:
            self._free.append(tag_memory(bucket, BUCKETS if self.options.shard else GRADIENTS))
            del self._free[: -self._limit]

    def clear(self) -> None:
        """Free the memory that is not in use."""
        self._free.clear()

    def unused(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the memory that is kept for reuse, with its items."""
        for bucket in self._free:
            yield (BUCKETS if self.options.shard else GRADIENTS), bucket
