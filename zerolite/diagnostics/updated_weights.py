"""Detection of updates that make weights non-finite, by param group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import zerolite.ops  # noqa: F401  registers torch.ops.zerolite
from zerolite.diagnostics.consistency import UpdateNumbers
from zerolite.zero.pieces import Groups, Piece
from zerolite.zero.spans import Span

Sums = dict[torch.device, torch.Tensor]  # of the squares of masters by param group, float64, where the masters are
_Launch = tuple[tuple[int, ...], torch.Tensor]  # places of the masters of one dtype, and their segments


class UpdatedWeights:
    """Sums of the squares of this rank's masters by param group, before and after the last update. A sum is finite
    exactly where all of them are. They stay on the device and are added over ranks with the next step's statistics.

    What an update leaves is what the next one finds, so masters are read once in each update, and before the first.
    """

    def __init__(
        self, groups: Callable[[], Groups], pieces: Callable[[], Sequence[Sequence[Piece]]], most_groups: int
    ) -> None:
        """pieces: of each bucket. most_groups: param groups of any rank of the model now, which are as many on all
        ranks that share its statistics: stages of a pipeline may have other groups."""
        self._more = most_groups - len(groups())
        self._groups = groups
        self._pieces = pieces
        self._before: Sums = {}
        self._after: Sums = {}
        self._known = False  # whether masters are those that the last update has left
        self._count = 0  # param groups in the last update
        self._told = False
        self._announced: UpdateNumbers | None = None
        self.numbers: UpdateNumbers | None = None  # of the last update
        self._plans: dict[tuple[tuple[Span, ...], tuple[torch.dtype, ...]], list[_Launch]] = {}

    def replan(self) -> None:
        """Look at the layout anew: there are other buckets than before."""
        self._plans.clear()
        self._known = False

    def forget(self, update: bool) -> None:
        """Values have been written or loaded: what the next update finds is not what the last one has left. update:
        what that one has made does not matter any more, whether it has been told or not."""
        self._known = False
        if update or self._told:
            self._before, self._after = {}, {}

    def tell(self) -> None:
        """All ranks have been told what the last update has made; new values end it."""
        self._told = True

    # ---------------------------------------------------------------- the update

    def announce(self, numbers: UpdateNumbers) -> None:
        """Say what the coming update uses, if it comes to one."""
        self._announced = numbers

    def begin(self) -> None:
        """Look before the first call of an update."""
        self.numbers, self._told = self._announced, False
        count = self._more + len(self._groups())
        self._known = self._known and count == self._count
        self._before, self._after, self._count = self._after if self._known else {}, {}, count

    def found(self, spans: Sequence[Span], masters: Sequence[torch.Tensor]) -> None:
        """``masters``, of ``spans``, are about to be updated."""
        if not self._known:
            self._add(self._before, spans, masters)

    def left(self, spans: Sequence[Span], masters: Sequence[torch.Tensor]) -> None:
        """They have been updated."""
        self._add(self._after, spans, masters)

    def end(self) -> None:
        """Look after the last call of an update."""
        self._known = True

    @torch.no_grad()
    def _add(self, sums: Sums, spans: Sequence[Span], masters: Sequence[torch.Tensor]) -> None:
        for members, table in self._plan(tuple(spans), tuple(master.dtype for master in masters)):
            device = masters[members[0]].device
            if device not in sums:
                sums[device] = torch.zeros(self._count, dtype=torch.float64, device=device)
            torch.ops.zerolite.squares_(sums[device], [masters[index] for index in members], table)

    def _plan(self, spans: tuple[Span, ...], dtypes: tuple[torch.dtype, ...]) -> list[_Launch]:
        """One launch for the masters of each dtype."""
        plan = self._plans.get((spans, dtypes))
        if plan is None:
            plan = []
            for dtype in dict.fromkeys(dtypes):
                members = tuple(index for index, other in enumerate(dtypes) if other == dtype)
                segments = self._segments([spans[index] for index in members])
                if segments:
                    plan.append((members, torch.tensor(segments, dtype=torch.int64, device="cpu")))
            self._plans[spans, dtypes] = plan
        return plan

    def _segments(self, spans: Sequence[Span]) -> list[list[int]]:
        """[place in ``spans``, start, elements, param group]; neighbours of one group are one."""
        segments: list[list[int]] = []
        pieces = self._pieces()
        for place, (bucket, low, high, _) in enumerate(spans):
            for piece in pieces[bucket]:
                fragment = piece.fragment
                start = max(fragment.shard_start, low)
                numel = min(fragment.shard_start + fragment.numel, high) - start
                if numel <= 0:
                    continue
                last = segments[-1] if segments else None
                if last and (last[0], last[1] + last[2], last[3]) == (place, start - low, piece.group):
                    last[2] += numel
                else:
                    segments.append([place, start - low, numel, piece.group])
        return segments

    # ---------------------------------------------------------------- the outcome

    @property
    def size(self) -> int:
        """Values in the statistics; the same on all ranks, whatever each of them has updated."""
        return 2 * self._count

    def write(self, values: torch.Tensor) -> None:
        """Put this rank's sums into ``values`` [size], zeros."""
        for place, sums in enumerate((self._before, self._after)):
            for of_device in sums.values():
                values[place * self._count : (place + 1) * self._count] += of_device.to(values.device)

    def spoilt(self, values: torch.Tensor) -> list[int]:
        """The param groups whose weights were finite before the update and are not any more. values: those of
        :meth:`write`, added over ranks, on the host."""
        before, after = torch.isfinite(values).view(2, len(values) // 2)
        return [int(group) for group in torch.nonzero(before & ~after).flatten()]
