"""Launch points of stage 3's gradient reductions: ends of groups' backwards, equal on all ranks.

Pure: standard library only.

A bucket must not be launched as soon as *its own gradients* are there. Where ranks use different parameters, they would
launch it between different gathers. Then rank 0 could wait for a reduction that rank 1 launches only after a gather,
and rank 1 for that gather. So buckets are launched at the ends of groups' backwards, which all ranks see alike.

- As long as nothing is known, that is the first end of each group that the bucket belongs to.
- A gradient that comes later (of a module used several times) is reduced once more at the end of the backward. The
  ranks agree on what is late with one small collective.
- A backward that follows a plan of the schedule teaches which end is late enough. It is never before the last end of
  the bucket's own groups, because another step may use more of their parameters. From then on nothing is late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

End = tuple[int, int]  # a group, and n: the n-th time it finishes its backward


class LaunchPlan:
    """Order in which buckets are reduced.

    Args:
        groups: for each bucket the parameter groups that it belongs to.
        progress: tells the number of the schedule's plan that the events follow, 0 if none, and whether they have
            reached its end; the same on all ranks.
    """

    def __init__(
        self,
        groups: Sequence[Collection[int]],
        progress: Callable[[], tuple[int, bool]],
    ) -> None:
        self._progress = progress
        self._done = False  # whether the last end was the plan's last event
        # The plan that the events of this backward follow; asked while they come, because it ends before the backward.
        self._number = 0
        self._groups = groups
        self._buckets: dict[int, list[int]] = {}  # that wait for a group, where nothing is learned
        for bucket, of_bucket in enumerate(groups):
            for group in of_bucket:
                self._buckets.setdefault(group, []).append(bucket)
        self._all_missing = [len(of_bucket) for of_bucket in groups]
        self._missing: list[int] = []  # groups that each bucket waits for in this backward
        self._learned: dict[int, dict[End, list[int]]] = {}  # by plan number
        self._launches: dict[End, list[int]] | None = None  # None: nothing is learned
        self._ends: list[End] = []  # of this backward
        self._counts: dict[int, int] = {}
        self.arrivals = [-1] * len(groups)  # ends before each bucket's last gradient in this backward; -1: no gradient

    def begin_backward(self) -> None:
        """Begin a backward, before its first gradient."""
        self._number, self._done = self._progress()[0], False
        self._launches = self._learned.get(self._number)
        self._missing = list(self._all_missing)
        self._ends, self._counts = [], {}
        self.arrivals = [-1] * len(self.arrivals)

    @property
    def is_learned(self) -> bool:
        """True if this backward follows a plan whose launches are known, so that no gradient can be late."""
        return self._launches is not None and self._launches is self._learned.get(self._number)

    def on_gradient(self, bucket: int) -> None:
        """A gradient of ``bucket`` has come."""
        self.arrivals[bucket] = len(self._ends)

    def on_group_end(self, group: int) -> Sequence[int]:
        """A group's backward has ended: the buckets to launch now. Called on all ranks, in the same order."""
        count = self._counts.get(group, 0) + 1
        self._counts[group] = count
        self._ends.append((group, count))
        self._number, self._done = self._progress()
        if self._launches is not None:
            return self._launches.get((group, count), ())
        return self._complete_with(group) if count == 1 else ()

    def _complete_with(self, group: int) -> list[int]:
        """Return the buckets that waited for this group alone."""
        waiting = self._buckets.get(group, ())
        for bucket in waiting:
            self._missing[bucket] -= 1
        return [bucket for bucket in waiting if not self._missing[bucket]]

    def learn(self, arrivals: Sequence[int]) -> None:
        """Record the largest ``arrivals`` that any rank has seen in the backward that ends. One that stopped on its way
        through a plan says nothing of it: the executions that are left may bring further gradients."""
        if not self._number or not self._done:
            return
        launches: dict[End, list[int]] = {}
        last_ends = {group: index for index, (group, _) in enumerate(self._ends)}
        for bucket, arrival in enumerate(arrivals):
            # Not before its groups, whatever has come: what is frozen now, or an expert that no rank has used, may get
            # a gradient one day. A group that is not used may be, at the end of a backward that departs from the plan
            # only there.
            ends = [last_ends.get(group, len(self._ends)) for group in self._groups[bucket]]
            last = max([arrival, *ends])
            if 0 <= last < len(self._ends):
                launches.setdefault(self._ends[last], []).append(bucket)
        self._learned[self._number] = launches
