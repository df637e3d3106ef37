"""CRC-32 of the blocks of a file, while it is written or read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from zerolite.checkpoint.manifest import BLOCK_BYTES, FileEntry


class BlockChecksums:
    """Of a file that is written from its beginning to its end: computed in a thread, beside the writing."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "zerolite-checksums")
        self._waiting: list[Future[None]] = []
        self._finished: list[int] = []
        self._current = 0
        self._filled = 0  # bytes of the current block
        self._bytes = 0

    def add(self, parts: Sequence[memoryview]) -> None:
        """The next bytes of the file; they must not change until :meth:`finish`, or :meth:`wait`."""
        self._waiting.append(self._thread.submit(self._add, parts))

    def _add(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            self._bytes += len(part)
            while len(part):
                room = BLOCK_BYTES - self._filled
                self._current = zlib.crc32(part[:room], self._current)
                self._filled += min(room, len(part))
                part = part[room:]
                if self._filled == BLOCK_BYTES:
                    self._close_block()

    def _close_block(self) -> None:
        self._finished.append(self._current)
        self._current = self._filled = 0

    def wait(self) -> None:
        """For all that was added."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.result()

    def finish(self) -> FileEntry:
        self.wait()
        self._thread.shutdown()
        if self._filled:
            self._close_block()
        return FileEntry(self._bytes, "".join(f"{value:08x}" for value in self._finished))


def entry_of(content: bytes) -> FileEntry:
    """Of a small file."""
    blocks = range(0, len(content), BLOCK_BYTES)
    return FileEntry(len(content), "".join(f"{zlib.crc32(content[i : i + BLOCK_BYTES]):08x}" for i in blocks))
