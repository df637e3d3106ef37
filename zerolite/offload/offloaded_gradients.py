"""Offloaded gradients: reduced gradients kept on the host or on disk until the step.

Each bucket's gradient is written back as soon as it is reduced, while backward runs. Before that, the device computes
the step's statistics of it (its squares). To add the gradient of a later backward, the sum is staged in and added on
the device. So it has the same bits as without offload.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from zerolite.offload.placements import Placement, Transfer
from zerolite.offload.transfers import DONE, Transfers
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, tag_memory

_MAX_WRITES = 2  # buckets under way; each of them holds its gradient on the device


class GradientTransfers:
    """Copies of the mean gradients of one rank, of all buckets. Nothing here is a collective."""

    def __init__(self, device: torch.device, transfers: Transfers) -> None:
        self.device, self.transfers = device, transfers
        self.max_nbytes = 0  # of a bucket's gradient: staging buffers have this length, so each fits all
        self._before_write: Callable[[int, torch.Tensor], None] = lambda bucket, gradient: None
        self._writes: list[OffloadedGradient] = []  # under way
        self._last_read: Transfer = DONE

    def connect(self, before_write: Callable[[int, torch.Tensor], None]) -> None:
        """before_write: called with a bucket's index and its mean gradient while the gradient is on the device."""
        self._before_write = before_write

    def set_max_nbytes(self, nbytes: int) -> None:
        """Set the bytes of the longest gradient of a bucket."""
        self.max_nbytes = nbytes

    def begin_write(self, offloaded: OffloadedGradient, gradient: torch.Tensor) -> None:
        """Prepare to write a gradient: wait until few are under way."""
        self._before_write(offloaded.bucket, gradient)
        tag_memory(gradient, BUCKETS)
        for earlier in self._writes:
            earlier.advance()
        while len(self._writes) >= _MAX_WRITES:
            self._writes[0].wait()
        offloaded.wait()
        self._writes.append(offloaded)

    def end_write(self, offloaded: OffloadedGradient) -> None:
        """Note that no write of this gradient is under way."""
        if offloaded in self._writes:
            self._writes.remove(offloaded)

    def keep_read(self, read: Transfer) -> None:
        """Keep a read whose copy the device waits for, and the host does not: its staging buffer is freed one read
        later."""
        self._last_read.finish()
        self._last_read = read


class OffloadedGradient:
    """The mean gradient of one bucket on this rank, where the device cannot access it."""

    def __init__(
        self, shared: GradientTransfers, bucket: int, placement: Placement, numel: int, dtype: torch.dtype
    ) -> None:
        """Allocate the memory now, so that a full disk is an error before training.

        Args:
            shared: copies of all buckets.
            bucket: index of the bucket.
            placement: placement of the gradient.
            numel: its elements.
            dtype: its first dtype.
        """
        self.bucket = bucket
        self._shared, self._placement = shared, placement
        self.stored = placement.zeros(numel, dtype, GRADIENTS)  # reused in every step
        self._write: Transfer = DONE
        self._error: OSError | None = None  # the disk has lost the gradient

    def write_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Begin to store a gradient that is on the device. Return the stored tensor, complete after :meth:`wait`."""
        self._shared.begin_write(self, gradient)
        if self.stored.dtype != gradient.dtype:
            numel = self.stored.numel()
            del self.stored
            self.stored = self._placement.zeros(numel, gradient.dtype, GRADIENTS)
        shared = self._shared
        self._write = shared.transfers.write_back(gradient, self.stored, self._placement, shared.max_nbytes)
        return self.stored

    def stage_in(self) -> torch.Tensor:
        """Return a copy of the stored gradient on the device. Raises OSError if the disk fails."""
        self.wait()
        shared = self._shared
        gradient = tag_memory(torch.empty_like(self.stored, device=shared.device), BUCKETS)
        try:
            read = shared.transfers.stage_in(self.stored, self._placement, gradient, shared.max_nbytes)
            read.wait()
        except OSError as error:
            self._error = error
            raise
        shared.keep_read(read)
        return gradient

    def advance(self) -> None:
        """Begin the second of two chained copies, if the first has ended."""
        with contextlib.suppress(OSError):  # the waiting call raises it
            self._write.advance()

    def wait(self) -> None:
        """Wait until the stored gradient is complete. If the disk has failed, raise OSError in every call until
        :meth:`clear`, because the gradient is lost for all of its readers."""
        self._shared.end_write(self)
        write, self._write = self._write, DONE
        try:
            write.finish()
        except OSError as error:
            self._error = error
        if self._error is not None:
            raise self._error

    def clear(self) -> None:
        """Forget the gradient and its error."""
        with contextlib.suppress(OSError):
            self.wait()
        self._error = None
        self._shared.keep_read(DONE)
