"""Asynchronous copies between device, host and disk.

Between device and host they run on two streams of their own, one for each direction, because the link carries both at
once. To and from disk they are the file's asynchronous reads and writes; between disk and a device there is host memory
in between.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from zerolite.offload.placements import DiskPlacement, Placement, Placements, Transfer
from zerolite.utils.accelerator import current_platform
from zerolite.utils.memory_tags import HOST, STAGING, tag_memory

_BLOCK = 4096  # bytes: what is written to disk directly ends at a multiple
_LARGER = 4  # a buffer may be so many times larger than what is asked of it,
_SMALL = 1 << 20  # or have so many bytes


def whole_blocks(nbytes: int) -> int:
    """``nbytes``, up to the end of a block of a disk."""
    return -(-nbytes // _BLOCK) * _BLOCK


DONE = Transfer()


class _StreamCopy(Transfer):
    def __init__(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(
            torch.cuda.current_stream(stream.device)
        )  # what has made the source, or still reads the target
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)
        self._ends = (target, source)
        self._stream = stream

    def wait(self) -> None:
        if self._ends[0].is_cuda:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)
        else:
            self._event.synchronize()

    def finish(self) -> None:
        self._event.synchronize()


class _TwoHops(Transfer):
    """first, then what ``then`` begins."""

    def __init__(self, first: Transfer, then: Callable[[], Transfer]) -> None:
        self._first: Transfer | None = first
        self._then = then
        self._second: Transfer = DONE
        if first is DONE:
            self.advance()

    def advance(self) -> None:
        if self._first is not None:  # what fails here fails again for each waiting caller
            self._first.finish()
            self._second = self._then()
            self._first = None

    def wait(self) -> None:
        self.advance()
        self._second.wait()

    def finish(self) -> None:
        self.advance()
        self._second.finish()


class StagingPool:
    """Staging buffers on the host, which are used again.

    Buffers are never freed. A caller that takes some of different lengths says how long the longest is: then all are so
    long, and each fits the next time.
    """

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._free: list[torch.Tensor] = []
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by ``_cdata``: those that are alive

    def take(self, numel: int, dtype: torch.dtype, longest: int = 0, like: torch.Tensor | None = None) -> torch.Tensor:
        """[numel], uninitialised, beginning at a page, in memory of whole blocks.

        Args:
            longest: in bytes.
            like: in a dry run, one of its tensors: the buffer is of the dry run too, whatever modes are active.
        """
        nbytes = whole_blocks(max(numel * dtype.itemsize, longest))
        fitting = [memory for memory in self._free if nbytes <= memory.numel() <= max(_LARGER * nbytes, _SMALL)]
        if fitting:
            memory = min(fitting, key=torch.Tensor.numel)
            self._free = [other for other in self._free if other is not memory]
        else:
            with torch.inference_mode(False):  # whose tensors could not be written later
                memory = tag_memory(current_platform().host_memory(nbytes, self._pin, like), STAGING, HOST)
            storage = memory.untyped_storage()
            key = storage._cdata
            self._made[key] = weakref.ref(storage, lambda _: self._made.pop(key, None))
        return memory.narrow(0, 0, numel * dtype.itemsize).view(dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """A tensor of :meth:`take` is not used any more."""
        with torch.inference_mode(False):
            self._free.append(tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))

    def has(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` lies in a buffer of :meth:`take`."""
        return tensor.untyped_storage()._cdata in self._made

    def memory(self) -> list[torch.Tensor]:
        """All buffers, in use or not."""
        alive = [storage for ref in self._made.values() if (storage := ref()) is not None]
        return [torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage) for storage in alive]


class Staged(Transfer):
    """Transfers through a staging buffer, which goes back to its pool when they have ended.

    One step of the pipeline behind updates, gathers and gradients: stage in, use, write back.
    """

    def __init__(self, pool: StagingPool, buffer: torch.Tensor | None, *under_way: Transfer) -> None:
        """buffer: None where they need none."""
        self._pool, self._buffer, self._under_way = pool, buffer, list(under_way)

    def add(self, transfer: Transfer) -> None:
        self._under_way.append(transfer)

    def wait(self) -> None:
        for transfer in self._under_way:
            transfer.wait()

    def advance(self) -> None:
        for transfer in self._under_way:
            transfer.advance()

    def finish(self) -> None:
        """Let the buffer go when all have ended. Raises the first error then."""
        errors: list[OSError] = []
        while self._under_way:
            try:
                self._under_way.pop().finish()
            except OSError as error:
                errors.append(error)
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.give_back(buffer)
        if errors:
            raise errors[0]


class Transfers:
    """The copies of one engine. Called on each rank for itself: nothing here is a collective."""

    def __init__(self, placements: Placements) -> None:
        self._device = placements.device
        cuda = placements.device.type == "cuda"
        self.pool = StagingPool(pin=placements.optimizer.pin or placements.parameters.pin)
        self._to_device = torch.cuda.Stream(placements.device) if cuda else None
        self._to_host = torch.cuda.Stream(placements.device) if cuda else None

    def stage_in(self, offloaded: torch.Tensor, placement: Placement, into: torch.Tensor, longest: int = 0) -> Transfer:
        """Copy ``offloaded``, a range of a flat tensor of ``placement``, to ``into``, of the same length and dtype, on
        the device or of :attr:`pool`. From disk the range begins at a multiple of placements.SPAN_ALIGNMENT elements.
        longest: of all that the caller stages, in bytes."""
        if not isinstance(placement, DiskPlacement):
            return self.copy(offloaded, into)
        if self._direct(into):
            return placement.file.read(offloaded, into)
        through = self.pool.take(offloaded.numel(), offloaded.dtype, longest, offloaded)
        read = placement.file.read(offloaded, through)
        return _TwoHops(read, lambda: Staged(self.pool, through, self.copy(through, into)))

    def write_back(
        self, source: torch.Tensor, offloaded: torch.Tensor, placement: Placement, longest: int = 0
    ) -> Transfer:
        """Copy ``source`` to ``offloaded``: the reverse of :meth:`stage_in`. longest: of all that the caller
        writes, in bytes."""
        if not isinstance(placement, DiskPlacement):
            return self.copy(source, offloaded)
        file = placement.file
        if self._direct(source):
            return file.write(offloaded, source)
        through = self.pool.take(source.numel(), source.dtype, longest, source)
        copied = self.copy(source, through)
        return _TwoHops(copied, lambda: Staged(self.pool, through, file.write(offloaded, through)))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Copy between any two tensors on device and host."""
        if target.device == source.device or self._to_host is None or self._to_device is None:
            target.copy_(source)
            return DONE
        return _StreamCopy(target, source, self._to_device if target.is_cuda else self._to_host)

    def arriving(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the current stream is that of the copies to the device: work launched in it runs after
        them."""
        return contextlib.nullcontext() if self._to_device is None else torch.cuda.stream(self._to_device)

    def _direct(self, tensor: torch.Tensor) -> bool:
        """True if the tensor can be read from disk and written there as it is: it lies in a buffer of the pool, from a
        block's beginning on, and the buffer goes on to the end of its last block."""
        start = tensor.storage_offset() * tensor.element_size()
        end = start + whole_blocks(tensor.numel() * tensor.element_size())
        return self.pool.has(tensor) and not start % _BLOCK and end <= tensor.untyped_storage().nbytes()
