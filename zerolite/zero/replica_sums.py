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

import torch

from zerolite.comm import Pending, collective
from zerolite.zero.accumulation import GradAccumulation
from zerolite.zero.bucket import Bucket
from zerolite.zero.groups import RankGroups, TwoHops, exact_dtype, reduce_in_set
from zerolite.zero.observers import StepObserver
from zerolite.zero.reducer import Reducer


class ReplicaSums(StepObserver):
    """The sums of an engine's buckets. It takes the place of ``RankGroups.reduce_scatter``."""

    def __init__(self, groups: RankGroups, reducer: Reducer, accumulation: GradAccumulation) -> None:
        self._reducer, self._accumulation = reducer, accumulation
        self._waits = False  # True in a backward that does not close its step
        self._partial: dict[int, float] = {}  # buckets that are sums of this set alone, by key: their divisors
        self._unsent: tuple[int, torch.Tensor] | None = None  # key and sum of a launch that has raised
        for each in (groups, groups.experts):
            if each is not None:
                each.reduce_scatter, each.partial = self.reduce_scatter, self._partial

    def before_backward(self) -> None:
        self._waits = not self._accumulation.next_backward_closes()
        self._unsent = None  # its bucket's sum goes on

    def on_backward_end(self) -> None:
        self._waits = False

    def on_gradients_dropped(self) -> None:
        self._waits, self._unsent = False, None
        self._partial.clear()

    @collective
    def reduce_scatter(self, full: torch.Tensor, tag: str, divisor: float, dtype: torch.dtype, key: int) -> Pending:
        """Sum a bucket over ``shard``, or with what has waited over both groups; ``wait()`` returns what is added to
        its ``reduced``."""
        bucket = self._reducer.buffer.buckets[key - 1]
        two_hops = _two_hops_of(bucket)
        if self._waits and (key in self._partial or bucket.reduced is None):
            self._partial[key] = divisor
            return reduce_in_set(bucket.groups.shard, full, tag, divisor, key)
        if key not in self._partial:
            return two_hops.reduce_scatter(full, tag, divisor, dtype, key)
        pending = two_hops.reduce_scatter(full, tag, divisor, dtype, key, bucket.fetch())
        del self._partial[key]  # not before: a launch that raises is made again
        bucket.release()
        return pending

    @torch.no_grad()
    def on_reduced(self) -> None:
        """Complete the sums that no backward has completed."""
        for key, divisor in sorted(self._partial.items()):
            bucket = self._reducer.buffer.buckets[key - 1]
            part = bucket.fetch()
            # Undivided, as in a backward: so is what error feedback keeps of it. A copy: a launch that raises is made
            # again, with the same tensor.
            if self._unsent is None or self._unsent[0] != key:
                self._unsent = key, part.to(exact_dtype(part.dtype)) * divisor
            pending = _two_hops_of(bucket).second(self._unsent[1], "gradients", divisor=divisor, key=key)
            self._unsent = None
            del self._partial[key]
            self._reducer.replace_mean(bucket, pending)


def _two_hops_of(bucket: Bucket) -> TwoHops:
    two_hops = bucket.groups.two_hops
    assert two_hops is not None, "there are replicas"
    return two_hops
