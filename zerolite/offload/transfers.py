"""Asynchronous copies between device, host and disk.

Copies between device and host run on two streams of their own, one for each direction, because the link carries both at
once. Copies to and from the disk are the asynchronous reads and writes of the swap file. A copy between disk and device
goes through a staging buffer on the host.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import torch

from zerolite.offload.placement import BLOCK, DONE, DiskPlacement, Placement, Placements, Transfer, whole_blocks
from zerolite.utils.accelerator import current_platform
from zerolite.utils.memory_tags import HOST, STAGING, tag_memory

# A free buffer is used for a shorter tensor if it is at most so many times longer, or has at most so many bytes.
_MAX_RATIO = 4
_MAX_SMALL = 1 << 20


class _StreamCopy(Transfer):
    def __init__(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        # The current stream may still write the source, or read the target.
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            # Later copies run on the same stream: an event waits for this one alone.
            self._event = torch.cuda.Event()
            self._event.record(stream)
        # Kept alive until the copy has ended: the allocator must not hand out memory in use by the copy.
        self._ends = (target, source)
        self._stream = stream

    def wait(self) -> None:
        if self._ends[0].is_cuda:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)
        else:
            self._event.synchronize()

    def finish(self) -> None:
        self._event.synchronize()


class _ChainedTransfer(Transfer):
    """Transfer, and a second one that begins when the first has ended."""

    def __init__(self, first: Transfer, then: Callable[[], Transfer]) -> None:
        """then: function that begins the second transfer."""
        self._first: Transfer | None = first
        self._then = then
        self._second: Transfer = DONE
        if first is DONE:
            self.advance()

    def advance(self) -> None:
        if self._first is not None:
            # Set to None last: if the first transfer fails, each waiting caller gets its error.
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
    """Staging buffers on the host, which are reused and never freed.

    A caller that acquires buffers of different lengths passes the length of the longest. Then all of its buffers have
    that length, and each of them fits the next time.
    """

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._free: list[torch.Tensor] = []
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # storages of all buffers, by id

    def acquire(
        self, numel: int, dtype: torch.dtype, longest: int = 0, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return uninitialised memory of whole blocks that begins at a page, as a tensor of shape [numel].

        Args:
            numel: elements.
            dtype: dtype of the tensor.
            longest: bytes of the longest buffer that the caller acquires.
            like: in a dry run, one of its tensors. The buffer then belongs to the dry run too, whatever torch modes are
                active.
        """
        nbytes = whole_blocks(max(numel * dtype.itemsize, longest))
        fitting = [memory for memory in self._free if nbytes <= memory.numel() <= max(_MAX_RATIO * nbytes, _MAX_SMALL)]
        if fitting:
            memory = min(fitting, key=torch.Tensor.numel)
            self._free = [other for other in self._free if other is not memory]
        else:
            with torch.inference_mode(False):  # inference tensors could not be written outside of inference mode
                memory = tag_memory(current_platform().host_memory(nbytes, self._pin, like), STAGING, HOST)
            storage = memory.untyped_storage()
            key = id(storage)
            self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None))
        return memory.narrow(0, 0, numel * dtype.itemsize).view(dtype)

    def release(self, tensor: torch.Tensor) -> None:
        """Free the buffer of a tensor from :meth:`acquire` for reuse."""
        with torch.inference_mode(False):
            self._free.append(tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` lies in a buffer of this pool."""
        return id(tensor.untyped_storage()) in self._alive

    def memory(self) -> list[torch.Tensor]:
        """Return all buffers, in use or free."""
        alive = [storage for ref in self._alive.values() if (storage := ref()) is not None]
        return [torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage) for storage in alive]


class StagedTransfer(Transfer):
    """Transfers through one staging buffer, which goes back to its pool when they have ended.

    The pipelines of updates, gathers and gradients consist of these: stage in, use, write back.
    """

    def __init__(self, pool: StagingPool, buffer: torch.Tensor | None, *transfers: Transfer) -> None:
        """buffer: the staging buffer; None if the transfers need none."""
        self._pool, self._buffer, self._pending = pool, buffer, list(transfers)

    def add(self, transfer: Transfer) -> None:
        self._pending.append(transfer)

    def wait(self) -> None:
        for transfer in self._pending:
            transfer.wait()

    def advance(self) -> None:
        for transfer in self._pending:
            transfer.advance()

    def finish(self) -> None:
        """Wait until all transfers have ended, and give the buffer back. Then raise the first error."""
        errors: list[OSError] = []
        while self._pending:
            try:
                self._pending.pop().finish()
            except OSError as error:
                errors.append(error)
        # Only now: a transfer that has not ended would still use the buffer of the next one.
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.release(buffer)
        if errors:
            raise errors[0]


class Transfers:
    """Copies of one rank's engine. No method is a collective.

    Attributes:
        pool: staging buffers of all copies.
    """

    def __init__(self, placements: Placements) -> None:
        cuda = placements.device.type == "cuda"
        self.pool = StagingPool(pin=placements.optimizer.pin or placements.parameters.pin)
        self._to_device = torch.cuda.Stream(placements.device) if cuda else None
        self._to_host = torch.cuda.Stream(placements.device) if cuda else None

    def stage_in(self, offloaded: torch.Tensor, placement: Placement, into: torch.Tensor, longest: int = 0) -> Transfer:
        """Begin to copy an offloaded range to the device, or to a buffer of the pool.

        Args:
            offloaded: range of a flat tensor. On disk it begins at a multiple of
                :data:`~zerolite.offload.placement.SPAN_ALIGNMENT` elements.
            placement: placement of ``offloaded``.
            into: target of the same length and dtype.
            longest: bytes of the longest range that the caller copies.
        """
        if not isinstance(placement, DiskPlacement):
            return self.copy(offloaded, into)
        if self._fits_direct_io(into):
            return placement.file.read(offloaded, into)
        through = self.pool.acquire(offloaded.numel(), offloaded.dtype, longest, offloaded)
        read = placement.file.read(offloaded, through)
        return _ChainedTransfer(read, lambda: StagedTransfer(self.pool, through, self.copy(through, into)))

    def write_back(
        self, source: torch.Tensor, offloaded: torch.Tensor, placement: Placement, longest: int = 0
    ) -> Transfer:
        """Begin to copy ``source`` to the offloaded range: the reverse of :meth:`stage_in`."""
        if not isinstance(placement, DiskPlacement):
            return self.copy(source, offloaded)
        file = placement.file
        if self._fits_direct_io(source):
            return file.write(offloaded, source)
        through = self.pool.acquire(source.numel(), source.dtype, longest, source)
        copied = self.copy(source, through)
        return _ChainedTransfer(copied, lambda: StagedTransfer(self.pool, through, file.write(offloaded, through)))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Begin to copy between two tensors, each on the device or the host."""
        if target.device == source.device or self._to_host is None or self._to_device is None:
            target.copy_(source)
            return DONE
        return _StreamCopy(target, source, self._to_device if target.is_cuda else self._to_host)

    def to_device_stream(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the current stream is that of the copies to the device: work launched in it runs
        after them."""
        return contextlib.nullcontext() if self._to_device is None else torch.cuda.stream(self._to_device)

    def _fits_direct_io(self, tensor: torch.Tensor) -> bool:
        """Return True if direct I/O can read and write the tensor. It must lie in a buffer of the pool, begin with a
        block, and have its last block within the buffer."""
        start = tensor.storage_offset() * tensor.element_size()
        end = start + whole_blocks(tensor.numel() * tensor.element_size())
        return self.pool.has(tensor) and not start % BLOCK and end <= tensor.untyped_storage().nbytes()
