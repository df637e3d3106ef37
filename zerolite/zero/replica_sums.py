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
from zerolite.zero.groups import RankGroups, exact_dtype, reduce_in_set
from zerolite.zero.observers import StepObserver

if TYPE_CHECKING:
    from zerolite.zero.buffer import ParameterBuffer


class ReplicaSums(StepObserver):
    """The sums of an engine's buckets. It takes the place of ``RankGroups.reduce_scatter``."""

    def __init__(self, groups: RankGroups, buffer: ParameterBuffer, accumulation: GradAccumulation) -> None:
        assert groups.two_hops is not None
        self._shard, self._two_hops = groups.shard, groups.two_hops
        self._buffer, self._accumulation = buffer, accumulation
        self._waits = False  # True in a backward that does not close its step
        self._partial: set[int] = set()  # keys of the buckets that are sums of this set alone
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
        bucket = self._buffer.buckets[key - 1]
        if self._waits and (key in self._partial or bucket.reduced is None):
            self._partial.add(key)
            return reduce_in_set(self._shard, full, tag, divisor, key)
        if key not in self._partial:
            return self._two_hops.reduce_scatter(full, tag, divisor, dtype, key)
        pending = self._two_hops.reduce_scatter(full, tag, divisor, dtype, key, bucket.fetch())
        self._partial.remove(key)  # not before: a launch that raises is made again
        bucket.release()
        return pending

    @torch.no_grad()
    def on_reduced(self) -> None:
        """Complete the sums that no backward has completed."""
        for key in sorted(self._partial):
            bucket = self._buffer.buckets[key - 1]
            part = bucket.fetch()
            bucket.replace_mean(self._two_hops.second(part.to(exact_dtype(part.dtype)), "gradients", key=key))
            self._partial.remove(key)
