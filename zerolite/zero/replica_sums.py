"""Sums over replicas once a step, at stages 2 and 3, where every backward reduces.

    a backward that does not close a step    reduce-scatter over ``shard``: ``reduced`` is a sum of this set alone
    one that closes it                       reduce-scatter over ``shard``, plus that sum, all-reduce over ``replicate``
    a read before that                       all-reduce over ``replicate``; later backwards take both hops

So gradients cross the wire between the sets once a step, and not with every micro-batch. Whether a backward closes is
predicted from calls that all ranks count alike. A step whose last backward was not predicted completes the sums itself.

Hierarchical shards do without: there what waits would have the length of the set's part, and ``reduced`` has that of
this rank's stretch of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zerolite.comm import Pending, collective
from zerolite.zero.accumulation import GradAccumulation
from zerolite.zero.groups import RankGroups, exact_dtype, reduce_in_set, reduce_in_two_hops
from zerolite.zero.observers import StepObserver

if TYPE_CHECKING:
    from zerolite.zero.buffer import ParameterBuffer


class ReplicaSums(StepObserver):
    """The sums of an engine's buckets. It takes the place of ``RankGroups.reduce_scatter``."""

    def __init__(self, groups: RankGroups, buffer: ParameterBuffer, accumulation: GradAccumulation) -> None:
        self._groups, self._buffer, self._accumulation = groups, buffer, accumulation
        self._two_hops, self._waits = groups.reduce_scatter, False  # True in a backward that does not close its step
        self._partial: dict[int, float] = {}  # divisors of the buckets that are sums of this set alone, by their keys
        groups.reduce_scatter, groups.partial = self.reduce_scatter, self._partial

    def before_backward(self) -> None:
        self._waits = not self._accumulation.next_backward_closes()

    def on_backward_end(self) -> None:
        self._waits = False

    def on_gradients_dropped(self) -> None:
        self._waits = False
        self._partial.clear()

    @collective
    def reduce_scatter(self, full: torch.Tensor, tag: str, divisor: float, dtype: torch.dtype, key: int) -> Pending:
        """Sum a bucket over ``shard``, or with what has waited over both groups; ``wait()`` returns what is added to
        its ``reduced``."""
        bucket, shard = self._buffer.buckets[key - 1], self._groups.shard
        if self._waits and (key in self._partial or bucket.reduced is None):
            self._partial[key] = divisor
            return reduce_in_set(shard, full, tag, divisor, key)
        if key not in self._partial:
            return self._two_hops(full, tag, divisor, dtype, key)
        del self._partial[key]
        earlier, second = bucket.fetch(), self._groups.second_hop
        bucket.release()
        assert second is not None
        return reduce_in_two_hops(shard, second, full, tag, divisor, dtype, key, earlier)

    @torch.no_grad()
    def on_reduced(self) -> None:
        """Complete the sums that no backward has completed."""
        for key in sorted(self._partial):
            bucket, divisor, second = self._buffer.buckets[key - 1], self._partial[key], self._groups.second_hop
            assert second is not None
            part = bucket.fetch()
            total = second(part.to(exact_dtype(part.dtype)).mul_(divisor), "gradients", divisor=divisor, key=key).wait()
            bucket.store(total.to(part.dtype))
        self._partial.clear()
