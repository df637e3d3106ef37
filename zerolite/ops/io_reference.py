"""Asynchronous I/O in plain Python: the fallback for csrc/aio, and its reference in tests."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

END_OF_FILE = -1
"""Error of a read, besides those of errno: the file ends before the requested bytes."""


@dataclass(frozen=True)
class IOResult:
    """Result of a request.

    Attributes:
        error: 0, a number of errno, or END_OF_FILE; of several failures the first one in the file.
        done: bytes read or written.
        position: position of the failure in the file, in bytes; 0 without one.
    """

    error: int
    done: int
    position: int


class PythonIO:
    """Backend with a thread for each block in flight: os.preadv and os.pwritev let other threads run."""

    name = "python"

    def __init__(self, block_size: int, queue_depth: int) -> None:
        self._block_size = block_size
        self._pool = ThreadPoolExecutor(queue_depth, thread_name_prefix="zerolite-io")
        self._tickets = itertools.count(1)
        self._requests: dict[int, list[Future[IOResult]]] = {}

    def submit(self, write: bool, fd: int, address: int, nbytes: int, offset: int) -> int:
        ticket = next(self._tickets)
        self._requests[ticket] = [
            self._pool.submit(
                _transfer, write, fd, address + start, min(self._block_size, nbytes - start), offset + start
            )
            for start in range(0, nbytes, self._block_size)
        ]
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> IOResult | None:
        """Return the result, and make the ticket invalid; None if the request still runs after ``timeout_s``."""
        if wait(self._requests[ticket], timeout_s).not_done:
            return None
        blocks = [future.result() for future in self._requests.pop(ticket)]
        done = sum(block.done for block in blocks)
        failed = next((block for block in blocks if block.error), None)
        return IOResult(failed.error, done, failed.position) if failed else IOResult(0, done, 0)

    def ended(self, ticket: int) -> bool:
        return all(future.done() for future in self._requests[ticket])

    def stop(self) -> None:
        """Wait until all requests have ended. Their results can still be fetched by :meth:`wait`."""
        self._pool.shutdown()


def _transfer(write: bool, fd: int, address: int, nbytes: int, offset: int) -> IOResult:
    memory = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
    done = 0
    while done < nbytes:
        try:
            if write:
                count = os.pwritev(fd, [memory[done:]], offset + done)
            else:
                count = os.preadv(fd, [memory[done:]], offset + done)
        except OSError as error:
            return IOResult(error.errno or errno.EIO, done, offset + done)
        if not count:
            return IOResult(errno.EIO if write else END_OF_FILE, done, offset + done)
        done += count
    return IOResult(0, done, offset + done)
