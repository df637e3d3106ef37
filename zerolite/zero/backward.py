"""The backward under way, as the buckets of one engine see it, beside those of other engines."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerolite.zero.bucket import Bucket
    from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator


@dataclass(eq=False)
class Backward:
    """The current backward, or the last one. Only the reducer writes it.

    Backwards of several engines may be open at once, for a loss through all of them. Then none of them launches before
    its end, because each rank would mix their launches in an order of its own.

    Attributes:
        factor: factor of gradients that are copied into a bucket.
        open: it has begun and not ended.
        reducing: it reduces every bucket; equal on all ranks.
        discards_gradients: its gradients are dropped when they come, because its loss has weight 0.
        launches_by_group: a bucket is launched when the backward of a parameter group ends (stage 3), and not when its
            own gradients have come.
        launches_at_end: no bucket is launched before it has ended.
        launched: number of buckets that it has launched, in launch order.
        unreduced: backwards since ``local`` was last reduced; equal on all ranks.
        accumulated: backwards since the last step.
        early: buckets that were launched between backwards, before the one that reduces the others.
        peers_may_wait: a rank may wait in it for a collective of the program, or for a gather of another engine at
            stage 3. So nothing in it waits for a reduction: a rank that lacks a parameter launches that at the end.
        ended_by_call: a call of the engine ends it, after autograd has ended.
        outer: backward of another engine that was open when this one began, and that a call ends; None without one.
        waiting: ends of such inner backwards, which come behind the end of this one.
    """

    factor: float
    open: bool = False
    reducing: bool = False
    discards_gradients: bool = False
    launches_by_group: bool = False
    launches_at_end: bool = False
    launched: int = 0
    unreduced: int = 0
    accumulated: int = 0
    early: list[Bucket] = field(default_factory=list)
    peers_may_wait: bool = False
    ended_by_call: bool = False
    outer: Backward | None = None
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def begin(self, factor: float, reducing: bool, discards_gradients: bool, launches_by_group: bool) -> None:
        self.factor, self.open, self.reducing, self.discards_gradients = factor, True, reducing, discards_gradients
        self.launches_by_group, self.launched = launches_by_group, len(self.early)
        self.launches_at_end = self.peers_may_wait = False
        for other in _open:
            # Ends of groups come in one order on all ranks, also those of several engines.
            if not (launches_by_group and other.launches_by_group):
                self.launches_at_end = other.launches_at_end = True
            if other.ended_by_call:
                self.outer = other
        _open.add(self)
        self.unreduced += 1
        self.accumulated += 1

    def expect_waiting_peers(self, launches_at_once: bool) -> None:
        """Set ``peers_may_wait``. launches_at_once: a launch itself waits for no other rank."""
        self.peers_may_wait = True
        self.launches_at_end |= not launches_at_once

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

coordinators: weakref.WeakSet[PartitionedParameterCoordinator] = weakref.WeakSet()
"""Coordinators of all engines at stage 3. A backward through a graph of theirs gathers, on all ranks together."""
