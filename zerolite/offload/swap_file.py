"""Swap file of one rank on a disk, which holds flat tensors.

The file has no name: nothing is left of it when the process ends, however it ends, and no other process can remove it.
Its space is allocated before a tensor is handed out, so that a full disk shows at once and not in the middle of a step.

A tensor of the file is a mapping of its part. The step does not use that: it copies parts between the file and buffers,
past the page cache where the file system allows it. The kernel keeps both views equal as long as a part is not used
through both at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import tempfile
import threading
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerolite.offload.checksums import Checksums, compare
from zerolite.offload.placements import Transfer
from zerolite.utils.c_functions import declare
from zerolite.utils.finalizers import finalize_before_exit
from zerolite.utils.pinned_memory import host_memory
from zerolite.utils.sizes import format_size

if TYPE_CHECKING:
    from zerolite.ops.async_io import AsyncIO, IOTask

logger = logging.getLogger("zerolite")

ALIGNMENT = 4096
"""Bytes. Direct I/O begins at multiples, in memory and in the file, and is a multiple long."""
_GRAIN = max(ALIGNMENT, mmap.ALLOCATIONGRANULARITY)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


class SwapFile:
    """See above. Any thread may call; a fork of the process may not, and its tensors are not there.

    Code that writes to a tensor of the file itself, not with :meth:`write`, calls :meth:`drop_page_cache` afterwards.
    """

    def __init__(self, directory: str | Path, io: AsyncIO, rank: int, key: str, checksums: bool = False) -> None:
        """
        Args:
            directory: exists, on a disk of this host.
            key: of the configuration that names it, for errors.
            checksums: what :meth:`read` fetches is compared with what :meth:`write` was given.

        Raises OSError if there cannot be a file in the directory.
        """
        self.directory = Path(directory)
        self.name = f"the swap file of rank {rank} in {self.directory}"
        self._io = io
        self._key = key
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._end = self._used = 0  # bytes of the file, and those of them that have a tensor
        self._offsets: dict[int, tuple[int, int]] = {}  # address of a tensor's memory: place in the file, bytes
        self._under_way: weakref.WeakSet[SwapTransfer] = weakref.WeakSet()
        self._sums = Checksums() if checksums else None
        self._fd = _open_nameless(self.directory, rank, key)
        self._direct: int | None = None
        try:
            self._direct = self._open_direct()
        except BaseException:
            os.close(self._fd)
            raise
        # Not at exit: requests may be under way, and the process ends anyway.
        self._closer = finalize_before_exit(self, _close, self._fd, self._direct)

    @property
    def direct(self) -> bool:
        """True if reads and writes go past the page cache."""
        return self._direct is not None

    @property
    def nbytes(self) -> int:
        """Size of the file on the disk."""
        return self._used

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return [nbytes] of uint8 zeros whose memory is a new part of the file. The space on the disk is freed with
        the last reference to it.

        Raises:
            OSError: the disk has no room, or fails.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        padded = -(-nbytes // _GRAIN) * _GRAIN
        with self._lock:
            self._check_open()
            offset = self._end
            try:
                os.posix_fallocate(self._fd, offset, padded)
                address = _map(self._fd, offset, padded)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, offset)
                raise self._no_room(padded, error) from error
            self._end += padded
            self._used += padded
            memory = (ctypes.c_ubyte * nbytes).from_address(address)
            self._offsets[address] = (offset, nbytes)
            finalize_before_exit(memory, self._release, address, offset, padded)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def read(self, offloaded: torch.Tensor, into: torch.Tensor) -> SwapTransfer:
        """Begin to read a part of a tensor of this file into other memory.

        Args:
            offloaded: a view that begins at a multiple of 4096 bytes.
            into: of as many bytes, in memory that begins at a multiple of 4096 and goes on to the next one after the
                end: whole blocks are read.

        Raises ValueError if they are not so. The transfer raises OSError.
        """
        return self._begin(False, offloaded, into)

    def write(self, offloaded: torch.Tensor, source: torch.Tensor) -> SwapTransfer:
        """Begin the reverse of :meth:`read`. ``source`` must not change before the transfer has ended. Here the view
        also ends at a multiple of 4096 bytes, or where the tensor does."""
        return self._begin(True, offloaded, source)

    def drop_page_cache(self) -> None:
        """Tensors of this file have been used as such: what the kernel keeps of them in memory is written to the disk
        and dropped, and their checksums are forgotten. No transfer may be under way. Raises OSError if the disk
        fails."""
        with self._lock:
            self._check_open()
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                raise OSError(error.errno, f"writing {self.name} to the disk failed: {error.strerror}") from error
            for address, (_, nbytes) in self._offsets.copy().items():
                _libc().madvise(address, nbytes, mmap.MADV_DONTNEED)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if self._sums is not None:
                self._sums.clear()

    def close(self) -> None:
        """Wait until every transfer has ended. What tensors of this file still exist keep their memory, and with it the
        space on the disk; nothing else can be done with them. May be called several times."""
        if self._pid != os.getpid():
            return
        with self._lock:
            under_way = list(self._under_way)
        for transfer in under_way:
            with contextlib.suppress(OSError):  # its waiting caller gets the error
                transfer.wait()
        with self._lock:
            self._closer()

    def _begin(self, write: bool, offloaded: torch.Tensor, memory: torch.Tensor) -> SwapTransfer:
        nbytes = offloaded.numel() * offloaded.element_size()
        if memory.numel() * memory.element_size() != nbytes:
            raise ValueError(f"expected {nbytes} bytes, got {memory.numel() * memory.element_size()}")
        if memory.data_ptr() % ALIGNMENT:
            raise ValueError(f"expected memory that begins at a multiple of {ALIGNMENT} bytes, got {memory.data_ptr()}")
        with self._lock:
            self._check_open()
            if nbytes == 0:
                return SwapTransfer(None, offloaded)
            offset, is_end = self._place_of(offloaded, nbytes)
            if write and not is_end and nbytes % ALIGNMENT:
                raise ValueError(f"expected a view that ends with a block of {ALIGNMENT} bytes, got {nbytes} bytes")
            check: Callable[[], None] | None = None
            padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
            if self._sums is not None and not write:
                sums = self._sums.expected(offset, padded)
                check = functools.partial(_compare, sums, offset, memory, padded, self.name)
            begin = self._io.write if write else self._io.read
            fd = self._fd if self._direct is None else self._direct
            transfer = SwapTransfer(begin(fd, memory, offset, padded, self.name), offloaded, check)
            if self._sums is not None and write:
                self._sums.record(offset, _bytes_of(memory, padded))
            self._under_way.add(transfer)
        return transfer

    def _place_of(self, offloaded: torch.Tensor, nbytes: int) -> tuple[int, bool]:
        """Return the offset of a view in the file, and whether it ends where its tensor does."""
        try:
            offset, length = self._offsets[offloaded.untyped_storage().data_ptr()]
        except KeyError:
            raise ValueError(f"expected a tensor of {self.name}, got one of other memory") from None
        start = offloaded.storage_offset() * offloaded.element_size()
        if start % ALIGNMENT or not offloaded.is_contiguous():
            raise ValueError(
                f"expected a contiguous view that begins at a multiple of {ALIGNMENT} bytes, got one at byte {start}"
            )
        return offset + int(start), start + nbytes == length

    def _release(self, address: int, offset: int, nbytes: int) -> None:
        """Give the disk the space of a tensor that is gone; the file has a hole there, and goes on growing at its end.
        Without holes in the file system it keeps the space until it is closed."""
        if self._pid != os.getpid():  # a fork has no such memory, and the file is its parent's
            return
        with self._lock:
            del self._offsets[address]
            _libc().munmap(address, nbytes)
            if self._closer.alive and _libc().fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes) == 0:
                self._used -= nbytes

    def _open_direct(self) -> int | None:
        """The same file once more, past the page cache; None where the file system has no such thing."""
        fd = None
        try:
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            memory = host_memory(ALIGNMENT, pin=False)
            block = memoryview(_bytes_of(memory, ALIGNMENT))
            if os.pwritev(fd, [block], 0) != ALIGNMENT or os.preadv(fd, [block], 0) != ALIGNMENT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        except OSError as error:
            if fd is not None:
                os.close(fd)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._no_room(ALIGNMENT, error) from error
            _warn_once(
                f"The file system of {self.directory} ({self._key}) does not allow direct I/O ({error.strerror}): what "
                "is offloaded goes through the page cache, which is slower and takes memory of the host."
            )
            return None
        os.ftruncate(self._fd, 0)
        return fd

    def _no_room(self, nbytes: int, error: OSError) -> OSError:
        about = os.fstatvfs(self._fd)
        free = about.f_bavail * about.f_frsize
        return OSError(
            error.errno,
            f"{self._key}: expected room for {nbytes} bytes ({format_size(nbytes)}) more in {self.name}, which has "
            f"{self._used} bytes, and got: {error.strerror}. {free} bytes ({format_size(free)}) are free there; "
            "free some more or name a directory on another disk",
        )

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(f"{self.name} belongs to process {self._pid}, of which process {os.getpid()} is a fork")
        if not self._closer.alive:
            raise ValueError(f"{self.name} is closed")


class SwapTransfer(Transfer):
    """A read or a write under way. Both ends live until it has ended."""

    def __init__(
        self, request: IOTask | None, offloaded: torch.Tensor, check: Callable[[], None] | None = None
    ) -> None:
        self._request = request
        self._offloaded: torch.Tensor | None = offloaded
        self._check = check

    def wait(self) -> None:
        """Wait until the transfer has ended. Raises OSError with the file, the position and the bytes if it failed, or
        if a checksum is not what it was. May be called several times."""
        if self._request is not None:
            self._request.wait()
        self._offloaded = None
        if self._check is not None:
            self._check()
            self._check = None


def _open_nameless(directory: Path, rank: int, key: str) -> int:
    """A new file in a directory, which has no name there (any more)."""
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise NotADirectoryError(
            errno.ENOTDIR,
            f"{key}: expected a directory on a fast disk of this host, and {directory} {what}; make it or "
            "name another one",
        )
    try:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
        fd, path = tempfile.mkstemp(prefix=f"zerolite-swap-rank{rank}-", dir=directory)
        os.unlink(path)
        return fd
    except OSError as error:
        raise OSError(
            error.errno,
            f"{key}: expected a directory in which files can be made, and making one in {directory} failed: "
            f"{error.strerror}",
        ) from error


def _close(fd: int, direct: int | None) -> None:
    os.close(fd)
    if direct is not None:
        os.close(direct)


def _bytes_of(tensor: torch.Tensor, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The memory of a tensor, which must live as long."""
    return (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())


def _compare(sums: array[int], offset: int, memory: torch.Tensor, nbytes: int, name: str) -> None:
    """Compare the checksums of what has been read into ``memory``, which must live until then."""
    compare(sums, offset, _bytes_of(memory, nbytes), name)


def _map(fd: int, offset: int, nbytes: int) -> int:
    """The address of a mapping of a file's part, which forks do not have. (An `mmap.mmap` would keep a descriptor of
    its own open, and there may be thousands.)"""
    address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _libc().madvise(address, nbytes, mmap.MADV_DONTFORK)
    return int(address)


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    size, offset, number = ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
    declare(library.mmap, ctypes.c_void_p, ctypes.c_void_p, size, number, number, number, offset)
    declare(library.munmap, number, ctypes.c_void_p, size)
    declare(library.madvise, number, ctypes.c_void_p, size, number)
    declare(library.fallocate, number, number, number, offset, offset)
    return library


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
