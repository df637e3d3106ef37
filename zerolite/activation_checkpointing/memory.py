"""Memory for saved inputs: pinned host memory or device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from zerolite.utils.accelerator import current_platform
from zerolite.utils.finalizers import finalize_before_exit
from zerolite.utils.memory_tags import ACTIVATIONS, DEVICE, HOST, tag_memory

_BLOCK = 4096  # bytes: lengths on the host are multiples of it, so that nearly equal inputs can share a buffer


class BorrowedMemory:
    """Memory in use, uint8 [nbytes], which returns to its source when this object is freed."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class MemorySource(Protocol):
    """Source of memory for saved inputs.

    Copies to and from it run in the order of their launch, so returned memory may be reused at once.
    """

    location: str

    def allocate(self, nbytes: int) -> BorrowedMemory: ...

    def memory(self) -> list[torch.Tensor]:
        """Return the memory that is allocated and not in use."""
        ...


class DeviceMemory:
    """Memory from torch's allocator."""

    location = DEVICE

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, nbytes: int) -> BorrowedMemory:
        return BorrowedMemory(tag_memory(torch.empty(nbytes, dtype=torch.uint8, device=self._device), ACTIVATIONS))

    def memory(self) -> list[torch.Tensor]:
        return []


class HostBuffers:
    """Page-aligned buffers on the host. They are reused, because registering one takes far longer than filling it."""

    location = HOST

    def __init__(self, pin: bool, finish_copies: Callable[[], None]) -> None:
        """
        Args:
            pin: register the memory with CUDA.
            finish_copies: waits until no copy is in flight; called before memory is freed.
        """
        self._pin = pin
        self._finish_copies = finish_copies
        self._free: list[torch.Tensor] = []
        finalize_before_exit(self, finish_copies)

    def allocate(self, nbytes: int) -> BorrowedMemory:
        length = -(-nbytes // _BLOCK) * _BLOCK
        fitting = [index for index, memory in enumerate(self._free) if memory.numel() >= length]
        if fitting:
            memory = self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
        else:
            if self._free:  # free one that is too small: the number of buffers need not grow
                self._finish_copies()
                self._free.pop()
            with torch.inference_mode(False):
                memory = tag_memory(current_platform().host_memory(length, self._pin), ACTIVATIONS, HOST)
        borrowed = BorrowedMemory(memory)
        finalize_before_exit(borrowed, self._free.append, memory)
        return borrowed

    def memory(self) -> list[torch.Tensor]:
        return list(self._free)
