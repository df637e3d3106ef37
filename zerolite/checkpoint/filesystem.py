"""Files with a checksum of each MiB, written and read, and the other file system operations of a save.

Each operation is one function, so that tests can fail or crash at every one. No other module of this package writes,
renames or removes. Errors are never hidden: they are OSErrors with the path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from zerolite.checkpoint.errors import DamagedFile

BLOCK_BYTES = 1 << 20  # bytes that have one checksum
BUFFER_BYTES = 8 * BLOCK_BYTES  # bytes that are written or read at once


def _nothing(operation: str, path: Path) -> None:
    pass


before_operation: Callable[[str, Path], None] = _nothing
"""Hook for tests, in which a process dies or a disk is full. Called before each operation with its name ("mkdir",
"create", "write", "fsync", "rename", "remove") and the path."""


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Context in which an OSError gets the name of the file, if it has none."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


# -------------------------------------------------------------------- names


def make_directory(path: Path, exist_ok: bool = False) -> None:
    """Make a directory with its parents; it is on the disk when this returns."""
    if not (exist_ok and path.is_dir()):
        new = [made for made in (path, *path.parents) if not made.exists()]
        before_operation("mkdir", path)
        os.makedirs(path, exist_ok=exist_ok)
        for made in new:
            sync_directory(made.parent)


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
    with _named(path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:  # a directory may be writable without being readable
            return
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot sync directories
                raise
        finally:
            os.close(descriptor)


# -------------------------------------------------------------------- writing


def write_file(path: Path, content: bytes) -> FileEntry:
    """Write a new file, which is on the disk when this returns. Raises FileExistsError if it exists."""
    with FileWriter(path) as file:
        file.write(memoryview(content))
        return file.finish()


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of ``path``: at any time, also after a crash, it has the old content or the new one."""
    # Written under another name and then renamed, because a rename replaces a file in one step.
    new = path.with_name(f".{path.name}.new")
    remove(new)
    try:
        write_file(new, content)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    rename(new, path)


