"""Reduction options of gradient buckets, sums between backwards, and the pool of bucket memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zerolite.utils.dtypes import HALF

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
        arrival_factor, predivide: the division by world_size is split in three exact products: the first while a
            gradient is moved into its bucket (free; only used where it is a power of two), the second before the sum,
            the rest after it.
    """

    reduce_each_pass: bool
    shard: bool
    use_reduce_scatter: bool
    accumulate_dtype: torch.dtype | None
    several_expected: bool
    communication_dtype: Callable[[torch.nn.Parameter], torch.dtype | None]
    arrival_factor: float
    predivide: float
    copy_on_arrival: bool
    overlap: bool  # launch during backward, and let reductions run while the next bucket fills
    keep_buckets: bool  # use full buckets again
    probes: bool  # look at what each rank sends, so that a gradient which is not finite can be traced to its rank


class BucketDtypes:
    """Dtypes of one bucket's gradients. They follow from what all ranks know: what this rank's bucket happens to hold
    (nothing, or several contributions) must not decide what is sent.

    Attributes:
        asked: what the config wants to travel, None for the dtype of the sum.
        summed: of a sum that rests here between backwards, None for the gradients' own.
        sent: what travels, by whether several backwards are in it.
        in_place: whether the reduction takes place in the memory in which gradients rest whole, by the same.
        mean: of the mean over ranks, by whether it is added to one that is there.
    """

    def __init__(self, own: torch.dtype, asked: torch.dtype | None, options: ReductionOptions) -> None:
        """own: of the bucket's parameters."""
        accumulate = options.accumulate_dtype
        if accumulate is not None and own not in HALF:  # no narrower than fp32 parameters are
            accumulate = torch.promote_types(accumulate, own)
        several = accumulate or own
        rests = options.several_expected and not options.reduce_each_pass
        self.asked = asked
        self.summed = accumulate if rests else None
        self.sent = (asked or (several if rests else own), asked or several)
        offloaded = several if rests else own
        kept = rests or not options.shard
        self.in_place = (kept and self.sent[0] == offloaded, kept and self.sent[1] == offloaded)
        self.mean = (several if options.several_expected else own, several)


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
        """Buckets that are not in use now."""
        return self._free

    def clear(self) -> None:
        self._free.clear()

    def give_back(self, tensor: torch.Tensor) -> None:
        if self._limit:
            self._free.append(tensor)
            del self._free[: -self._limit]
