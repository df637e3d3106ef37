"""Speed of the disk, the page cache and the memory by themselves: bytes to a file until on the disk, and back."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import together

DD_BLOCK = 8 << 20
COPIES = 3
_RANDOM_BYTES = 64 << 20  # more than a CPU's caches hold


def files_under(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def part_of(directory: Path) -> list[Path]:
    """Return as many of the files as any rank's, whichever rank wrote them."""
    return files_under(directory)[dist.get_rank() :: dist.get_world_size()]


def remove(directory: Path) -> None:
    """Delete a directory of all ranks."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    dist.barrier()


def size_of(paths: Iterable[Path]) -> int:
    """Bytes in all of them."""
    return sum(path.stat().st_size for path in paths)


def sync(paths: Iterable[Path]) -> None:
    """Files and directories are on the disk when this returns."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def dd_write(path: Path, nbytes: int, direct: bool = False) -> None:
    """A new file of zeros, on the disk when this returns. direct: past the page cache."""
    flags = ["oflag=direct"] if direct else []
    _dd("if=/dev/zero", f"of={path}", f"count={nbytes}", "iflag=count_bytes,fullblock", "conv=fsync,excl", *flags)


def allows_direct(path: Path) -> bool:
    """Tell if a file at ``path``, which is not there, could be written past the page cache."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def dd_read(path: Path) -> None:
    _dd(f"if={path}", "of=/dev/null")


def fetch(paths: Iterable[Path]) -> None:
    """Files are in the page cache when this returns."""
    for path in paths:
        dd_read(path)


def _dd(*operands: str) -> None:
    subprocess.run(["dd", f"bs={DD_BLOCK}", "status=none", *operands], check=True)


def random_bytes() -> memoryview:
    """For :func:`write`: no disk can store them in less room."""
    return memoryview(os.urandom(_RANDOM_BYTES))


def write(path: Path, nbytes: int, source: memoryview) -> None:
    """A new file of ``source``, again and again, on the disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        while nbytes > 0:
            nbytes -= os.write(descriptor, source[:nbytes])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget(paths: Iterable[Path]) -> bool:
    """Drop files, which must be on the disk, from the page cache. False if most of them stay, as in a tmpfs."""
    cached = total = 0
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            cached += _cached_pages(file.fileno())
            total += -(-path.stat().st_size // mmap.PAGESIZE)
    return 2 * cached < total


def _cached_pages(descriptor: int) -> int:
    size = os.fstat(descriptor).st_size
    if not size:
        return 0
    in_memory = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    # A private mapping: writable, so that ctypes gives its address, and yet it shows the pages of the file.
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        failed = mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), in_memory)
        del first  # or the mapping could not be closed
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return sum(state & 1 for state in bytes(in_memory))


def copies(nbytes: int) -> dict[str, float]:
    """Time a copy on each rank at the same time, into memory in use and into new memory."""

    def memory() -> Tensor:
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)

    source, target = memory().fill_(1), memory().fill_(2)
    in_use = statistics.median(together(lambda: target.copy_(source)) for _ in range(COPIES))
    return {"copy_s": in_use, "new_copy_s": together(lambda: memory().copy_(source))}
