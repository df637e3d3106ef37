"""Offloaded gradients: reduced gradients kept on the host or on disk until the step.

They leave bucket by bucket while backward runs, as soon as they are reduced, and what the step must know of them all
(their squares) is taken before. Sums over several backwards come back for the addition, so that it is done on the
device with the bits that it has without offload.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from zerolite.offload.placements import Placements, Transfer
from zerolite.offload.transfers import DONE, Transfers
from zerolite.utils.memory_tags import BUCKETS, GRADIENTS, tag_memory

_ON_THEIR_WAY = 2  # buckets; more would hold memory of the device


class OffloadedGradients:
    """Offloaded mean gradients of one rank; nothing here is a collective. ``on_leaving(bucket, gradient)`` is called
    with every mean gradient that leaves the device, while it is still there."""

    def __init__(
        self, placements: Placements, transfers: Transfers, on_leaving: Callable[[int, torch.Tensor], None]
    ) -> None:
        self._placements, self._transfers, self._on_leaving = placements, transfers, on_leaving
        self._longest = 0  # bytes of a bucket's gradient
        self._stored: dict[int, torch.Tensor] = {}
        self._leaving: dict[int, Transfer] = {}
        self._arrived: Transfer = DONE  # the last that was fetched
        self._lost: dict[int, OSError] = {}  # by bucket: why its gradient is not where it should be

    def expect(self, longest: int) -> None:
        """A bucket's gradient has at most so many bytes from now on."""
        self._longest = longest

    def is_offloaded(self, bucket: int) -> bool:
        """True if a bucket's gradient is stored where the device does not reach it."""
        return not self._placements.within_reach(self._placements.of_optimizer(bucket), on_host=False)

    def keep(self, bucket: int, gradient: torch.Tensor) -> torch.Tensor:
        """Store ``gradient``, which is on the device, of a bucket that :meth:`is_offloaded`; return the stored
        tensor."""
        self._on_leaving(bucket, gradient)
        tag_memory(gradient, BUCKETS)
        for leaving in self._leaving.values():
            with contextlib.suppress(OSError):  # the waiting call raises it
                leaving.advance()
        while len(self._leaving) >= _ON_THEIR_WAY:
            self.wait(next(iter(self._leaving)))
        stored, placement = self.stored(bucket, gradient.numel(), gradient.dtype), self._placements.of_optimizer(bucket)
        self._leaving[bucket] = self._transfers.send(gradient, stored, placement, self._longest)
        return stored

    def stored(self, bucket: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of a bucket's gradient; it stays for all steps."""
        self.wait(bucket)
        stored = self._stored.get(bucket)
        if stored is None or stored.dtype != dtype:
            self._stored.pop(bucket, None)
            stored = self._stored[bucket] = self._placements.of_optimizer(bucket).zeros(numel, dtype, GRADIENTS)
        return stored

    def fetch(self, bucket: int, offloaded: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device of a gradient that is stored."""
        self.wait(bucket)
        gradient = tag_memory(torch.empty_like(offloaded, device=self._placements.device), BUCKETS)
        try:
            coming = self._transfers.bring(offloaded, self._placements.of_optimizer(bucket), gradient, self._longest)
            coming.wait()
        except OSError as error:
            self._lost[bucket] = error
            raise
        # The device waits for it, not the host, which lets the buffers on the way go when the next one comes.
        self._arrived.finish()
        self._arrived = coming
        return gradient

    def wait(self, bucket: int) -> None:
        """Afterwards the host may read what :meth:`keep` has given for the bucket. Raises OSError if the disk has
        failed, every time until :meth:`clear`."""
        try:
            self._leaving.pop(bucket, DONE).finish()
        except OSError as error:
            self._lost[bucket] = error
        if bucket in self._lost:
            raise self._lost[bucket]

    def wait_all(self) -> None:
        for bucket in (*self._leaving, *self._lost):
            self.wait(bucket)

    def clear(self) -> None:
        """No gradient is wanted any more."""
        for leaving in self._leaving.values():
            with contextlib.suppress(OSError):
                leaving.finish()
        self._leaving.clear()
        self._lost.clear()
        self._arrived.finish()
        self._arrived = DONE

    def memory(self) -> Iterable[torch.Tensor]:
        """The gradients that are stored off the device."""
        return self._stored.values()
