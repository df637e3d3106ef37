"""Asynchronous file reads and writes by csrc/aio, or by Python if that cannot be built.

Only the methods wait, close and stop wait for a request. Threads may share an AsyncIO; a fork of the process must not
use it.
"""

from __future__ import annotations

import atexit
import errno
import functools
import logging
import os
import threading
import weakref
from typing import Protocol

import torch

from zerolite.ops.io_library import LibraryIO, unavailable_reason
from zerolite.ops.io_reference import END_OF_FILE, IOResult, PythonIO

logger = logging.getLogger("zerolite")

BACKENDS = ("auto", "io_uring", "threads", "python")
_SECTOR = 4096  # bytes; direct I/O, past the page cache, needs multiples
_MOST_IN_FLIGHT = 4096
_LARGEST_BLOCK = 1 << 30
_SLICE_S = 0.5  # seconds of one wait in the library; between two, Python handles signals


class UnexpectedEnd(OSError):
    """The file ends before the bytes that were to be read."""


class Backend(Protocol):
    """Executor of the requests. ``submit`` returns a ticket, which is valid until ``wait`` has returned its result."""

    name: str

    def submit(self, write: bool, fd: int, address: int, nbytes: int, offset: int) -> int: ...

    def wait(self, ticket: int, timeout_s: float) -> IOResult | None: ...

    def ended(self, ticket: int) -> bool: ...

    def stop(self) -> None: ...


class IOTask:
    """Read or write under way. It keeps its tensor alive until it has ended."""

    def __init__(
        self, backend: Backend, write: bool, fd: int, memory: tuple[torch.Tensor, int], offset: int, file: str
    ):
        """
        Args:
            backend: executes the request.
            write: write to the file; False reads.
            fd: an open file.
            memory: (a tensor on the CPU, number of bytes from its beginning on).
            offset: position in the file, in bytes.
            file: name of the file, for errors.
        """
        tensor, self._nbytes = memory
        self._memory: torch.Tensor | None = tensor
        self._backend = backend
        self._write = write
        self._offset = offset
        self._file = file
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._outcome: IOResult | None = None
        self._ticket = backend.submit(write, fd, tensor.data_ptr(), self._nbytes, offset)

    def wait(self) -> None:
        """Wait until the request has ended; other threads run meanwhile. Any thread may call it, any number of times.

        Raises:
            UnexpectedEnd: the file ends before the bytes of a read.
            OSError: the request failed, with the operating system's number; the sentence has file, position and bytes.
        """
        _check_process(self._pid)
        with self._lock:
            while self._outcome is None:
                self._outcome = self._backend.wait(self._ticket, _SLICE_S)
            self._memory = None
        if self._outcome.error:
            raise self._failure(self._outcome)

    def ended(self) -> bool:
        """Return True if :meth:`wait` would return or raise at once."""
        _check_process(self._pid)
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            return self._outcome is not None or self._backend.ended(self._ticket)
        finally:
            self._lock.release()

    def _failure(self, outcome: IOResult) -> OSError:
        what = f"{'writing' if self._write else 'reading'} {self._nbytes} bytes at byte {self._offset} of {self._file}"
        if outcome.error == END_OF_FILE:
            return UnexpectedEnd(
                errno.EIO, f"{what} failed after {outcome.done} of them: the file ends at byte {outcome.position}"
            )
        return OSError(
            outcome.error,
            f"{what} failed after {outcome.done} of them, at byte {outcome.position}: {os.strerror(outcome.error)}",
        )

    def __del__(self) -> None:
        if getattr(self, "_ticket", None) is None or self._outcome is not None or self._pid != os.getpid():
            return
        try:
            self.wait()
        except OSError as error:
            logger.warning("A request that was not waited for has failed: %s.", error)


