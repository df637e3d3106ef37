"""Launch order of the buckets' reductions: one order on all ranks, which follows the gradients once it is known."""

from __future__ import annotations

from collections.abc import Sequence


class LaunchOrder:
    """The order in which a backward launches the buckets.

    The first one that reduces takes the order of the index. Where :meth:`learn` is called at its end, the order is from
    then on that in which rank 0's gradients have come in it.

    Attributes:
        buckets: their indices in this order.
        positions: of each bucket in ``buckets``.
        learning: another order is to be taken over at the end of a backward.
    """

    def __init__(self) -> None:
        self.buckets: list[int] = []
        self.positions: list[int] = []
        self.learning = False
        self._completed: dict[int, None] = {}  # buckets in the order in which their last gradients have come in it

    def set_buckets(self, count: int, learns: bool) -> None:
        """Have ``count`` buckets, those there are first. learns: the order of their gradients is to be learned."""
        self._set_order([*self.buckets, *range(len(self.buckets), count)])
        self.learning = learns and count > 1
        self._completed.clear()

    def _set_order(self, buckets: list[int]) -> None:
        self.buckets = buckets
        self.positions = sorted(range(len(buckets)), key=buckets.__getitem__)

    def begin_backward(self) -> None:
        """Forget which buckets have been completed."""
        self._completed.clear()

    def mark_complete(self, bucket: int) -> None:
        """All gradients of a bucket have come; said again if another one comes after that."""
        self._completed.pop(bucket, None)
        self._completed[bucket] = None

    def completion(self) -> list[int]:
        """Return the position of each bucket in the order in which this backward has completed them. Buckets that it
        has not completed come last."""
        positions = {bucket: position for position, bucket in enumerate(self._completed)}
        return [positions.get(bucket, len(self.buckets)) for bucket in range(len(self.buckets))]

    def learn(self, completion: Sequence[int]) -> None:
        """Take over the order in which buckets were completed, the same on all ranks."""
        if self.learning:
            self._set_order(sorted(self.buckets, key=completion.__getitem__))

    def stop_learning(self) -> None:
        self.learning = False
