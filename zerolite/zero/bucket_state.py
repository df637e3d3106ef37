"""Reduction options of gradient buckets, sums between backwards, and the pool of bucket memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zerolite.utils.dtypes import HALF
from zerolite.zero.layout import Bucket

IN_FLIGHT = 2
"""Reductions that may be under way at once where the buckets that travel are memory that would otherwise be free."""
ALONE_NUMEL = 1 << 27
"""Elements from which such a bucket travels alone: a second one would cost half a gigabyte in fp32, and more."""


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are summed. Dtypes are None where the gradient's own dtype is kept.

    accumulate_dtype: of sums over several contributions; several_expected: whether there will be several
    (accumulation > 1); communication_dtype(bucket): what travels. The division by world_size is split in three
    exact products: arrival_factor while a gradient is moved into its bucket (free; only used where it is a power of
    two), predivide before the sum, the rest after it.
    """

    reduce_each_pass: bool
    shard: bool
    use_reduce_scatter: bool
    accumulate_dtype: torch.dtype | None
    several_expected: bool
    communication_dtype: Callable[[Bucket], torch.dtype | None]
    arrival_factor: float
    predivide: float
    copy_on_arrival: bool
    overlap: bool  # launch during backward, and let reductions run while the next bucket fills
    keep_buckets: bool  # use full buckets again
    probes: bool  # look at what each rank sends, so that a gradient which is not finite can be traced to its rank

    def sum_dtype(self, own: torch.dtype) -> torch.dtype | None:
        """Of sums over several contributions to a bucket of parameters of dtype ``own``: as asked for, but no narrower
        than fp32 parameters are."""
        asked = self.accumulate_dtype
        return asked if asked is None or own in HALF else torch.promote_types(asked, own)

    def travelling_dtype(self, bucket: Bucket, own: torch.dtype, passes: int) -> torch.dtype:
        """The dtype in which a bucket that has summed ``passes`` backwards is sent. It follows from what all ranks
        know: what this rank's bucket happens to hold (nothing, or several contributions) must not decide it."""
        asked = self.communication_dtype(bucket)
        if asked is not None:
            return asked
        summed = (self.several_expected and not self.reduce_each_pass) or passes > 1
        return (self.sum_dtype(own) if summed else None) or own

    def travels_in_place(self, bucket: Bucket, own: torch.dtype, passes: int) -> bool:
        """Whether a bucket is reduced in the memory in which gradients rest whole between steps or backwards. Like
        :meth:`travelling_dtype` it follows from what all ranks know."""
        kept = self.several_expected and not self.reduce_each_pass
        resting = (self.sum_dtype(own) if kept else None) or own
        return (kept or not self.shard) and self.travelling_dtype(bucket, own, passes) == resting

    def reduced_dtype(self, own: torch.dtype, adds: bool) -> torch.dtype:
        """fp32 (or what was asked for) once several contributions are summed, the parameter's dtype as long as there is
        one. adds: a mean is there already."""
        return (self.sum_dtype(own) if self.several_expected or adds else None) or own


class BucketPool:
    """Full buckets to use again, at most ``limit``: for the CPU.

    A large allocation there is new memory from the kernel every time, and touching it for the first time costs
    several times a copy. CUDA's caching allocator has no such cost.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor [numel]."""
        for index, tensor in enumerate(self._free):
            if tensor.numel() == numel and tensor.dtype == dtype:
                return self._free.pop(index)
        return torch.empty(numel, dtype=dtype, device=device)

    def memory(self) -> Sequence[torch.Tensor]:
        """The buckets that nobody uses now."""
        return self._free

    def clear(self) -> None:
        self._free.clear()

    def give_back(self, tensor: torch.Tensor) -> None:
        if self._limit:
            self._free.append(tensor)
            del self._free[: -self._limit]
