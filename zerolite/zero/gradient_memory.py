"""Options, dtypes and memory of gradients on their way to the mean over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zerolite.utils.dtypes import HALF
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, tag_memory
from zerolite.zero.groups import RankGroups

if TYPE_CHECKING:
    from zerolite.zero.backward import Backward
    from zerolite.zero.local_sum import LocalSum
    from zerolite.zero.offload import GradientTransfers

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


class GradientDtypes:
    """Dtypes of one bucket's gradients.

    They follow from options that all ranks share. What this rank's bucket happens to hold (nothing, or several
    contributions) must not decide the dtype of a collective.

    Attributes:
        communication: dtype in which the config wants gradients to be sent; None for the dtype of ``local``.
        accumulate: dtype of ``local``, if it keeps a sum between backwards; None for the gradients' own dtype.
        multiple_backwards: the next launch sends the sum of more than one.
        sent: dtype in which the bucket is sent at its next launch.
        reduces_in_place: that launch runs in the memory that keeps full gradients anyway, so it needs no more.
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
        self._reduce = (communication or (several if sums_locally else own), communication or several)
        offloaded = several if sums_locally else own
        kept = sums_locally or not options.shard
        self._in_place = (kept and self._reduce[0] == offloaded, kept and self._reduce[1] == offloaded)
        self.mean = (several if options.several_expected else own, several)
        self.open(False)

    def open(self, multiple_backwards: bool) -> None:
        """Choose the dtype of the next launch. multiple_backwards: it sends the sum of more than one."""
        self.multiple_backwards = multiple_backwards
        self.sent, self.reduces_in_place = self._reduce[multiple_backwards], self._in_place[multiple_backwards]


class GradientMemory:
    """Allocator of full buckets for gradients, and their items of memory (memory_tags.py).

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
            widest: elements of the largest one.
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
        """Return uninitialised memory [numel] for a full bucket."""
        for index, tensor in enumerate(self._free):
            if tensor.numel() == numel and tensor.dtype == dtype:
                return tag_memory(self._free.pop(index), self.item())
        return tag_memory(torch.empty(numel, dtype=dtype, device=device), self.item())

    def item(self) -> str:
        """Return the item of ``local``: BUCKETS if it is only in transit to a reduction, otherwise GRADIENTS."""
        in_transit = self.options.shard and self.current.reducing and self.current.unreduced <= 1
        return BUCKETS if in_transit else GRADIENTS

    def release(self, full: torch.Tensor) -> None:
        """Keep the memory of a full bucket for reuse."""
        if self._limit:
            self._free.append(tag_memory(full, BUCKETS if self.options.shard else GRADIENTS))
            del self._free[: -self._limit]

    def clear(self) -> None:
        """Free the memory that is not in use."""
        self._free.clear()

    def unused(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the memory that is kept for reuse, with its items."""
        for full in self._free:
            yield (BUCKETS if self.options.shard else GRADIENTS), full
