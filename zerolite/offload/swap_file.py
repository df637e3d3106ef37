"""Swap file of one rank on a disk, which holds flat tensors.

The file has no name: nothing is left of it when the process ends, however it ends, and no other process can remove it.
Its space is allocated before a tensor is returned. So a full disk is found at once and not in the middle of a step.

A tensor of the file is a mapping of a part of it. The step does not use the mapping. It copies parts between the file
and buffers, and bypasses the page cache if the file system allows it. The kernel keeps both views equal as long as a
part is not used through both at the same time.
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
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerolite.offload.placement import BLOCK, Transfer, whole_blocks
from zerolite.utils.accelerator import host_memory
from zerolite.utils.builder import declare
from zerolite.utils.module_hook import finalize_before_exit
from zerolite.utils.text import format_size

if TYPE_CHECKING:
    from zerolite.ops.async_io import AsyncIO, IOTask

logger = logging.getLogger("zerolite")

_MAP_ALIGNMENT = max(BLOCK, mmap.ALLOCATIONGRANULARITY)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # modes of fallocate(2)


class SwapFile:
    """Swap file, described in the module's docstring. Any thread may use it. A fork of the process may not, because
    the tensors are not mapped there.

    Code that reads or writes a tensor of the file itself, not with :meth:`read` and :meth:`write`, calls
    :meth:`drop_page_cache` afterwards.

    Attributes:
        directory: its directory.
        name: description of the file, for errors.
    """

    def __init__(self, directory: str | Path, io: AsyncIO, rank: int, key: str) -> None:
        """
        Args:
            directory: existing directory on a disk of this host.
            io: reader and writer.
            rank: this rank, for errors.
            key: key of the config that names the directory, for errors.

        Raises:
            OSError: the file cannot be made in the directory.
        """
        self.directory = Path(directory)
        self.name = f"the swap file of rank {rank} in {self.directory}"
        self._io = io
        self._key = key
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._end = self._used = 0  # bytes of the file, and bytes of its tensors
        self._offsets: dict[int, tuple[int, int]] = {}  # (position in the file, bytes) by address of the mapping
        self._pending: weakref.WeakSet[SwapTransfer] = weakref.WeakSet()
        self._read_errors: list[str] = []  # since all tensors were written anew
        self._fd = _open_nameless(self.directory, rank, key)
        self._direct: int | None = None
        try:
            self._direct = self._open_direct()
        except BaseException:
            os.close(self._fd)
            raise
        # Not at exit: requests may still use the file, and the process ends anyway.
        self._closer = finalize_before_exit(self, _close, self._fd, self._direct)

    @property
    def direct(self) -> bool:
        """True if reads and writes bypass the page cache."""
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
        padded = -(-nbytes // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        with self._lock:
            self._check_open()
            offset = self._end
            try:
                os.posix_fallocate(self._fd, offset, padded)
                address = _map(self._fd, offset, padded)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, offset)
                raise self._allocation_error(padded, error) from error
            self._end += padded
            self._used += padded
            memory = (ctypes.c_ubyte * nbytes).from_address(address)
            self._offsets[address] = (offset, nbytes)
            finalize_before_exit(memory, self._release, address, offset, padded)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def read(self, offloaded: torch.Tensor, into: torch.Tensor) -> SwapTransfer:
        """Begin to read a part of a tensor of this file into other memory.

        Args:
            offloaded: view that begins at a multiple of 4096 bytes.
            into: tensor of as many bytes. Its address is a multiple of 4096, and its memory reaches to the next
                multiple after its end, because whole blocks are read.

        Raises:
            ValueError: one of the tensors is not like that.

        Returns:
            the transfer, whose ``wait`` raises OSError if the disk fails.
        """
        return self._begin(False, offloaded, into)

    def write(self, offloaded: torch.Tensor, source: torch.Tensor) -> SwapTransfer:
        """Begin to write other memory into a part of a tensor of this file: the reverse of :meth:`read`.

        ``source`` must not change before the transfer has ended. ``offloaded`` must also end at a multiple of 4096
        bytes or at the end of its tensor, because whole blocks are written.
        """
        return self._begin(True, offloaded, source)

    def drop_page_cache(self, replaced: bool = False) -> None:
        """Write cached pages of this file to the disk and drop them, because its tensors were read or written
        themselves. Called while no transfer is under way. Otherwise the pages would take memory of the host.

        Args:
            replaced: all tensors have new values, so errors of earlier reads count no more.

        Raises:
            OSError: the disk failed.
        """
        with self._lock:
            self._check_open()
            if replaced:
                self._read_errors.clear()
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                raise OSError(error.errno, f"writing {self.name} to the disk failed: {error.strerror}") from error
            for address, (_, nbytes) in self._offsets.copy().items():
                _libc().madvise(address, nbytes, mmap.MADV_DONTNEED)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def verify(self) -> None:
        """Wait for the transfers under way. Raise OSError if a read has failed since all tensors were written anew."""
        with self._lock:
            self._check_open()
            pending = list(self._pending)
        for transfer in pending:
            with contextlib.suppress(OSError):  # its waiting caller gets the error
                transfer.wait()
        if self._read_errors:
            raise OSError(
                errno.EIO,
                f"a read from the disk has failed, so weights or optimizer states may be lost and cannot be saved: "
                f"{self._read_errors[0]}. Load the last checkpoint, or start again from it",
            )

    def close(self) -> None:
        """Wait until every transfer has ended, and close the file. May be called several times.

        Existing tensors keep their mappings, and with them the space on the disk. They cannot be transferred any more.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            pending = list(self._pending)
        for transfer in pending:
            with contextlib.suppress(OSError):  # its waiting caller gets the error
                transfer.wait()
        with self._lock:
            self._closer()

    def _begin(self, write: bool, offloaded: torch.Tensor, memory: torch.Tensor) -> SwapTransfer:
        nbytes = offloaded.numel() * offloaded.element_size()
        if memory.numel() * memory.element_size() != nbytes:
            raise ValueError(f"expected {nbytes} bytes, got {memory.numel() * memory.element_size()}")
        if memory.data_ptr() % BLOCK:
            raise ValueError(f"expected memory that begins at a multiple of {BLOCK} bytes, got {memory.data_ptr()}")
        with self._lock:
            self._check_open()
            if nbytes == 0:
                return SwapTransfer(None, offloaded)
            offset, is_end = self._offset_of(offloaded, nbytes)
            if write and not is_end and nbytes % BLOCK:
                raise ValueError(f"expected a view that ends with a block of {BLOCK} bytes, got {nbytes} bytes")
            padded, fd = whole_blocks(nbytes), self._fd if self._direct is None else self._direct
            begin = self._io.write if write else self._io.read
            request = begin(fd, memory, offset, padded, self.name)
            transfer = SwapTransfer(request, offloaded, None if write else self._read_errors)
            self._pending.add(transfer)
        return transfer

    def _offset_of(self, offloaded: torch.Tensor, nbytes: int) -> tuple[int, bool]:
        """Return the position of a view in the file, and True if it ends where its tensor does."""
        try:
            offset, length = self._offsets[offloaded.untyped_storage().data_ptr()]
        except KeyError:
            raise ValueError(f"expected a tensor of {self.name}, got one of other memory") from None
        start = offloaded.storage_offset() * offloaded.element_size()
        if start % BLOCK or not offloaded.is_contiguous():
            raise ValueError(
                f"expected a contiguous view that begins at a multiple of {BLOCK} bytes, got one at byte {start}"
            )
        return offset + int(start), start + nbytes == length

    def _release(self, address: int, offset: int, nbytes: int) -> None:
        """Free the space of a tensor that was deleted.

        The file gets a hole there and still grows at its end. If the file system has no holes, the space is free when
        the file is closed.
        """
        if self._pid != os.getpid():  # a fork has no such mapping, and the file belongs to its parent
            return
        with self._lock:
            del self._offsets[address]
            _libc().munmap(address, nbytes)
            if self._closer.alive and _libc().fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes) == 0:
                self._used -= nbytes

    def _open_direct(self) -> int | None:
        """Open the file again for direct I/O, which bypasses the page cache; None if the file system refuses."""
        fd = None
        try:
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            memory = host_memory(BLOCK, pin=False)
            block = memory.numpy().data
            # Some file systems open it and fail with the first access.
            if os.pwritev(fd, [block], 0) != BLOCK or os.preadv(fd, [block], 0) != BLOCK:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        except OSError as error:
            if fd is not None:
                os.close(fd)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._allocation_error(BLOCK, error) from error
            _warn_once(
                f"The file system of {self.directory} ({self._key}) does not allow direct I/O ({error.strerror}), "
                "so offloaded tensors go through the page cache, which is slower and uses host memory."
            )
            return None
        os.ftruncate(self._fd, 0)
        return fd

    def _allocation_error(self, nbytes: int, error: OSError) -> OSError:
        filesystem = os.fstatvfs(self._fd)
        free = filesystem.f_bavail * filesystem.f_frsize
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
    """Read or write under way, which keeps both of its tensors alive."""

    def __init__(self, request: IOTask | None, offloaded: torch.Tensor, errors: list[str] | None = None) -> None:
        """
        Args:
            errors: messages of failed reads, to which that of this one is added; None for a write.
        """
        self._request = request
        self._offloaded: torch.Tensor | None = offloaded
        self._errors = errors

    def wait(self) -> None:
        """Wait until the transfer has ended. May be called several times.

        Raises:
            OSError: it failed; the message has the file, the position and the bytes.
        """
        try:
            if self._request is not None:
                self._request.wait()
            self._offloaded = None
        except OSError as error:
            if self._errors is not None:
                self._errors.append(error.strerror or str(error))
                self._errors = None
            raise


def _open_nameless(directory: Path, rank: int, key: str) -> int:
    """Open a new file without a name, so that it is deleted with its last descriptor and mapping."""
    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist"
        raise NotADirectoryError(
            errno.ENOTDIR,
            f"{key}: expected a directory on a fast disk of this host, and {directory} {problem}; make it or "
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


def _map(fd: int, offset: int, nbytes: int) -> int:
    """Map a part of a file into memory and return the address. Forks do not inherit the mapping.

    Python's ``mmap.mmap`` would keep a descriptor open for each mapping, and there may be thousands.
    """
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
