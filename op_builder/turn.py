"""Build lock: of several processes that need the same library one builds it and the others wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_S = 0.05
BEAT_S = 1.0  # a builder gives a sign of life this often
PATIENCE_S = 4.0  # one that gave none for so long is not waited for


class Turn:
    """The outcome of waiting.

    Attributes:
        held: this process holds the lock. Otherwise the library has appeared, or the holder shows no life, or the
            file system has no locks.
    """

    def __init__(self, file: int | None) -> None:
        self.held = file is not None
        self._file = file

    def beat(self) -> None:
        """Show those who wait that work goes on."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file)


@contextlib.contextmanager
def take_turn(path: Path, is_done: Callable[[], bool]) -> Iterator[Turn]:
    """Wait until this process holds the lock file, `is_done()`, or the holder has shown no life for PATIENCE_S.

    The lock is advisory: it keeps processes from building the same twice, and nothing breaks if they do. The kernel
    releases it when its holder dies. Programs that the holder started do not inherit it (its descriptor is closed when
    another program is started), but a fork of the holder does: hence the signs of life.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    held = False
    try:
        held = _wait(file, path, is_done)
        turn = Turn(file if held else None)
        turn.beat()
        yield turn
    finally:
        if held:  # not left to close: a fork may have the descriptor too
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _wait(file: int, path: Path, is_done: Callable[[], bool]) -> bool:
    """Return whether the lock is held now."""
    last_sign: int | None = None
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError:  # no locks on this file system
            return False
        if is_done():
            return False
        sign = _last_sign(path)
        if sign != last_sign:
            last_sign, deadline = sign, time.monotonic() + PATIENCE_S
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)


def _last_sign(path: Path) -> int | None:
    """When the holder last showed life, by the file system's clock. Opening makes NFS ask the server."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.fstat(file).st_mtime_ns
    finally:
        os.close(file)
