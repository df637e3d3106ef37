"""Cache of built libraries: a private directory, and a lock for each build."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path


def cache_root() -> Path:
    """Return the cache directory: `ZEROLITE_CACHE_DIR`, else `zerolite` in `XDG_CACHE_HOME` or in ~/.cache."""
    chosen, xdg = os.environ.get("ZEROLITE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    return Path(xdg if os.path.isabs(xdg) else os.path.expanduser("~/.cache"), "zerolite")


def library_dir() -> Path:
    """Return the directory of the libraries, `kernels` in the cache directory, and make it if it is missing.

    Raises:
        OSError: the directory cannot be made, or other users could write to it. A library of theirs could run code as
            this user.
    """
    root = cache_root()
    if not root.is_absolute():
        raise FileNotFoundError("there is no home directory (set HOME or ZEROLITE_CACHE_DIR)")
    cache_dir = root / "kernels"
    os.makedirs(root, mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(cache_dir, mode=0o700)
    for path, about in ((root, os.stat(root)), (cache_dir, os.lstat(cache_dir))):
        private = not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and about.st_uid in (os.geteuid(), 0)
        if not (stat.S_ISDIR(about.st_mode) and private):
            raise PermissionError(
                f"{path} must be a directory of this user or of root, and other users must not write to it; it is "
                f"{stat.filemode(about.st_mode)} of user {about.st_uid} (`chmod go-w` it, or set ZEROLITE_CACHE_DIR)"
            )
    return cache_dir


def describe_cache() -> tuple[str, str]:
    """Return the cache directory, and the reason why it cannot be used; "" if it can."""
    try:
        return str(library_dir().parent), ""
    except OSError as error:
        return str(cache_root()), str(error)


_SEAL = b"\nzerolite "  # then the SHA-256 of the bytes before, as the last bytes of the file, which the loader ignores


def seal(library: Path) -> None:
    """Append the hash of a library's bytes to its file, for :func:`is_intact`."""
    digest = hashlib.sha256(library.read_bytes()).hexdigest().encode()
    with open(library, "ab") as file:
        file.write(_SEAL + digest)


def is_intact(library: Path) -> bool:
    """Return True if the file of a library is as :func:`seal` has left it. Loading a damaged one may end the process,
    and no exception would tell. Raises OSError if it cannot be read."""
    content, mark, digest = library.read_bytes().rpartition(_SEAL)
    return bool(mark) and digest == hashlib.sha256(content).hexdigest().encode()


@contextlib.contextmanager
def build_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock of a library, so that one process builds it while the others wait.

    It is a record lock: the kernel releases it when its holder dies, and neither forks nor compilers inherit it. The
    lock only saves work. If the file system has no locks, or after ``timeout_s``, a process goes on without it.
    """
    with open(path, "ab") as file:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):  # held by another process
                time.sleep(0.05)
            except OSError:
                break
        yield
