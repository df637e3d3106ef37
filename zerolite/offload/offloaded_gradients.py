"""Offloaded gradients: reduced gradients kept on the host or on disk until the step.

Each bucket's gradient is written back as soon as it is reduced, while backward runs. The step's statistics of it (its
squares) are taken before, on the device. Sums over several backwards are staged in for the addition, so that it is done
on the device with the bits that it has without offload.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from zerolite.offload.placements import Placements, Transfer
from zerolite.offload.transfers import DONE, Transfers
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, tag_memory

_MOST_WRITES = 2  # buckets under way; more would hold memory of the device


class OffloadedGradients:
    """Offloaded mean gradients of one rank; nothing here is a collective."""

    def __init__(
        self, placements: Placements, transfers: Transfers, before_write: Callable[[int, torch.Tensor], None]
    ) -> None:
        """before_write: called with a bucket and its mean gradient while that is on the device."""
        self._placements, self._transfers, self._before_write = placements, transfers, before_write
        self._longest = 0  # bytes of a bucket's gradient
        self._stored: dict[int, torch.Tensor] = {}
        self._writes: dict[int, Transfer] = {}  # under way
        self._staged_in: Transfer = DONE  # the latest
        self._lost: dict[int, OSError] = {}  # by bucket: why its gradient is not where it should be

    def expect(self, longest: int) -> None:
        """A bucket's gradient has at most so many bytes from now on."""
        self._longest = longest

    def is_offloaded(self, bucket: int) -> bool:
        """True if a bucket's gradient is stored where the device cannot access it."""
        return not self._placements.is_accessible(self._placements.of_optimizer(bucket), on_host=False)

    def write_back(self, bucket: int, gradient: torch.Tensor) -> torch.Tensor:
        """Store ``gradient``, which is on the device, of a bucket that :meth:`is_offloaded`; return the stored
        tensor."""
        self._before_write(bucket, gradient)
        tag_memory(gradient, BUCKETS)
        for write in self._writes.values():
            with contextlib.suppress(OSError):  # the waiting call raises it
                write.advance()
        while len(self._writes) >= _MOST_WRITES:
            self.wait(next(iter(self._writes)))
        stored, placement = self.stored(bucket, gradient.numel(), gradient.dtype), self._placements.of_optimizer(bucket)
        self._writes[bucket] = self._transfers.write_back(gradient, stored, placement, self._longest)
        return stored

    def stored(self, bucket: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of a bucket's gradient; it stays for all steps."""
        self.wait(bucket)
        stored = self._stored.get(bucket)
        if stored is None or stored.dtype != dtype:
            self._stored.pop(bucket, None)
            stored = self._stored[bucket] = self._placements.of_optimizer(bucket).zeros(numel, dtype, GRADIENTS)
        return stored

    def stage_in(self, bucket: int, offloaded: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device of a gradient that is stored."""
        self.wait(bucket)
        gradient = tag_memory(torch.empty_like(offloaded, device=self._placements.device), BUCKETS)
        try:
            read = self._transfers.stage_in(offloaded, self._placements.of_optimizer(bucket), gradient, self._longest)
            read.wait()
        except OSError as error:
            self._lost[bucket] = error
            raise
        # The device waits for the copy, and the host does not. Its staging buffer is free when the next one is staged.
        self._staged_in.finish()
        self._staged_in = read
        return gradient

    def wait(self, bucket: int) -> None:
        """Wait until the host may read what :meth:`write_back` has returned. Raises OSError if the disk has failed,
        every time until :meth:`clear`."""
        try:
            self._writes.pop(bucket, DONE).finish()
        except OSError as error:
            self._lost[bucket] = error
        if bucket in self._lost:
            raise self._lost[bucket]

    def wait_all(self) -> None:
        for bucket in (*self._writes, *self._lost):
            self.wait(bucket)

    def clear(self) -> None:
        """No gradient is wanted any more."""
        for write in self._writes.values():
            with contextlib.suppress(OSError):
                write.finish()
        self._writes.clear()
        self._lost.clear()
        self._staged_in.finish()
        self._staged_in = DONE

    def memory(self) -> Iterable[torch.Tensor]:
        """The gradients that are stored off the device."""
        return self._stored.values()
