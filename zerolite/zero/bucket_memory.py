"""Reduction options, dtypes and memory of gradient buckets, and the backward under way as they see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from zerolite.comm import Communicator
from zerolite.offload.offloaded_gradients import OffloadedGradients
from zerolite.utils.dtypes import HALF
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, tag_memory
from zerolite.zero.launch_order import LaunchOrder
from zerolite.zero.layout import Bucket

IN_FLIGHT = 2
"""Reductions that may be under way at once where the buckets that travel are memory that would otherwise be free."""
ALONE_NUMEL = 1 << 27
"""Elements from which such a bucket travels alone: a second one would cost half a gigabyte in fp32, and more."""


@dataclass(frozen=True)
class ReductionOptions:
    """Dtypes and algorithm of the gradient reductions. Dtypes are None where the gradient's own dtype is kept.

    Attributes:
        accumulate_dtype: of sums over several contributions.
        several_expected: whether there will be several (accumulation > 1).
        communication_dtype: of a parameter: what its bucket is sent in.
        copy_factor, predivide_factor: the division by world_size is split in three exact products: the first while a
            gradient is moved into its bucket (free; only used where it is a power of two), the second before the sum,
            the rest after it.
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
    overlap: bool  # launch during backward, and let reductions run while the next bucket fills
    keep_buckets: bool  # use full buckets again
    sum_buckets: bool  # sum each bucket before it is sent: a sum that is not finite names the rank


class BucketDtypes:
    """Dtypes of one bucket's gradients. They follow from what all ranks know: what this rank's bucket happens to hold
    (nothing, or several contributions) must not decide what is sent.

    Attributes:
        communication: what the config wants to travel, None for the dtype of the sum.
        accumulate: of a sum that rests here between backwards, None for the gradients' own.
        reduce: what travels, by whether several backwards are in it.
        in_place: whether the reduction takes place in the memory in which gradients rest whole, by the same.
        mean: of the mean over ranks, by whether it is added to one that is there.
    """

    def __init__(self, own: torch.dtype, communication: torch.dtype | None, options: ReductionOptions) -> None:
        """own: of the bucket's parameters."""
        accumulate = options.accumulate_dtype
        if accumulate is not None and own not in HALF:  # no narrower than fp32 parameters are
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


@dataclass
class Backward:
    """The backward under way, or the last one, as buckets need to know it. Written by the reducer, with these methods.

    Attributes:
        factor: by which gradients are multiplied when they are moved into a bucket.
        open: it has begun and not ended.
        reducing: it reduces every bucket.
        discards_gradients: what comes in it counts as nothing.
        launches_by_group: buckets are launched when the backward of a parameter group ends, and not in their order.
        learning: it is still to be learned at which of these ends.
        launched: buckets that it has launched, in their order, so far.
        unreduced: backwards since this rank's sums were last reduced; equal on all ranks.
        accumulated: backwards since the last step.
    """

    factor: float
    open: bool = False
    reducing: bool = False
    discards_gradients: bool = False
    launches_by_group: bool = False
    learning: bool = False
    launched: int = 0
    unreduced: int = 0
    accumulated: int = 0

    def begin(
        self, factor: float, reducing: bool, discards_gradients: bool, launches_by_group: bool, learning: bool
    ) -> None:
        self.factor, self.open, self.reducing, self.discards_gradients = factor, True, reducing, discards_gradients
        self.launches_by_group, self.learning, self.launched = launches_by_group, learning, 0
        self.unreduced += 1
        self.accumulated += 1

    def end(self) -> None:
        self.open = False

    def on_launch(self, buckets: int) -> None:
        """So many buckets have been launched."""
        self.launched = buckets

    def on_all_reduced(self, consumed: bool = False) -> None:
        """This rank's sums have been reduced. consumed: and used by a step, or dropped."""
        self.unreduced = 0
        if consumed:
            self.accumulated = 0


class BucketMemory:
    """Memory of full buckets: the communicator's own for a bucket that travels next, else memory that is used again,
    or new; and which items of memory (memory_tags.py) it belongs to.

    Memory is used again on the CPU only: a large allocation there is new memory from the kernel every time, and
    touching it for the first time costs several times a copy. CUDA's caching allocator has no such cost.
    """

    def __init__(
        self,
        comm: Communicator,
        options: ReductionOptions,
        order: LaunchOrder,
        current: Backward,
        offloaded: OffloadedGradients | None,
    ) -> None:
        """offloaded: where mean gradients rest, None where that is the device."""
        self.comm, self.current, self.options, self.offloaded = comm, current, options, offloaded
        self._order = order
        self._limit = 0  # full buckets that are kept to be used again
        self._free: list[torch.Tensor] = []

    def set_limit(self, buckets: int) -> None:
        """Keep so many full buckets at most to be used again."""
        self._limit, self._free = buckets if self.options.keep_buckets else 0, []

    def allocate(
        self, bucket: Bucket, dtype: torch.dtype, device: torch.device, sendable: bool, launching: bool
    ) -> tuple[torch.Tensor, bool]:
        """Return an uninitialised full bucket, and whether it is the communicator's, which travels without a copy.

        Args:
            sendable: it may be sent in this dtype.
            launching: it is launched as soon as it is filled.
        """
        options, current = self.options, self.current
        # The communicator's memory belongs to one place in the order of collectives. Outside of a backward that
        # reduces, another collective may be launched before this bucket.
        in_backward = current.reducing and (current.open or launching)
        if sendable and in_backward and options.shard and options.use_reduce_scatter:
            # Its place in the order of collectives is known: this backward launches every bucket before it, and nothing
            # else. By group what is launched next is known only when it is.
            if not current.launches_by_group or launching:
                ahead = 0 if current.launches_by_group else self._order.positions[bucket.index] - current.launched
                staged = self.comm.staging(bucket.numel, dtype, ahead)
                if staged is not None:
                    return staged, True
        for index, tensor in enumerate(self._free):
            if tensor.numel() == bucket.numel and tensor.dtype == dtype:
                return tag_memory(self._free.pop(index), self.item()), False
        return tag_memory(torch.empty(bucket.numel, dtype=dtype, device=device), self.item()), False

    def item(self) -> str:
        """Item of this rank's sums: gradients where they rest whole, and buckets on their way elsewhere."""
        in_transit = self.options.shard and self.current.reducing and self.current.unreduced <= 1
        return BUCKETS if in_transit else GRADIENTS

    def give_back(self, bucket: torch.Tensor) -> None:
        """Take memory that may be used again."""
        if self._limit:
            self._free.append(tag_memory(bucket, BUCKETS if self.options.shard else GRADIENTS))
            del self._free[: -self._limit]

    def clear(self) -> None:
        """Let go of what is not in use."""
        self._free.clear()

    def unused(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Memory that waits to be used again, with its items."""
        for bucket in self._free:
            yield (BUCKETS if self.options.shard else GRADIENTS), bucket
