"""Device and host memory of this process, and the only functions that read tensors on the host.

Every ``.item()`` of the project is here. So a step's synchronisations can be counted, and a dry run on fake tensors
replaces values in a single module.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerolite.utils.module_hook import finalize_before_exit
from zerolite.utils.torch_private import FakeTensor, FakeTensorMode

logger = logging.getLogger("zerolite")


class Platform:
    """Resources of this process: its device, host memory and files. A dry run replaces it by a simulated one."""

    joins_jobs = True  # torch.distributed may be started

    def device(self, local_rank: int) -> torch.device:
        """Return ``cuda:<local_rank>`` (modulo the visible devices) if CUDA is usable, otherwise ``cpu``."""
        if torch.cuda.is_available():
            return torch.device("cuda", local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    def host_memory(self, nbytes: int, pin: bool, like: torch.Tensor | None = None) -> torch.Tensor:
        """Allocate as :func:`host_memory` does.

        Args:
            like: if this tensor has no memory, the result has none.
        """
        return host_memory(nbytes, pin)

    def file(self, make: Callable[[], object]) -> Any:
        """Return the result of ``make``: a file for parts of shards."""
        return make()

    def queues(self, tensor: torch.Tensor) -> bool:
        """Return True if work on ``tensor`` is queued on a device, behind collectives too, while the host goes on."""
        return tensor.is_cuda

    def side_stream(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a stream beside the current one, one for each device. What it runs comes behind what
        the current stream has been given."""
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(side)

    def skip_kernel(self, nbytes: int) -> None:
        """Note that a kernel which would read and write ``nbytes`` is not run, because its tensors have no memory."""

    def read(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Return a copy on the host, and the event after which it is complete; None if it is complete."""
        if not tensor.is_cuda:
            return tensor.clone(), None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensor.device))
        return host, event


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_platforms = [Platform()]


def current_platform() -> Platform:
    """Return the current platform."""
    return _platforms[-1]


@contextlib.contextmanager
def use_platform(other: Platform) -> Iterator[None]:
    """Context in which ``other`` is the current platform."""
    _platforms.append(other)
    try:
        yield
    finally:
        _platforms.remove(other)


def default_device(local_rank: int) -> torch.device:
    """Return ``cuda:<local_rank>`` (modulo the visible devices) if CUDA is usable, otherwise ``cpu``."""
    return current_platform().device(local_rank)


def make_current(device: torch.device) -> None:
    """Make ``device`` the current one for CUDA calls that name no device: of NCCL, of kernels and of the user."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` has no memory, as in a dry run."""
    return type(tensor) is FakeTensor


class FakeMode(FakeTensorMode):
    """The mode of tensors without memory.

    It adds grouped matrix products in every dtype, which the experts of transformers' models use. torch's own shape
    function accepts bf16 alone, though the kernels accept all.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _GROUPED_MM and args[0].dtype != torch.bfloat16:
            return _grouped_mm(*args, **(kwargs or {}))
        return super().dispatch(func, types, args, kwargs)


_GROUPED_MM = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)  # not in torch 2.6


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: object = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty tensor of the shape of the grouped product of ``left`` and ``right``.

    A matrix is divided into groups at ``offs``: its rows, or its k if both are matrices.

    Args:
        left: [rows, k] or [groups, rows, k].
        right: [k, columns] or [groups, k, columns].
    """
    rows, columns = left.shape[-2], right.shape[-1]
    sizes = [rows, columns]
    if left.dim() == 3 and right.dim() == 3:
        sizes = [left.shape[0], rows, columns]
    elif left.dim() == right.dim() and offs is not None:
        sizes = [offs.shape[0], rows, columns]
    return left.new_empty(sizes, dtype=out_dtype)


def address(tensor: torch.Tensor) -> int:
    """Return the address of the elements of ``tensor``, also for tensors without memory.

    It is equal for tensors that begin at the same place of the same memory.
    """
    if type(tensor) is FakeTensor:
        return (id(tensor.untyped_storage()) << 64) + int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return :func:`address` of each tensor, without a Python call for each that has memory."""
    fake = FakeTensor in set(map(type, tensors))
    return [address(tensor) for tensor in tensors] if fake else list(map(torch.Tensor.data_ptr, tensors))


class HostRead:
    """A copy of a tensor to the host, in flight.

    On CUDA the copy runs after the work queued so far, and ``get()`` waits only for the copy. In a dry run the platform
    provides the values of a tensor without memory.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._event = _platforms[-1].read(tensor.detach())

    def get(self) -> torch.Tensor:
        """Return the values, as a CPU tensor."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``values`` from the CPU to ``device`` without waiting for it. Returns ``values`` itself if the device is the
    CPU."""
    if device.type == "cuda":
        values = values.pin_memory()  # CUDA's host allocator keeps it until it has been copied
    return values.to(device, non_blocking=True)


def host_values(tensor: torch.Tensor) -> list[float]:
    """Return the elements of a small tensor as Python numbers; waits for the device."""
    values: Sequence[float] = HostRead(tensor.reshape(-1)).get().tolist()
    return list(values)


def host_value(tensor: torch.Tensor) -> float:
    """Return the single element of ``tensor`` as a Python number; waits for the device."""
    return host_values(tensor)[0]


def host_memory(nbytes: int, pin: bool) -> torch.Tensor:
    """Return [nbytes] of uint8 zeros on the host, which begin at a page, in huge pages if the kernel has them.

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


# mallopt's parameters in <malloc.h>, and the largest values that glibc takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_TRIM, _LARGEST_MMAP = (1 << 31) - 1, 32 << 20


def keep_freed_memory() -> bool:
    """Let this process keep host memory that tensors free, up to 2 GB, instead of returning it to the kernel at
    once. True if it was done.

    A training step on the CPU frees and allocates the same tensors again and again. New memory from the kernel costs
    several times as much to touch as a copy. Only with glibc; not if ZEROLITE_KEEP_FREED_MEMORY=0, nor if the user has
    set malloc's own variables.
    """
    is_set = any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"))
    if is_set or os.environ.get("ZEROLITE_KEEP_FREED_MEMORY", "1") == "0" or platform.libc_ver()[0] != "glibc":
        return False
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST_TRIM)) and bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP))
    return False
