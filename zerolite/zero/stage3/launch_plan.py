"""Launch points of stage 3's gradient reductions: the ends of groups' backwards. Standard library only.

A rank must not launch a bucket as soon as *its own gradients* are there. Where ranks use different parameters, they
would launch it between different gathers. Then rank 0 could wait for a reduction that rank 1 launches only after a
gather, and rank 1 for that gather. So buckets are launched at the ends of groups' backwards, which come in the same
order on all ranks.

- At first a bucket is launched when all of its groups have ended once.
- A gradient that comes later (of a module that is used several times) is reduced again at the end of the backward. The
  ranks agree on the late buckets with one small collective.
- A backward that follows a plan of the fetch schedule teaches which end is late enough. This is never before the last
  end of the bucket's own groups, because another step may use more of their parameters. From then on nothing is late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

End = tuple[int, int]  # a group, and n: the n-th time it finishes its backward


class LaunchPlan:
    """Order in which buckets are reduced.

    Args:
        groups: for each bucket the parameter groups of its parameters.
        progress: returns the serial number of the fetch plan in use (0: none), and True if its end is reached. Equal on
            all ranks.

    Attributes:
        last_gradients: for each bucket the number of group ends before its last gradient in this backward; -1 without
            a gradient.
    """

    def __init__(
        self,
        groups: Sequence[Collection[int]],
        progress: Callable[[], tuple[int, bool]],
    ) -> None:
        self._progress = progress
        self._plan_done = False  # the last group end was the plan's last event
        # The fetch plan of this backward. It is read at each event, because the plan ends before the backward does.
        self._plan_serial = 0
        self._groups = groups
        self._buckets_of_group: dict[int, list[int]] = {}  # used where nothing is learned
        for bucket, of_bucket in enumerate(groups):
            for group in of_bucket:
                self._buckets_of_group.setdefault(group, []).append(bucket)
        self._group_counts = [len(of_bucket) for of_bucket in groups]
        self._missing_groups: list[int] = []  # number of groups that each bucket waits for in this backward
        self._learned: dict[int, dict[End, list[int]]] = {}  # by serial number of the fetch plan
        self._launches: dict[End, list[int]] | None = None  # None: nothing is learned
        self._group_ends: list[End] = []  # of this backward
        self._end_counts: dict[int, int] = {}
        self.last_gradients = [-1] * len(groups)

    def begin_backward(self) -> None:
        """Begin a backward, before its first gradient."""
        self._plan_serial, self._plan_done = self._progress()[0], False
        self._launches = self._learned.get(self._plan_serial)
        self._missing_groups = list(self._group_counts)
        self._group_ends, self._end_counts = [], {}
        self.last_gradients = [-1] * len(self.last_gradients)

    @property
    def is_learned(self) -> bool:
        """True if this backward follows a plan whose launches are known, so that no gradient can be late."""
        return self._launches is not None and self._launches is self._learned.get(self._plan_serial)

    def on_gradient(self, bucket: int) -> None:
        """Note a gradient of ``bucket``."""
        self.last_gradients[bucket] = len(self._group_ends)

    def on_group_end(self, group: int) -> Sequence[int]:
        """Note the end of a group's backward. Return the buckets to launch now. Called on all ranks, in the same
        order."""
        count = self._end_counts.get(group, 0) + 1
        self._end_counts[group] = count
        self._group_ends.append((group, count))
        self._plan_serial, self._plan_done = self._progress()
        if self._launches is not None:
            return self._launches.get((group, count), ())
        return self._buckets_completed_by(group) if count == 1 else ()

    def _buckets_completed_by(self, group: int) -> list[int]:
        """Return the buckets that have waited only for this group."""
        waiting = self._buckets_of_group.get(group, ())
        for bucket in waiting:
            self._missing_groups[bucket] -= 1
        return [bucket for bucket in waiting if not self._missing_groups[bucket]]

    def learn(self, last_gradients: Sequence[int]) -> None:
        """Learn when to launch each bucket in backwards that follow the same fetch plan.

        Args:
            last_gradients: the maximum over ranks of :attr:`last_gradients` in the backward that ends.
        """
        if not self._plan_serial or not self._plan_done:
            return  # further executions of the plan could bring later gradients
        launches: dict[End, list[int]] = {}
        last_ends = {group: index for index, (group, _) in enumerate(self._group_ends)}
        for bucket, last_gradient in enumerate(last_gradients):
            # Not before the last end of its groups, although its gradients came earlier. A frozen parameter, or an
            # expert that no rank has used, may get a gradient in another step. A group that this plan does not use may
            # be used at the end of a backward that departs from the plan there. Then the bucket waits for the end.
            ends = [last_ends.get(group, len(self._group_ends)) for group in self._groups[bucket]]
            last = max([last_gradient, *ends])
            if 0 <= last < len(self._group_ends):
                launches.setdefault(self._group_ends[last], []).append(bucket)
        self._learned[self._plan_serial] = launches
