"""Memory for saved inputs: pinned host memory or device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from zerolite.utils.accelerator import current_platform
from zerolite.utils.finalizers import finalize_before_exit
from zerolite.utils.memory_tags import ACTIVATIONS, DEVICE, HOST, tag_memory

_BLOCK = 4096  # bytes: lengths on the host are multiples, so that nearly equal ones are the same


class BorrowedMemory:
    """Memory in use, uint8 [nbytes]; it goes back to where it was taken from when this object is freed."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class MemorySource(Protocol):
    """Give out memory. Copies to and from it run in the order in which they are launched, so what has gone back may be
    given out at once."""

    location: str

    def take(self, nbytes: int) -> BorrowedMemory: ...

    def memory(self) -> list[torch.Tensor]:
        """Return the memory that has been allocated and is not used now."""
        ...


class DeviceMemory:
    """Memory from torch's allocator."""

    location = DEVICE

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, nbytes: int) -> BorrowedMemory:
        return BorrowedMemory(tag_memory(torch.empty(nbytes, dtype=torch.uint8, device=self._device), ACTIVATIONS))

    def memory(self) -> list[torch.Tensor]:
        return []


class HostBuffers:
    """Page-aligned buffers on the host that are used again: to register one costs far more than to fill it."""

    location = HOST

    def __init__(self, pin: bool, quiet: Callable[[], None]) -> None:
        """
        Args:
            pin: registered with CUDA.
            quiet: waits until no copy is under way, before memory is freed.
        """
        self._pin = pin
        self._quiet = quiet
        self._free: list[torch.Tensor] = []
        finalize_before_exit(self, quiet)

    def take(self, nbytes: int) -> BorrowedMemory:
        length = -(-nbytes // _BLOCK) * _BLOCK
        fitting = [index for index, memory in enumerate(self._free) if memory.numel() >= length]
        if fitting:
            memory = self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
        else:
            if self._free:  # too small, and no more buffers are needed than there have been
                self._quiet()
                self._free.pop()
            with torch.inference_mode(False):
                memory = tag_memory(current_platform().host_memory(length, self._pin), ACTIVATIONS, HOST)
        region = BorrowedMemory(memory)
        finalize_before_exit(region, self._free.append, memory)
        return region

    def memory(self) -> list[torch.Tensor]:
        return list(self._free)
