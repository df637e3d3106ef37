"""Checksums of what was written to parts of a file, for comparison when it is read again."""

from __future__ import annotations

import ctypes
import errno
import zlib
from typing import NamedTuple

Bytes = ctypes.Array[ctypes.c_ubyte]


class Part(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file, and their CRC-32."""

    offset: int
    nbytes: int
    crc: int


PIECE = 1 << 16
"""Bytes: what is written is cut at multiples of it in the file, so that reads of other ranges find most of it."""


class Checksums:
    """Of one file, for one thread at a time."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Part]] = {}  # by piece of the file; no two overlap, none crosses a piece's end

    def record(self, offset: int, content: Bytes) -> None:
        """``content`` is written at ``offset``."""
        self.forget(offset, len(content))
        view, position = memoryview(content), offset
        while position < offset + len(content):
            end = min((position // PIECE + 1) * PIECE, offset + len(content))
            crc = zlib.crc32(view[position - offset : end - offset])
            self._parts.setdefault(position // PIECE, []).append(Part(position, end - position, crc))
            position = end

    def within(self, offset: int, nbytes: int) -> list[Part]:
        """The parts that lie wholly in a range of the file. What it only touches at its ends is not among them."""
        return [
            part
            for piece in _pieces(offset, nbytes)
            for part in self._parts.get(piece, ())
            if offset <= part.offset and part.offset + part.nbytes <= offset + nbytes
        ]

    def forget(self, offset: int, nbytes: int) -> None:
        """A range of the file has other content."""
        for piece in _pieces(offset, nbytes):
            parts = self._parts.pop(piece, [])
            kept = [p for p in parts if p.offset + p.nbytes <= offset or offset + nbytes <= p.offset]
            if kept:
                self._parts[piece] = kept

    def forget_all(self) -> None:
        self._parts.clear()


def _pieces(offset: int, nbytes: int) -> range:
    """The numbers of the pieces that a range touches."""
    return range(offset // PIECE, -(-(offset + nbytes) // PIECE) if nbytes else offset // PIECE)


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
