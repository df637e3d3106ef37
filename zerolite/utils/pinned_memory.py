"""Pinned host memory: page-aligned, in huge pages, registered with CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from typing import Any

import torch

from zerolite.utils.module_hook import finalize_before_exit

logger = logging.getLogger("zerolite")


def host_memory(nbytes: int, pin: bool) -> torch.Tensor:
    """Return [nbytes] of uint8 zeros on the host, which begin at a page.

    torch's own pinned memory is rounded up to a power of two and never returned to the system. Raises OSError or
    MemoryError if there is not enough memory.

    Args:
        nbytes: size.
        pin: register it with CUDA, so that copies run asynchronously. If that fails, copies are slower but correct.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # The tensor's storage keeps the exporter alive, and the exporter keeps the mapping. So the finalizer of the
    # exporter unregisters the memory before it is unmapped.
    exporter = (ctypes.c_ubyte * nbytes).from_buffer(_huge(nbytes))
    memory = torch.frombuffer(exporter, dtype=torch.uint8)
    if pin:
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0)) == 0:
            finalize_before_exit(exporter, runtime.cudaHostUnregister, memory.data_ptr())
        else:
            _warn_of_failure(nbytes)
    return memory


def _warn_of_failure(nbytes: int) -> None:
    """Clear the sticky error of a failed registration, so that the next CUDA call does not report it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    if not _warned:
        _warned.append(nbytes)
        logger.warning(
            "CUDA cannot pin %d bytes of the host's memory: copies between host and device wait for each other and are "
            "slow. The limit of locked memory (ulimit -l) or the host's memory may be too small",
            nbytes,
        )


_warned: list[int] = []  # the warning has been logged


def _huge(nbytes: int) -> mmap.mmap:
    """Map memory in huge pages if the kernel has them: a first touch then costs a fifth."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(getattr(mmap, advice))
    return memory
