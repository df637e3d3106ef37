"""Cache of built libraries: private directories, and marker files that show complete builds."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from .errors import CannotStore

SEAL_BYTES = hashlib.sha256().digest_size


def cache_root() -> Path:
    """Return the cache directory by the environment: `ZEROLITE_CACHE_DIR`, otherwise `zerolite` in `XDG_CACHE_HOME`
    or in ~/.cache. It need not exist.

    Raises:
        CannotStore: there is no home directory.
    """
    chosen = os.environ.get("ZEROLITE_CACHE_DIR")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = xdg if os.path.isabs(xdg) else os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(base):
        raise CannotStore("there is no home directory (set HOME or ZEROLITE_CACHE_DIR)")
    return Path(base, "zerolite")


def open_store() -> Path:
    """Return the directory of the libraries, `kernels` in the cache directory; it is made if need be.

    Both directories must belong to this user or to root and be writable by their owner alone: what is loaded from here
    runs as this user.

    Raises:
        CannotStore: it cannot be made, or others could write to it.
    """
    root = cache_root()
    store = root / "kernels"
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        _check_private(os.stat(root), root)
        with contextlib.suppress(FileExistsError):
            os.mkdir(store, mode=0o700)
        _check_private(os.lstat(store), store)
    except OSError as error:
        raise CannotStore(f"{error.strerror}: {error.filename}") from error
    return store


def _check_private(about: os.stat_result, path: Path) -> None:
    if not stat.S_ISDIR(about.st_mode):
        raise CannotStore(f"{path} is not a directory")
    if about.st_uid not in (os.geteuid(), 0):
        raise CannotStore(f"{path} belongs to another user (number {about.st_uid}), who could put a library there")
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotStore(f"other users can write to {path} (`chmod go-w` it, or set ZEROLITE_CACHE_DIR)")


def seal(library: Path) -> None:
    """Append the SHA-256 of the file to it, which loaders of ELF files ignore. Loading half a library can end the
    process instead of failing, so a library is loaded only if its seal is right."""
    with open(library, "r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
    os.chmod(library, 0o755)


def is_whole(library: Path) -> bool:
    """True if the file is there and ends with its own SHA-256."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    body, digest = content[:-SEAL_BYTES], content[-SEAL_BYTES:]
    return len(digest) == SEAL_BYTES and hashlib.sha256(body).digest() == digest


Identity = tuple[int, int, int]


def identity(path: Path) -> Identity | None:
    """What changes when a file is replaced; None where there is none."""
    try:
        about = os.stat(path)
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns, about.st_size


def write_text(path: Path, text: str) -> bool:
    """Write a small file so that readers see all of it or nothing. False if it cannot be written."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        return False
    return True
