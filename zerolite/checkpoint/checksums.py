"""CRC-32 of each block of a file, computed while the file is written or read."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Sequence

from zerolite.checkpoint.manifest import BLOCK_BYTES, FileEntry


class BlockChecksums:
    """Checksums of the blocks of a file that is written from its beginning to its end: computed in a thread, beside the
    writing. (An executor's thread takes no work once the program ends, when a save in the background may still be going
    on.)"""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Sequence[memoryview] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="zerolite-checksums")
        self._finished: list[int] = []
        self._current = 0
        self._filled = 0  # bytes of the current block
        self._bytes = 0
        self._thread.start()

    def add(self, parts: Sequence[memoryview]) -> None:
        """The next bytes of the file; they must not change until :meth:`wait`, which follows each call."""
        self._work.put(parts)

    def wait(self) -> None:
        """Return the checksums of what was added."""
        self._done.get()

    def finish(self) -> FileEntry:
        """The last call."""
        self._work.put(None)
        self._thread.join()
        if self._filled:
            self._close_block()
        return FileEntry(self._bytes, "".join(f"{value:08x}" for value in self._finished))

    def _run(self) -> None:
        while (parts := self._work.get()) is not None:
            self._add(parts)
            self._done.put(None)

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


def entry_of(content: bytes) -> FileEntry:
    """Return the entry of a small file."""
    blocks = range(0, len(content), BLOCK_BYTES)
    return FileEntry(len(content), "".join(f"{zlib.crc32(content[i : i + BLOCK_BYTES]):08x}" for i in blocks))
