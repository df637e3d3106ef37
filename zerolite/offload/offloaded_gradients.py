"""Offloaded gradients: reduced gradients kept on the host or on disk until the step.

Each bucket's gradient is written back as soon as it is reduced, while backward runs. Before that, the device computes
the step's statistics of it (its squares). To add the gradient of a later backward, the sum is staged in and added on
the device. So it has the same bits as without offload.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from zerolite.offload.placements import Placements, Transfer
from zerolite.offload.transfers import DONE, Transfers
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, tag_memory

_MAX_WRITES = 2  # buckets under way; each of them holds its gradient on the device


class OffloadedGradients:
    """Offloaded mean gradients of one rank. Nothing here is a collective."""

    def __init__(self, placements: Placements, transfers: Transfers) -> None:
        self._placements, self._transfers = placements, transfers
        self._max_nbytes = 0  # of a bucket's gradient
        self._stored: dict[int, torch.Tensor] = {}
        self._writes: dict[int, Transfer] = {}  # under way, by bucket
        self._last_read: Transfer = DONE
        self._errors: dict[int, OSError] = {}  # by bucket, for gradients that the disk has lost

    def connect(self, before_write: Callable[[int, torch.Tensor], None]) -> None:
        """before_write: called with each bucket and its mean gradient while the gradient is on the device."""
        self._before_write = before_write

    def set_max_nbytes(self, nbytes: int) -> None:
        """Set the bytes of the longest gradient of a bucket. Staging buffers have this length, so each fits all."""
        self._max_nbytes = nbytes

    def write_back(self, bucket: int, gradient: torch.Tensor) -> torch.Tensor:
        """Begin to store the reduced gradient of an offloaded bucket, which is on the device. Return the stored
        tensor, which is complete after :meth:`wait`."""
        self._before_write(bucket, gradient)
        tag_memory(gradient, BUCKETS)
        for write in self._writes.values():
            with contextlib.suppress(OSError):  # the waiting call raises it
                write.advance()
        while len(self._writes) >= _MAX_WRITES:
            self.wait(next(iter(self._writes)))
        stored, placement = (
            self.stored(bucket, gradient.numel(), gradient.dtype),
            self._placements.optimizer_placement(bucket),
        )
        self._writes[bucket] = self._transfers.write_back(gradient, stored, placement, self._max_nbytes)
        return stored

    def stored(self, bucket: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the stored gradient of a bucket. Its memory is reused in every step."""
        self.wait(bucket)
        stored = self._stored.get(bucket)
        if stored is None or stored.dtype != dtype:
            self._stored.pop(bucket, None)
            stored = self._stored[bucket] = self._placements.optimizer_placement(bucket).zeros(numel, dtype, GRADIENTS)
        return stored

    def stage_in(self, bucket: int, offloaded: torch.Tensor) -> torch.Tensor:
        """Return a copy of a stored gradient on the device. Raises OSError if the disk fails."""
        self.wait(bucket)
        gradient = tag_memory(torch.empty_like(offloaded, device=self._placements.device), BUCKETS)
        try:
            read = self._transfers.stage_in(
                offloaded, self._placements.optimizer_placement(bucket), gradient, self._max_nbytes
            )
            read.wait()
        except OSError as error:
            self._errors[bucket] = error
            raise
        # The device waits for this copy and the host does not, so the staging buffer is freed one read later.
        self._last_read.finish()
        self._last_read = read
        return gradient

    def wait(self, bucket: int) -> None:
        """Wait until the stored gradient of a bucket is complete. If the disk has failed, raise OSError in every call
        until :meth:`clear`, because the gradient is lost for all of its readers."""
        try:
            self._writes.pop(bucket, DONE).finish()
        except OSError as error:
            self._errors[bucket] = error
        if bucket in self._errors:
            raise self._errors[bucket]

    def wait_all(self) -> None:
        for bucket in (*self._writes, *self._errors):
            self.wait(bucket)

    def clear(self) -> None:
        """Forget all gradients and their errors."""
        for write in self._writes.values():
            with contextlib.suppress(OSError):
                write.finish()
        self._writes.clear()
        self._errors.clear()
        self._last_read.finish()
        self._last_read = DONE

    def memory(self) -> Iterable[torch.Tensor]:
        """Return the stored gradients."""
        return self._stored.values()
