"""The library of csrc/aio, called through ctypes. Other Python threads run during every call."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from typing import Any

from zerolite.ops.io_reference import IOResult
from zerolite.utils.builder import declare, op_builder

ABI = 2
_BACKENDS = {"auto": 0, "io_uring": 1, "threads": 2}


class _Options(Structure):
    _fields_ = [
        ("block_size", c_int64),
        ("queue_depth", c_int32),
        ("threads", c_int32),
        ("backend", c_int32),
    ]


class _Outcome(Structure):
    _fields_ = [("error", c_int32), ("done", c_int64), ("position", c_int64)]


class LibraryIO:
    """Backend in C++. Arguments as of :class:`~zerolite.ops.async_io.AsyncIO`, but no backend "python"."""

    def __init__(self, block_size: int, queue_depth: int, thread_count: int, backend: str) -> None:
        """Raise RuntimeError if the system refuses threads, or io_uring that was asked for."""
        library = _load()
        if isinstance(library, str):
            raise RuntimeError(library)
        self._library = library
        options = _Options(block_size, queue_depth, thread_count, _BACKENDS[backend])
        error = c_int32()
        self._handle: int | None = library.zl_aio_create(options, error)
        if self._handle is None:
            what = "io_uring" if backend == "io_uring" else "its threads"
            raise RuntimeError(
                f"Asynchronous I/O cannot have {what}: {os.strerror(error.value)}. Containers often forbid io_uring; "
                'with the backend "auto" threads do the same.'
            )
        number = library.zl_aio_backend_of(self._handle)
        self.name = next(name for name, code in _BACKENDS.items() if code == number)

    def submit(self, write: bool, fd: int, address: int, nbytes: int, offset: int) -> int:
        ticket: int = self._library.zl_aio_submit(self._handle, int(write), fd, address, nbytes, offset)
        if ticket < 0:
            raise OSError(-ticket, f"asynchronous I/O takes no request: {os.strerror(-ticket)}")
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> IOResult | None:
        """Return the result, and make the ticket invalid; None if the request still runs after ``timeout_s``."""
        outcome = _Outcome()
        error = self._library.zl_aio_wait(self._handle, ticket, int(timeout_s * 1000), outcome)
        if error == errno.ETIMEDOUT:
            return None
        if error:
            raise OSError(error, f"no call can wait for this request: {os.strerror(error)}")
        return IOResult(outcome.error, outcome.done, outcome.position)

    def ended(self, ticket: int) -> bool:
        answer = self._library.zl_aio_ended(self._handle, ticket)
        if answer < 0:
            raise OSError(-answer, f"there is no such request: {os.strerror(-answer)}")
        return bool(answer)

    def stop(self) -> None:
        """Wait until all requests have ended. Their results can still be fetched by :meth:`wait`."""
        self._library.zl_aio_stop(self._handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._library.zl_aio_destroy(self._handle)


def unavailable_reason() -> str | None:
    """Return None if the library is loaded or can be built now; else a sentence with the cause and the remedy."""
    reason = _load()
    return reason if isinstance(reason, str) else None


@functools.cache
def _load() -> ctypes.CDLL | str:
    try:
        library = op_builder.load("async_io")
    except (op_builder.OpUnavailable, OSError) as error:
        return str(error)
    version = declare(library.zl_aio_abi, c_int32)()
    if version != ABI:
        return (
            f"the library for asynchronous I/O has interface {version}, expected {ABI}; rebuild it: "
            "delete the cache directory that `zerolite report` names."
        )
    prototypes: dict[str, tuple[Any, ...]] = {
        "create": (c_void_p, POINTER(_Options), POINTER(c_int32)),
        "backend_of": (c_int32, c_void_p),
        "submit": (c_int64, c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int64),
        "wait": (c_int32, c_void_p, c_int64, c_int64, POINTER(_Outcome)),
        "ended": (c_int32, c_void_p, c_int64),
        "stop": (c_int32, c_void_p),
        "destroy": (None, c_void_p),
    }
    for name, (result, *arguments) in prototypes.items():
        declare(getattr(library, f"zl_aio_{name}"), result, *arguments)
    return library
