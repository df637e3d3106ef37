"""CRC-32 of each block of a file, computed while the file is written or read."""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence

from zerolite.checkpoint.direct_write import Worker
from zerolite.checkpoint.manifest import BLOCK_BYTES, FileEntry


class BlockChecksums:
    """Checksums of the blocks of a file that is written from begin to end, computed in a thread while it is written."""

    def __init__(self) -> None:
        self._worker = Worker("zerolite-checksums")
        self._finished: list[int] = []
        self._current = 0
        self._bytes = 0

    def of(self, batches: Iterable[Sequence[memoryview]]) -> Iterator[Sequence[memoryview]]:
        """Yield the batches. The checksums of a batch are ready before the next batch is yielded."""
        for batch in batches:
            done = threading.Event()
            self._worker.submit(functools.partial(self._add, batch, done))
            yield batch
            done.wait()

    def finish(self) -> FileEntry:
        """Return the entry of the file, when all its bytes have been passed."""
        self._worker.finish()
        if self._bytes % BLOCK_BYTES:
            self._finished.append(self._current)
        return FileEntry(self._bytes, "".join(f"{value:08x}" for value in self._finished))

    def _add(self, parts: Sequence[memoryview], done: threading.Event) -> None:
        for part in parts:
            while len(part):
                room = BLOCK_BYTES - self._bytes % BLOCK_BYTES
                self._current = zlib.crc32(part[:room], self._current)
                self._bytes += min(room, len(part))
                part = part[room:]
                if self._bytes % BLOCK_BYTES == 0:
                    self._finished.append(self._current)
                    self._current = 0
        done.set()


def entry_of(content: bytes) -> FileEntry:
    """Return the entry of a small file with this content."""
    blocks = range(0, len(content), BLOCK_BYTES)
    return FileEntry(len(content), "".join(f"{zlib.crc32(content[i : i + BLOCK_BYTES]):08x}" for i in blocks))
