"""File of complete lines, appended to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_BLOCK = 1 << 16  # bytes


class AppendFile:
    """Lines go to the operating system at once, so a killed process loses none that :meth:`append` has returned from.

    A line that was cut off (a machine that went down, a full disk) is removed: when the file is opened, or when
    writing fails. Raises OSError if the file cannot be opened or written; later calls try again.
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
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._size + written)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        """May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _end_of_last_line(descriptor: int) -> int:
    """The size in bytes of a file without what follows its last newline."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _BLOCK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