@dataclass(frozen=True)
class FileEntry:
    """Length of a file, and the CRC-32 of each block of ``BLOCK_BYTES``, as 8 hexadecimal digits."""

    bytes: int
    crc32: str

    def check(self, name: str) -> None:
        """Raise ValueError unless this can be the entry of a file called ``name``."""
        valid_name = bool(name) and name.isprintable() and "/" not in name and not name.startswith(".")
        if not valid_name or self.bytes < 0 or len(self.crc32) != 8 * -(-self.bytes // BLOCK_BYTES):
            raise ValueError(f"its entry of the file {name!r:.80} makes no sense")


class FileWriter:
    """A new file that is written from begin to end, in parts of 8 MiB. It is a context, which closes the file.

    Raises OSError with the path; FileExistsError if the file exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._checksums: list[str] = []
        self._written = 0  # bytes
        self._buffer = bytearray()  # bytes that are less than a part
        before_operation("create", path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, view: memoryview) -> None:
        """Append bytes, which are written or copied when this returns."""
        while len(view):
            part = view[: BUFFER_BYTES - len(self._buffer)]
            view = view[len(part) :]
            if len(part) == BUFFER_BYTES:
                self._write_out(part)
                continue
            self._buffer += part
            if len(self._buffer) == BUFFER_BYTES:
                self._flush()

    def finish(self) -> FileEntry:
        """Write what is left. Returns the file's entry when all is on the disk."""
        if self._buffer:
            self._flush()
        before_operation("fsync", self._path)
        with _named(self._path):
            os.fsync(self._descriptor)
        return FileEntry(self._written, "".join(self._checksums))

    def _flush(self) -> None:
        content, self._buffer = self._buffer, bytearray()
        self._write_out(memoryview(content))

    def _write_out(self, content: memoryview) -> None:
        """Write a part, which begins with a block."""
        blocks = range(0, len(content), BLOCK_BYTES)
        self._checksums.extend(f"{zlib.crc32(content[start : start + BLOCK_BYTES]):08x}" for start in blocks)
        self._written += len(content)
        before_operation("write", self._path)
        with _named(self._path):
            while len(content):
                content = content[os.write(self._descriptor, content) :]


# -------------------------------------------------------------------- reading


def open_file(path: Path) -> int:
    """Open a file for reading and return the descriptor.

    Raises OSError if it is not a regular file: opening a pipe would wait for its writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        file_type = "directory" if stat.S_ISDIR(mode) else "device"
        raise OSError(errno.EINVAL, f"expected a file, found a {file_type}", str(path))
    return descriptor


def read_file(path: Path, most: int) -> bytes:
    """Return the content of a file. Raises OSError if it has more than ``most`` bytes."""
    with open(open_file(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"expected at most {most} bytes, found more", str(path))
        return file.read(most)


class CheckedFile:
    """A file whose bytes are compared with the checksums of its entry, block by block, as they are read.

    It is a context, which closes the file. Raises DamagedFile if the file is missing, shorter, longer or changed.
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self._path, self._entry = path, entry
        self._last: tuple[int, bytearray] = (-1, bytearray())  # the latest block of which only a part was needed
        try:
            self._descriptor = open_file(path)
        except OSError as error:
            raise DamagedFile(f"'{path}' cannot be read: {error.strerror}") from error
        size = os.fstat(self._descriptor).st_size
        if size != entry.bytes:
            os.close(self._descriptor)
            raise DamagedFile(f"'{path}' is damaged: expected {entry.bytes} bytes, found {size}")

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``start`` on."""
        end = start + len(view)
        while start < end:
            block = start - start % BLOCK_BYTES
            in_blocks = (
                (min(end, self._entry.bytes - self._entry.bytes % BLOCK_BYTES) - start) // BLOCK_BYTES * BLOCK_BYTES
            )
            # Whole blocks are read straight into the view. A part of a block needs the whole block for its checksum.
            if start == block and in_blocks:
                numel = min(in_blocks, BUFFER_BYTES)
                self.read_blocks(start, view[:numel])
            else:
                numel = min(block + BLOCK_BYTES, end) - start
                view[:numel] = memoryview(self._block(block))[start - block : start - block + numel]
            view = view[numel:]
            start += numel

    def read_blocks(self, start: int, view: memoryview) -> None:
        """Read whole blocks, including the shorter one at the end of the file, and compare their checksums."""
        done = 0
        while done < len(view):
            try:
                # A read may return less than was asked for: Linux reads at most 2 GiB at once.
                count = os.preadv(self._descriptor, [view[done:]], start + done)
            except OSError as error:
                raise DamagedFile(f"'{self._path}' cannot be read at byte {start + done}: {error.strerror}") from error
            if not count:
                raise DamagedFile(
                    f"'{self._path}' is damaged: expected {self._entry.bytes} bytes, found {start + done}"
                )
            done += count
        for low in range(0, len(view), BLOCK_BYTES):
            number = (start + low) // BLOCK_BYTES
            expected = self._entry.crc32[8 * number : 8 * number + 8]
            checksum = f"{zlib.crc32(view[low : low + BLOCK_BYTES]):08x}"
            if checksum != expected:
                end = min(start + low + BLOCK_BYTES, self._entry.bytes)
                raise DamagedFile(
                    f"'{self._path}' is damaged between bytes {start + low} and {end}: expected checksum {expected}, "
                    f"found {checksum}"
                )

    def read_all(self) -> bytes:
        """Return the content of a small file."""
        content = bytearray(self._entry.bytes)
        self.read_blocks(0, memoryview(content))
        return bytes(content)

    def verify(self) -> None:
        """Read the file to its end."""
        buffer = memoryview(bytearray(min(BUFFER_BYTES, self._entry.bytes)))
        for start in range(0, self._entry.bytes, BUFFER_BYTES):
            self.read_blocks(start, buffer[: self._entry.bytes - start])

    def _block(self, start: int) -> bytearray:
        if self._last[0] != start:
            content = bytearray(min(BLOCK_BYTES, self._entry.bytes - start))
            self.read_blocks(start, memoryview(content))
            self._last = (start, content)
        return self._last[1]
