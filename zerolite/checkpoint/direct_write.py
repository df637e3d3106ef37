"""Direct I/O for large files, past the page cache: as fast as the disk, and it evicts nothing else from memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

BATCH_BYTES = 8 << 20
_BLOCK = 4096  # O_DIRECT needs lengths and addresses that are multiples of this
_COPIED_BY_PYTHON = 1 << 16  # bytes: smaller parts are copied by Python, larger ones by memmove without the GIL


class Worker:
    """One thread that runs tasks in order.

    An executor of concurrent.futures accepts no tasks once the interpreter is shutting down, when a save in the
    background may still be running.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def submit(self, task: Callable[[], object]) -> None:
        """Run ``task`` after those before. It must not raise."""
        self._tasks.put(task)

    def finish(self) -> None:
        """Wait until all tasks have run, and end the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def write_directly(descriptor: int, batches: Iterable[Sequence[memoryview]], before_write: Callable[[], None]) -> None:
    """Write ``batches`` to the empty file ``descriptor``: one buffer is filled while a thread writes the other.

    On a file system without direct access it writes in the ordinary way.

    Args:
        descriptor: the file.
        batches: each of BATCH_BYTES, except the last.
        before_write: called in the thread before each write.
    """
    _set_direct(descriptor, True)
    free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for _ in range(2):
        free.put(mmap.mmap(-1, BATCH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    errors: list[BaseException] = []  # the error of the first failed write; nothing is written after it
    total = 0

    def write(buffer: mmap.mmap, numel: int) -> None:
        try:
            if not errors:
                before_write()
                _write(descriptor, buffer, numel)
        except BaseException as error:  # raised below, in the thread that writes the file
            errors.append(error)
        free.put(buffer)

    writer = Worker("zerolite-write")
    try:
        for batch in batches:
            buffer = free.get()
            if errors:
                break
            numel = _fill(buffer, batch)
            total += numel
            writer.submit(functools.partial(write, buffer, numel))
    finally:
        writer.finish()
    if errors:
        raise errors[0]
    os.ftruncate(descriptor, total)  # the last write was padded to a multiple of _BLOCK


def _set_direct(descriptor: int, on: bool) -> None:
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with contextlib.suppress(OSError):  # EINVAL: the file system has no direct access
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct if on else flags & ~direct)


def _fill(buffer: mmap.mmap, batch: Sequence[memoryview]) -> int:
    start = 0
    for view in batch:
        if len(view) < _COPIED_BY_PYTHON or view.readonly:
            buffer[start : start + len(view)] = view
        else:
            target = ctypes.addressof(ctypes.c_char.from_buffer(buffer, start))
            ctypes.memmove(target, ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
        start += len(view)
    return start


def _write(descriptor: int, buffer: mmap.mmap, numel: int) -> None:
    padded = -(-numel // _BLOCK) * _BLOCK
    buffer[numel:padded] = bytes(padded - numel)
    view = memoryview(buffer)
    done = 0
    while done < padded:
        try:
            done += os.write(descriptor, view[done:padded])
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise
            _set_direct(descriptor, False)  # the file system accepted O_DIRECT, but does not support it
