"""Checksums of the blocks of a swap file, by which damage on the disk is noticed when a block is read."""

from __future__ import annotations

import ctypes
import errno
import zlib
from array import array

import torch

from zerolite.offload.placement import BLOCK

_UNKNOWN = -1  # checksum of a block that was not written

Bytes = ctypes.Array[ctypes.c_ubyte]


class BlockChecksums:
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
        """Return the checksums of the blocks in a range of bytes, as :func:`compare_blocks` takes them."""
        first, end = offset // BLOCK, -(-(offset + nbytes) // BLOCK)
        self._grow(end)
        return self._sums[first:end]

    def _grow(self, blocks: int) -> None:
        self._sums.extend(array("q", [_UNKNOWN]) * max(0, blocks - len(self._sums)))


def bytes_of(tensor: torch.Tensor, nbytes: int) -> Bytes:
    """Return the first bytes of a CPU tensor, without a copy. The tensor must outlive them."""
    return (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())


def compare_blocks(expected: array[int], offset: int, memory: torch.Tensor, nbytes: int, file: str) -> None:
    """Raise OSError if what was read into ``memory`` is not what was written to the file. A partial of this keeps the
    tensor alive.

    Args:
        expected: checksums from :meth:`BlockChecksums.expected`.
        offset: position in the file, in bytes.
        memory: tensor of whole blocks.
        nbytes: their bytes.
        file: name of the file, for the error.
    """
    view = memoryview(bytes_of(memory, nbytes))
    for number, crc in enumerate(expected):
        actual = zlib.crc32(view[number * BLOCK : (number + 1) * BLOCK])
        if crc not in (_UNKNOWN, actual):
            raise OSError(
                errno.EIO,
                f"{BLOCK} bytes at byte {offset + number * BLOCK} of {file} are not those that were written there: "
                f"their CRC-32 is {actual:08x}, expected {crc:08x}. The disk or the memory of this host may be failing",
            )
