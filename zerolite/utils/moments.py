"""Timestamps on the device, read without waiting for it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Moment(Protocol):
    """The interface of a CUDA event that is used here."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        """True if the device has reached the event."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to ``end``; both have passed."""
        ...


class _HostMoment:
    """A moment of the host's clock, with the methods of a CUDA event."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: Any) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostMoment) -> float:
        return (end._at - self._at) * 1000.0


class Moments:
    """Make moments of ``device``: of its current stream on CUDA, of the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[Moment] = []

    def now(self) -> Moment:
        """This moment; on CUDA the one at which the device has done what is queued so far."""
        cuda = self._device.type == "cuda"
        moment = self._spare.pop() if self._spare else new_moment(cuda)
        moment.record(torch.cuda.current_stream(self._device) if cuda else None)
        return moment

    def take_back(self, moment: Moment) -> None:
        """``moment`` has been read and may be used again."""
        self._spare.append(moment)


def new_moment(cuda: bool) -> Moment:
    return torch.cuda.Event(enable_timing=True) if cuda else _HostMoment()
