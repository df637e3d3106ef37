"""Allocation of ranges in a file, without touching the file."""

from __future__ import annotations

from typing import NamedTuple


class _Gap(NamedTuple):
    offset: int
    nbytes: int
    clean: bool  # it reads as zeros


class Space:
    """A file that grows at its end, and whose parts are used again.

    Attributes:
        end: bytes of the file.
    """

    def __init__(self) -> None:
        self.end = 0
        self._gaps: list[_Gap] = []  # by offset; no two adjoin

    def take(self, nbytes: int) -> tuple[int, bool]:
        """Reserve ``nbytes``: return where they begin, and whether they read as zeros."""
        fitting = [gap for gap in self._gaps if gap.nbytes >= nbytes]
        if not fitting:
            self.end += nbytes
            return self.end - nbytes, True
        gap = min(fitting, key=lambda gap: gap.nbytes)
        self._gaps.remove(gap)
        if gap.nbytes > nbytes:
            self._gaps.append(_Gap(gap.offset + nbytes, gap.nbytes - nbytes, gap.clean))
            self._gaps.sort()
        return gap.offset, gap.clean

    def give_back(self, offset: int, nbytes: int, clean: bool) -> None:
        """A part is not used any more. clean: it reads as zeros."""
        merged: list[_Gap] = []
        for gap in sorted([*self._gaps, _Gap(offset, nbytes, clean)]):
            last = merged[-1] if merged else None
            if last is not None and last.offset + last.nbytes == gap.offset:
                merged[-1] = _Gap(last.offset, last.nbytes + gap.nbytes, last.clean and gap.clean)
            else:
                merged.append(gap)
        self._gaps = merged
        if merged and merged[-1].offset + merged[-1].nbytes == self.end:
            self.end = self._gaps.pop().offset
