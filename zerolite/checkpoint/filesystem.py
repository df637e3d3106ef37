"""File system operations of a save, one function each, so that tests can fail or crash at every one.

No other module of this package writes, renames or removes. Errors are never hidden: they are OSErrors with the path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from zerolite.checkpoint.direct_write import BATCH_BYTES, write_directly

_MOST_VIEWS = 512  # in one call; POSIX has 1024 on Linux


def _nothing(operation: str, path: Path) -> None:
    pass


before_operation: Callable[[str, Path], None] = _nothing
"""Hook for tests, in which a process dies or a disk is full. Called before each operation with its name ("mkdir",
"create", "write", "fsync", "rename", "remove") and the path."""


def make_directory(path: Path, exist_ok: bool = False) -> None:
    """Make a directory with its parents; it is on the disk when this returns."""
    if not (exist_ok and path.is_dir()):
        new = [made for made in (path, *path.parents) if not made.exists()]
        before_operation("mkdir", path)
        os.makedirs(path, exist_ok=exist_ok)
        for made in new:
            sync_directory(made.parent)


def open_file(path: Path) -> int:
    """Open a file for reading and return the descriptor.

    Raises OSError if it is not a regular file: opening a pipe would wait for its writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        found = "directory" if stat.S_ISDIR(mode) else "device"
        raise OSError(errno.EINVAL, f"expected a file, found a {found}", str(path))
    return descriptor


def read_file(path: Path, most: int) -> bytes:
    """Return the content of a file. Raises OSError if it has more than ``most`` bytes."""
    with open(open_file(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"expected at most {most} bytes, found more", str(path))
        return file.read(most)


def write_file(path: Path, batches: Iterable[Sequence[memoryview]], directly: bool = False) -> None:
    """Write a new file of ``batches``; it is on the disk when this returns. Raises FileExistsError if it exists.

    Args:
        path: the file.
        batches: its content.
        directly: write past the page cache.
    """
    before_operation("create", path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if directly:
            write_directly(descriptor, batches, lambda: before_operation("write", path))
        else:
            for batch in batches:
                before_operation("write", path)
                _write(descriptor, list(batch))
        before_operation("fsync", path)
        os.fsync(descriptor)
    except OSError as error:
        raise _named(error, path) from error
    finally:
        os.close(descriptor)


def _write(descriptor: int, views: list[memoryview]) -> None:
    while views:
        written = os.writev(descriptor, views[:_MOST_VIEWS])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def batches_of(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the same bytes in batches of 8 MiB, the last one shorter.

    A batch is asked for when the one before has been written.
    """
    batch: list[memoryview] = []
    room = BATCH_BYTES
    for view in views:
        while len(view):
            part = view[:room]
            batch.append(part)
            view, room = view[len(part) :], room - len(part)
            if not room:
                yield batch
                batch, room = [], BATCH_BYTES
    if batch:
        yield batch


def _named(error: OSError, path: Path) -> OSError:
    return error if error.filename else type(error)(error.errno, error.strerror, str(path))


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of ``path``: at any time, also after a crash, it has the old content or the new one."""
    # Written under another name and then renamed, because a rename replaces a file in one step.
    new = path.with_name(f".{path.name}.new")
    remove(new)
    try:
        write_file(new, [[memoryview(content)]])
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    rename(new, path)


def rename(source: Path, target: Path) -> Path:
    """Rename a file or directory; the new name is on the disk when this returns. Returns ``target``."""
    before_operation("rename", target)
    os.rename(source, target)
    sync_directory(target.parent)
    return target


def remove(path: Path) -> None:
    """Remove a file, or a directory with its contents; nothing happens if it does not exist."""
    if path.is_dir() and not path.is_symlink():
        before_operation("remove", path)
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        before_operation("remove", path)
        os.unlink(path)


def sync_directory(path: Path) -> None:
    """Write the names in a directory to the disk. fsync of a file does not write its name, which belongs to the
    directory."""
    before_operation("fsync", path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a directory may be writable without being readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot sync directories
            raise _named(error, path) from error
    finally:
        os.close(descriptor)
