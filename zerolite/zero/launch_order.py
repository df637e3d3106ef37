"""Launch order of the buckets' reductions: one order on all ranks, which follows rank 0's gradients once known.

Ranks that launch collectives in different orders exchange garbage or hang, so a bucket waits for those before it. If
the order is not roughly that of the gradients, every bucket waits for the end of backward and nothing overlaps.

Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence


class LaunchOrder:
    """Order in which a backward launches the buckets.

    The first backward that reduces uses the order of the index. :meth:`learn` at its end replaces this by the order in
    which rank 0's buckets were completed.

    Attributes:
        buckets: indices of the buckets in launch order.
        positions: position of each bucket in ``buckets``.
        learning: the order is replaced at the end of the next backward that reduces.
    """

    def __init__(self) -> None:
        self.buckets: list[int] = []
        self.positions: list[int] = []
        self.learning = False
        self._completed: dict[int, None] = {}  # an ordered set: buckets by their latest gradient

    def set_buckets(self, count: int, learns: bool) -> None:
        """Set the number of buckets; new ones come last.

        Args:
            count: number of buckets, no less than now.
            learns: learn the order of their gradients in the next backward that reduces.
        """
        self._set_order([*self.buckets, *range(len(self.buckets), count)])
        self.learning = learns and count > 1

    def _set_order(self, buckets: list[int]) -> None:
        self.buckets = buckets
        self.positions = sorted(range(len(buckets)), key=buckets.__getitem__)

    def begin_with(self, first: Sequence[int]) -> None:
        """Launch these buckets before all others, in this order, which is equal on all ranks."""
        if self.buckets[: len(first)] != list(first):
            self._set_order([*first, *(bucket for bucket in self.buckets if bucket not in first)])

    def begin_backward(self) -> None:
        """Begin a backward: no bucket is complete."""
        self._completed.clear()

    def mark_complete(self, bucket: int) -> None:
        """Note that all gradients of a bucket have come; called again if another one comes later."""
        self._completed.pop(bucket, None)
        self._completed[bucket] = None

    def completion(self) -> list[int]:
        """Return the position of each bucket in the order in which this backward has completed them. Buckets that it
        has not completed come last."""
        positions = {bucket: position for position, bucket in enumerate(self._completed)}
        return [positions.get(bucket, len(self.buckets)) for bucket in range(len(self.buckets))]

    def learn(self, completion: Sequence[int]) -> None:
        """Replace the order. completion: rank 0's :meth:`completion`, so that the order is equal on all ranks."""
        if self.learning:
            self._set_order(sorted(self.buckets, key=completion.__getitem__))

    def stop_learning(self) -> None:
        """Keep the order."""
        self.learning = False
