"""Options and dtypes of gradients on their way to the mean over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zerolite.utils.dtypes import HALF

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
        own: dtype of the bucket's parameters.
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
            own, communication: see the class.
            options: of all buckets.
        """
        accumulate = options.accumulate_dtype
        if accumulate is not None and own not in HALF:  # never narrower than the gradients of fp32 parameters
            accumulate = torch.promote_types(accumulate, own)
        several = accumulate or own
        sums_locally = options.several_expected and not options.reduce_each_backward
        self.own, self.communication = own, communication
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
