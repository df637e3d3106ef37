"""Tail of the ranks' output files, copied to the terminal line by line."""

from __future__ import annotations

import codecs
import contextlib
import threading
import time
from collections.abc import Mapping
from typing import BinaryIO, TextIO

_LOOK_S = 0.05
_STANDS_S = 0.1
_CHUNK = 1 << 20  # bytes read at once


class _Follower:
    """One file. Lines come whole: a reader may see half a line, where one write crosses a page of the file."""

    def __init__(self, path: str, prefix: str) -> None:
        self._path, self._prefix = path, prefix
        self._file: BinaryIO | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""  # a line without an end so far
        self._added = 0.0  # when something came last

    def take(self, last: bool = False) -> str:
        """What is to be written now; "" if nothing. ``last``: nothing more comes."""
        data = self._read()
        text = self._begun + self._decoder.decode(data, last)
        whole, end, rest = text.rpartition("\n")
        # Without a prefix it may be a prompt or dots: it appears when it has stood there for a moment.
        now = time.monotonic()
        self._added = now if data else self._added
        stands = not self._prefix and now - self._added > _STANDS_S
        if rest and (last or stands or len(rest) > _CHUNK):
            whole, end, rest = f"{whole}{end}{rest}", "\n" if self._prefix else "", ""
        self._begun = rest
        if not whole and not end:
            return ""
        if not self._prefix:
            return whole + end
        return "".join(f"{self._prefix}{line}\n" for line in whole.split("\n"))

    def _read(self) -> bytes:
        if self._file is None:
            with contextlib.suppress(FileNotFoundError):
                self._file = open(self._path, "rb")
        return self._file.read(_CHUNK) if self._file is not None else b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class FileFollower:
    """Follows several files until :meth:`stop`.

    Args:
        files: by rank; they may not be there yet.
        stream: where the lines go.
        prefixes: what stands before each line, by rank; "" for nothing.
    """

    def __init__(self, files: Mapping[int, str], stream: TextIO, prefixes: Mapping[int, str]) -> None:
        self._followers = [_Follower(path, prefixes[rank]) for rank, path in files.items()]
        self._stream = stream
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerolite output", daemon=True)

    def start(self) -> FileFollower:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Copy what is left; the ranks have ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._copy():
                self._stop.wait(_LOOK_S)
        while self._copy():
            pass
        self._copy(last=True)
        for follower in self._followers:
            follower.close()

    def _copy(self, last: bool = False) -> bool:
        """Whether there was anything."""
        texts = [follower.take(last) for follower in self._followers]
        for text in filter(None, texts):
            with contextlib.suppress(OSError):  # the terminal has gone
                self._stream.write(text)
                self._stream.flush()
        return any(texts)
