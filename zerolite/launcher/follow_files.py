"""Tail of the ranks' output files, copied to the terminal line by line.

torch's TailLog has a thread for each file, and writes half a line where one write crosses a page of the file.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import BinaryIO

_LOOK_S = 0.05
_CHUNK = 1 << 20  # bytes read at once


class _Follower:
    """One file, whose lines come whole."""

    def __init__(self, path: str, prefix: str) -> None:
        self._path, self._prefix = path, prefix.encode()
        self._file: BinaryIO | None = None
        self._begun = b""  # a line without an end so far

    def take(self, last: bool = False) -> bytes:
        """Return what is to be written now, empty if nothing. ``last``: nothing more comes."""
        data = self._read()
        text = self._begun + data
        whole, end, rest = text.rpartition(b"\n")
        # Without a prefix a rest may be a prompt or dots: it appears when nothing has followed it for a moment.
        if rest and (last or len(rest) > _CHUNK or not (data or self._prefix)):
            whole, end, rest = text, b"", b""
        self._begun = rest
        if not self._prefix or not whole + end:
            return whole + end
        return b"".join(self._prefix + line + b"\n" for line in whole.split(b"\n"))

    def _read(self) -> bytes:
        if self._file is None:
            with contextlib.suppress(FileNotFoundError):
                self._file = open(self._path, "rb")
        return self._file.read(_CHUNK) if self._file is not None else b""


class FileFollower:
    """Follow several files until :meth:`stop`.

    Args:
        files: by rank; they may not be there yet.
        stream: where the lines go.
        prefixes: what stands before each line, by rank; "" for nothing.
    """

    def __init__(self, files: Mapping[int, str], stream: BinaryIO, prefixes: Mapping[int, str]) -> None:
        self._followers = [_Follower(path, prefixes[rank]) for rank, path in files.items()]
        self._stream = stream
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerolite output", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Copy what is left; the ranks have ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0 if self._copy() else _LOOK_S):
            pass
        while self._copy():
            pass
        self._copy(last=True)

    def _copy(self, last: bool = False) -> bool:
        """Return whether there was anything."""
        text = b"".join([follower.take(last) for follower in self._followers])
        if text:
            with contextlib.suppress(OSError):  # the terminal has gone
                self._stream.write(text)
                self._stream.flush()
        return bool(text)
