"""Pinned memory on the host, and the copies to and from it on a CUDA stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zerolite.utils.accelerator import current_platform
from zerolite.utils.memory_tags import ACTIVATIONS, HOST, tag_memory
from zerolite.utils.module_hook import finalize_before_exit

_BLOCK = 4096  # bytes: lengths on the host are multiples of it, so that nearly equal inputs can share a buffer

Pair = tuple[torch.Tensor, torch.Tensor]
"""Source and target, of equal length and dtype."""


class Copy:
    """Copies in flight. Sources and targets stay alive until :meth:`wait`, which also runs when this is freed."""

    def __init__(self, pairs: Sequence[Pair], event: torch.cuda.Event | None, device: torch.device) -> None:
        self._pairs = list(pairs)
        self._event = event
        self._device = device

    def wait(self) -> None:
        """Let the current stream wait for the copies. May be called again.

        So it can read the targets, and reuse the memory of the sources.
        """
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None
        self._pairs.clear()

    def __del__(self) -> None:
        self.wait()


class Copies:
    """Stream of the copies in both directions. Without CUDA a copy is complete at once.

    One stream is enough: forward only copies to the host, and backward only from it. So a later copy never overwrites
    memory that an earlier one still reads.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def launch(self, pairs: Sequence[Pair]) -> Copy:
        """Start the copies."""
        if self._stream is None:
            for source, target in pairs:
                target.copy_(source)
            return Copy((), None, self._device)
        self._stream.wait_stream(
            torch.cuda.current_stream(self._device)
        )  # it has made the sources and used the targets
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Copy(pairs, event, self._device)

    def finish(self) -> None:
        """Let the host wait until no copy is in flight."""
        if self._stream is not None:
            self._stream.synchronize()


class BorrowedMemory:
    """Memory in use, uint8 [nbytes], which returns to its source when this object is freed."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class HostBuffers:
    """Page-aligned buffers on the host. They are reused, because registering one takes far longer than filling it.

    Copies to and from them run in the order of their launch, so returned memory may be reused at once.
    """

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
