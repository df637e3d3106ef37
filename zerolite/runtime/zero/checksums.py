"""Checksums of what was written to parts of a file, for comparison when it is read again."""

from __future__ import annotations

import ctypes
import errno
import zlib
from bisect import bisect_left, bisect_right
from typing import NamedTuple

Bytes = ctypes.Array[ctypes.c_ubyte]


class Part(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file, and their CRC-32."""

    offset: int
    nbytes: int
    crc: int


class Checksums:
    """Of one file, for one thread at a time."""

    def __init__(self) -> None:
        self._parts: list[Part] = []  # by offset; no two overlap

    def record(self, offset: int, content: Bytes) -> None:
        """``content`` is written at ``offset``."""
        self.forget(offset, len(content))
        part = Part(offset, len(content), zlib.crc32(content))
        self._parts.insert(bisect_left(self._parts, part), part)

    def within(self, offset: int, nbytes: int) -> list[Part]:
        """The parts that were written by themselves and lie in a range of the file."""
        first = bisect_left(self._parts, (offset,))
        last = bisect_left(self._parts, (offset + nbytes,))
        return [part for part in self._parts[first:last] if part.offset + part.nbytes <= offset + nbytes]

    def forget(self, offset: int, nbytes: int) -> None:
        """A range of the file has other content."""
        first = bisect_right(self._parts, (offset,))
        if first and self._parts[first - 1].offset + self._parts[first - 1].nbytes > offset:
            first -= 1
        last = bisect_left(self._parts, (offset + nbytes,))
        del self._parts[first:last]

    def forget_all(self) -> None:
        self._parts.clear()


def compare(expected: list[Part], offset: int, content: Bytes, file: str) -> None:
    """Raise OSError if ``content``, read at ``offset``, is not what was written to these parts of it."""
    view = memoryview(content)
    for part in expected:
        start = part.offset - offset
        found = zlib.crc32(view[start : start + part.nbytes])
        if found != part.crc:
            raise OSError(
                errno.EIO,
                f"{part.nbytes} bytes at byte {part.offset} of {file} are not those that were written there: their "
                f"CRC-32 is {found:08x}, expected {part.crc:08x}. The disk or the memory of this host may be failing",
            )
