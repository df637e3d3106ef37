"""Checksums of blocks written to a file, verified when they are read again."""

from __future__ import annotations

import ctypes
import errno
import zlib
from array import array

Bytes = ctypes.Array[ctypes.c_ubyte]

BLOCK = 4096
"""Bytes. Direct I/O needs multiples: for addresses, for positions in a file and for lengths."""

_UNKNOWN = -1


def whole_blocks(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class Checksums:
    """Checksums of one file: a CRC-32 for each block, in eight bytes of memory. For one thread at a time.

    Whole blocks are written and read, so every block that is read was written by one write.
    """

    def __init__(self) -> None:
        self._sums = array("q")

    def record(self, offset: int, content: Bytes) -> None:
        """Record the checksums of ``content``, whole blocks that are written at ``offset``, where a block begins."""
        first, view = offset // BLOCK, memoryview(content)
        sums = array("q", (zlib.crc32(view[at : at + BLOCK]) for at in range(0, len(content), BLOCK)))
        self._grow(first + len(sums))
        self._sums[first : first + len(sums)] = sums

    def expected(self, offset: int, nbytes: int) -> array[int]:
        """Return the checksums of the blocks in a range of bytes, as :func:`compare` takes them."""
        first, end = offset // BLOCK, -(-(offset + nbytes) // BLOCK)
        self._grow(end)
        return self._sums[first:end]

    def _grow(self, blocks: int) -> None:
        self._sums.extend(array("q", [_UNKNOWN]) * max(0, blocks - len(self._sums)))


def compare(expected: array[int], offset: int, content: Bytes, file: str) -> None:
    """Raise OSError if ``content``, which was read from the file, is not what was written there.

    Args:
        expected: checksums from :meth:`Checksums.expected`.
        offset: position of ``content`` in the file, in bytes.
        content: whole blocks.
        file: name of the file, for the error.
    """
    view = memoryview(content)
    for number, crc in enumerate(expected):
        found = zlib.crc32(view[number * BLOCK : (number + 1) * BLOCK])
        if crc not in (_UNKNOWN, found):
            raise OSError(
                errno.EIO,
                f"{BLOCK} bytes at byte {offset + number * BLOCK} of {file} are not those that were written there: "
                f"their CRC-32 is {found:08x}, expected {crc:08x}. The disk or the memory of this host may be failing",
            )
