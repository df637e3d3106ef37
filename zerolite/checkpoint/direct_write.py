"""Direct I/O for large files past the page cache: as fast as the disk, and nothing is evicted from memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

BUFFER_BYTES = 8 << 20
_BLOCK = 4096  # O_DIRECT writes multiples of it, from memory that begins at one
_COPIED_BY_PYTHON = 1 << 16  # smaller parts are, with the interpreter's lock held


def write_directly(descriptor: int, batches: Iterable[Sequence[memoryview]], before_write: Callable[[], None]) -> None:
    """Write ``batches`` to the empty file ``descriptor``, in their order: what comes next is copied into one buffer
    while a thread writes the other. ``before_write`` is called in that thread before each write. A file system without
    direct access is written to in the ordinary way."""
    _set_direct(descriptor, True)
    writer = _Writer(descriptor, before_write)
    total = 0
    try:
        for batch in batches:
            for view in batch:
                total += len(view)
                writer.add(view)
    finally:
        writer.finish()
    writer.check()
    os.ftruncate(descriptor, total)  # the last write was padded


def _set_direct(descriptor: int, on: bool) -> None:
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with contextlib.suppress(OSError):  # EINVAL where there is no such thing
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct if on else flags & ~direct)


class _Writer:
    def __init__(self, descriptor: int, before_write: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._before_write = before_write
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[mmap.mmap, int] | None] = queue.SimpleQueue()
        for _ in range(2):
            self._free.put(mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._filling: mmap.mmap | None = None
        self._filled = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="zerolite-write")
        self._thread.start()

    def add(self, view: memoryview) -> None:
        """Copy the next bytes. Raises what has gone wrong with those before."""
        while len(view):
            if self._filling is None:
                self._filling, self._filled = self._free.get(), 0
                self.check()
            numel = min(len(view), BUFFER_BYTES - self._filled)
            _copy(self._filling, self._filled, view[:numel])
            self._filled += numel
            view = view[numel:]
            if self._filled == BUFFER_BYTES:
                self._send()

    def _send(self) -> None:
        if self._filling is not None and self._filled:
            self._full.put((self._filling, self._filled))
        self._filling = None

    def finish(self) -> None:
        """Write what is in hand, and end the thread."""
        self._send()
        self._full.put(None)
        self._thread.join()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._full.get()) is not None:
            buffer, numel = item
            try:
                if self._error is None:
                    self._write(buffer, numel)
            except BaseException as error:  # raised by check(), in the thread that writes the file
                self._error = error
            self._free.put(buffer)

    def _write(self, buffer: mmap.mmap, numel: int) -> None:
        self._before_write()
        padded = -(-numel // _BLOCK) * _BLOCK
        buffer[numel:padded] = bytes(padded - numel)
        view = memoryview(buffer)
        done = 0
        while done < padded:
            try:
                done += os.write(self._descriptor, view[done:padded])
            except OSError as error:
                if error.errno != errno.EINVAL or not fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                    raise
                _set_direct(self._descriptor, False)  # it was taken, and is not served


def _copy(buffer: mmap.mmap, start: int, view: memoryview) -> None:
    if len(view) < _COPIED_BY_PYTHON or view.readonly:
        buffer[start : start + len(view)] = view
        return
    target = ctypes.addressof(ctypes.c_char.from_buffer(buffer, start))
    ctypes.memmove(target, ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
