"""Staging buffers, and what passes through them, with a file whose reads and writes end when they are waited for."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import torch

from zerolite.offload.placements import DiskPlacement, Placement, Placements, Transfer
from zerolite.offload.transfers import StagingPool, Transfers

CPU = torch.device("cpu")


class Copying(Transfer):
    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy: Callable[[], object] | None = copy

    def wait(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()


class LateFile:
    """Copies when it is waited for. ``fails``: the next that is."""

    def __init__(self) -> None:
        self.under_way: list[Copying] = []
        self.fails = False

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def read(self, offloaded: torch.Tensor, into: torch.Tensor) -> Copying:
        return self._begin(into, offloaded)

    def write(self, offloaded: torch.Tensor, source: torch.Tensor) -> Copying:
        return self._begin(offloaded, source)

    def _begin(self, target: torch.Tensor, source: torch.Tensor) -> Copying:
        memory = source if target.numel() > source.numel() else target
        assert memory.numel() == target.numel() == source.numel()

        def copy() -> None:
            if self.fails:
                raise OSError(errno.EIO, "the disk is gone")
            target.copy_(source)

        self.under_way.append(Copying(copy))
        return self.under_way[-1]

    def forget_cached(self) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """There is nothing to close."""


def disk() -> tuple[Transfers, DiskPlacement, LateFile]:
    file = LateFile()
    placement = DiskPlacement(file, pin=False)
    return Transfers(Placements(CPU, optimizer=placement, parameters=Placement(CPU))), placement, file


def test_buffers_are_used_again_and_do_not_grow_in_number() -> None:
    """Whatever the order of lengths, if the longest is told."""
    pool = StagingPool(pin=False)
    for numel in (10, 5000, 100_000, 7, 100_000, 60_000):
        first, second = (pool.take(numel, torch.float32, longest=400_000) for _ in range(2))
        assert first.data_ptr() != second.data_ptr()
        pool.give_back(first)
        pool.give_back(second[1:])
    assert [memory.numel() for memory in pool.memory()] == [401_408] * 2


def test_to_and_from_disk_without_a_stop_on_the_way() -> None:
    transfers, placement, file = disk()
    offloaded = torch.arange(5000.0)
    here = transfers.pool.take(5000, torch.float32)
    reading = transfers.bring(offloaded, placement, here)
    assert len(file.under_way) == 1 and len(transfers.pool.memory()) == 1
    reading.wait()
    assert torch.equal(here, offloaded)
    here += 1
    writing = transfers.send(here, offloaded, placement)
    assert torch.equal(offloaded, torch.arange(5000.0))
    writing.finish()
    assert torch.equal(offloaded, torch.arange(5000.0) + 1)


@pytest.mark.parametrize("offset", [0, 3])
def test_what_cannot_travel_directly_goes_through_a_buffer(offset: int) -> None:
    """Memory of another owner, or from the middle of a block on."""
    transfers, placement, file = disk()
    offloaded = torch.arange(5000.0)
    here = transfers.pool.take(6000, torch.float32)[offset : 5000 + offset] if offset else torch.zeros(5000)
    reading = transfers.bring(offloaded, placement, here)
    reading.advance()
    reading.wait()
    assert torch.equal(here, offloaded)
    reading.finish()
    reading.finish()
    writing = transfers.send(here, offloaded.zero_(), placement)
    assert len(file.under_way) == 2
    here.fill_(-1)  # it has been copied
    writing.finish()
    assert torch.equal(offloaded, torch.arange(5000.0))
    assert len(transfers.pool._free) == 1, "the buffer on the way was not given back, or twice"


def test_an_error_is_raised_by_whoever_waits() -> None:
    transfers, placement, file = disk()
    file.fails = True
    for direct in (True, False):
        here = transfers.pool.take(10, torch.float32) if direct else torch.zeros(10)
        for transfer in (
            transfers.bring(torch.zeros(10), placement, here),
            transfers.send(here, torch.zeros(10), placement),
        ):
            with pytest.raises(OSError, match="the disk is gone"):
                transfer.wait()
