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
        self._on_leaving = on_leaving
        self._longest = 0
        self._placements = placements
        self._transfers = transfers
        self._homes: dict[int, torch.Tensor] = {}
        self._leaving: dict[int, Transfer] = {}
        self._arrived: Transfer = DONE  # the last that was fetched
        self._lost: dict[int, OSError] = {}  # by bucket: why its gradient is not where it should be

    def expect(self, longest: int) -> None:
        """A bucket's gradient has at most so many bytes from now on."""
        self._longest = longest

    def away(self, bucket: int) -> bool:
        """True if a bucket's gradient is stored where the device does not reach it."""
        return not self._placements.within_reach(self._placements.of_optimizer(bucket), on_host=False)

    def keep(self, bucket: int, gradient: torch.Tensor) -> torch.Tensor:
        """Store ``gradient``, which is on the device, of a bucket that is :meth:`away`; return the stored tensor."""
        self._on_leaving(bucket, gradient)
        tag_memory(gradient, BUCKETS)
        for leaving in self._leaving.values():
            with contextlib.suppress(OSError):  # the waiting call raises it
                leaving.advance()
        while len(self._leaving) >= _ON_THEIR_WAY:
            self.wait(next(iter(self._leaving)))
        home = self.home(bucket, gradient.numel(), gradient.dtype)
        self._leaving[bucket] = self._transfers.send(
            gradient, home, self._placements.of_optimizer(bucket), self._longest
        )
        return home

    def home(self, bucket: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The place of a bucket's gradient; it stays for all steps."""
        self.wait(bucket)
        home = self._homes.get(bucket)
        if home is None or home.dtype != dtype:
            self._homes.pop(bucket, None)
            home = self._homes[bucket] = self._placements.of_optimizer(bucket).zeros(numel, dtype, GRADIENTS)
        return home

    def fetch(self, bucket: int, offloaded: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device of the gradient of a bucket that is :meth:`away`."""
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
        """Yield the gradients that are stored off the device."""
        return self._homes.values()

    def wait_all(self) -> None:
        """:meth:`wait` for all buckets."""
        for bucket in (*self._leaving, *self._lost):
            self.wait(bucket)
