"""Memory for saved inputs: pinned host memory or device memory, in separate allocations or in one buffer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from zerolite.utils.accelerator import machine
from zerolite.utils.memory_tags import ACTIVATIONS, DEVICE, HOST, tag_memory

logger = logging.getLogger("zerolite")

_BLOCK = 4096  # bytes: lengths on the host are multiples, so that nearly equal ones are the same


class BorrowedMemory:
    """Memory in use, uint8 [nbytes]; it goes back to where it was taken from when this object is freed."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class MemorySource(Protocol):
    """Give out memory. Copies to and from it run in the order in which they are launched, so what has gone back may be
    given out at once."""

    place: str

    def take(self, nbytes: int) -> BorrowedMemory: ...

    def memory(self) -> list[torch.Tensor]:
        """Return the memory that has been allocated and is not used now."""
        ...


def _returning(memory: torch.Tensor, give_back: Callable[[torch.Tensor], object]) -> BorrowedMemory:
    region = BorrowedMemory(memory)
    weakref.finalize(region, give_back, memory).atexit = False
    return region


class DeviceMemory:
    """Memory from torch's allocator."""

    place = DEVICE

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, nbytes: int) -> BorrowedMemory:
        return BorrowedMemory(tag_memory(torch.empty(nbytes, dtype=torch.uint8, device=self._device), ACTIVATIONS))

    def memory(self) -> list[torch.Tensor]:
        return []


class HostBuffers:
    """Page-aligned buffers on the host that are used again: to register one costs far more than to fill it."""

    place = HOST

    def __init__(self, pin: bool, quiet: Callable[[], None]) -> None:
        """
        Args:
            pin: registered with CUDA.
            quiet: waits until no copy is under way, before memory is freed.
        """
        self._pin = pin
        self._quiet = quiet
        self._free: list[torch.Tensor] = []
        weakref.finalize(self, quiet).atexit = False

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
                memory = tag_memory(machine().host_memory(length, self._pin), ACTIVATIONS, HOST)
        return _returning(memory, self._give_back)

    def memory(self) -> list[torch.Tensor]:
        return list(self._free)

    def _give_back(self, memory: torch.Tensor) -> None:
        self._free.append(memory)


class OneBuffer:
    """``number`` equal slots in one piece of memory, allocated with the first checkpoint, whose length is theirs. What
    does not fit gets memory of its own; an unused buffer is made anew for something longer."""

    def __init__(self, source: MemorySource, number: int) -> None:
        self.place = source.place
        self._source = source
        self._number = number
        self._slot = 0  # bytes
        self._whole: BorrowedMemory | None = None
        self._free: list[torch.Tensor] = []
        self._told = False

    def take(self, nbytes: int) -> BorrowedMemory:
        if nbytes > self._slot and not self._in_use():
            self._make(-(-nbytes // _BLOCK) * _BLOCK)
        if nbytes <= self._slot and self._free:
            return _returning(self._free.pop(), self._give_back)
        if not self._told:
            self._told = True
            logger.warning(
                "activation_checkpointing.contiguous_memory_optimization: expected at most number_checkpoints = %d "
                "checkpoints of %d bytes at a time, got one more, or a longer one, which gets memory of its own; "
                "correct activation_checkpointing.number_checkpoints",
                self._number,
                self._slot,
            )
        return self._source.take(nbytes)

    def memory(self) -> list[torch.Tensor]:
        return [*self._free, *self._source.memory()]

    def _in_use(self) -> bool:
        return self._whole is not None and len(self._free) < self._number

    def _make(self, slot: int) -> None:
        self._free.clear()
        self._whole = None  # before the new one is made
        self._slot = slot
        self._whole = self._source.take(slot * self._number)
        memory = self._whole.memory
        self._free = [memory.narrow(0, number * slot, slot) for number in reversed(range(self._number))]

    def _give_back(self, memory: torch.Tensor) -> None:
        if self._whole is not None and memory.numel() == self._slot:
            self._free.append(memory)