class AsyncIO:
    """Reader and writer of files in blocks, of which several are in flight at once.

    Args:
        block_size: bytes of a block; longer requests are divided.
        queue_depth: largest number of blocks in flight, over all requests.
        thread_count: threads that submit blocks to io_uring and collect them, each with a ring and a part of the depth.
            Without io_uring every block in flight has a thread.
        backend: one of :data:`BACKENDS`; "auto" is the first of the others that is available.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: the backend asked for by name is not available.
    """

    def __init__(
        self, block_size: int = 1 << 20, queue_depth: int = 8, thread_count: int = 1, backend: str = "auto"
    ) -> None:
        if not (0 < block_size <= _LARGEST_BLOCK and block_size % _SECTOR == 0):
            raise ValueError(
                f"aio.block_size: expected a multiple of {_SECTOR} up to {_LARGEST_BLOCK} (1 GiB), got {block_size}"
            )
        for name, value in (("queue_depth", queue_depth), ("thread_count", thread_count)):
            if not 1 <= value <= _MOST_IN_FLIGHT:
                raise ValueError(f"aio.{name}: expected a number from 1 to {_MOST_IN_FLIGHT}, got {value}")
        if backend not in BACKENDS:
            raise ValueError(f"expected a backend of {', '.join(BACKENDS)}, got {backend!r}")
        self._pid = os.getpid()
        self._backend = _make(block_size, queue_depth, thread_count, backend)
        self._closed = False
        _open.add(self)

    @property
    def backend(self) -> str:
        """Name of the backend in use, one of :data:`BACKENDS` except "auto"."""
        return self._backend.name

    def read(self, fd: int, into: torch.Tensor, offset: int, nbytes: int | None = None, file: str = "") -> IOTask:
        """Begin to read bytes of an open file into a contiguous tensor on the CPU.

        Args:
            fd: the open file.
            into: the tensor.
            offset: position in the file, in bytes.
            nbytes: bytes to read, by default as many as the tensor has; more if its storage is long enough.
            file: name of the file, for errors.

        Raises:
            ValueError: the arguments do not fit together.
        """
        return self._begin(False, fd, into, offset, nbytes, file)

    def write(self, fd: int, source: torch.Tensor, offset: int, nbytes: int | None = None, file: str = "") -> IOTask:
        """Begin to write the bytes of a tensor, which must not change until the request has ended.

        Arguments and errors are those of :meth:`read`.
        """
        return self._begin(True, fd, source, offset, nbytes, file)

    def _begin(self, write: bool, fd: int, tensor: torch.Tensor, offset: int, nbytes: int | None, file: str) -> IOTask:
        _check_process(self._pid)
        if self._closed:
            raise ValueError("this AsyncIO is closed")
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"expected a contiguous tensor on the CPU, got strides {tensor.stride()} on {tensor.device}"
            )
        start, size = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
        size = size if nbytes is None else nbytes
        if size < 0 or start + size > tensor.untyped_storage().nbytes():
            raise ValueError(f"expected memory of {size} bytes, got {tensor.untyped_storage().nbytes() - start}")
        if offset < 0 or fd < 0:
            raise ValueError(f"expected an open file and a position in it, got {fd} and {offset}")
        return IOTask(self._backend, write, fd, (tensor, size), offset, file or f"file {fd}")

    def close(self) -> None:
        """Wait until all requests have ended, and accept no more. May be called several times."""
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            self._backend.stop()
        _open.discard(self)

    def __enter__(self) -> AsyncIO:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()


_open: weakref.WeakSet[AsyncIO] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for io in list(_open):
        io.close()


def _check_process(pid: int) -> None:
    if pid != os.getpid():
        raise RuntimeError(
            f"Asynchronous I/O was begun in process {pid}, and this is process {os.getpid()}, a fork of it: it has to "
            "make an AsyncIO of its own."
        )


def _make(block_size: int, queue_depth: int, thread_count: int, backend: str) -> Backend:
    if backend != "python":
        reason = unavailable_reason()
        if reason is None:
            return LibraryIO(block_size, queue_depth, thread_count, backend)
        if backend != "auto":
            raise RuntimeError(f"Asynchronous I/O with {backend} is not available: {reason}")
        if os.environ.get("ZEROLITE_KERNELS") != "0":
            _warn_once(f"The library for asynchronous I/O is not available, Python's threads do it instead: {reason}")
    return PythonIO(block_size, queue_depth)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
