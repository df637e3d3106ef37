"""File of complete lines, appended to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_BLOCK = 1 << 16  # bytes


class AppendFile:
    """File that keeps every complete line, even if the process is killed.

    Lines are not buffered: when :meth:`append` returns, the operating system has them. A line that was cut off is
    removed: when the file is opened again after a crash of the machine, or at once if the disk is full.

    Raises:
        OSError: the file cannot be opened or written. A later :meth:`append` tries again.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._size = _end_of_last_line(self._descriptor)
            os.ftruncate(self._descriptor, self._size)
        except BaseException:
            self.close()
            raise

    @property
    def empty(self) -> bool:
        return self._size == 0

    def append(self, lines: str) -> None:
        """Write ``lines``, which end with a newline: all of them, or none if this raises."""
        data = lines.encode()
        written = 0
        try:
            # The system may write less than it is given, for example just before the disk is full.
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._size + written)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _end_of_last_line(descriptor: int) -> int:
    """Return the size in bytes of a file up to and including its last newline; 0 if it has none."""
    # Read blocks from the end: the file may be long, and the last line is short.
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _BLOCK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
