"""Timestamps on the device, read without waiting for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

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

    def record(self, stream: object) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostMoment) -> float:
        return (end._at - self._at) * 1000.0


class Spans:
    """Spans of time on ``device``: of its current stream on CUDA, of the host's clock elsewhere. They are told in the
    order in which they were added, each when the device has passed it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[Moment] = []
        self._unread: deque[_Span | Callable[[], None]] = deque()

    def now(self) -> Moment:
        """This moment; on CUDA the one at which the device has done what is queued so far."""
        cuda = self._device.type == "cuda"
        moment = self._spare.pop() if self._spare else new_moment(cuda)
        moment.record(torch.cuda.current_stream(self._device) if cuda else None)
        return moment

    def add(self, start: Moment, end: Moment, tell: Callable[[float], None], goes_on: bool = False) -> None:
        """``tell`` is given the milliseconds of a span. goes_on: the next span begins with ``end``."""
        self._unread.append(_Span(start, end, tell, goes_on))

    def then(self, call: Callable[[], None]) -> None:
        """``call`` is made when all spans so far have been told."""
        self._unread.append(call)

    def read(self, wait: bool = False) -> None:
        """Tell what the device has come to; ``wait``: the rest, too."""
        while self._unread:
            first = self._unread[0]
            if isinstance(first, _Span):
                if wait:
                    first.end.synchronize()
                elif not (first.start.query() and first.end.query()):
                    return
                first.tell(first.start.elapsed_time(first.end))
                self._spare += [first.start] if first.goes_on else [first.start, first.end]
            else:
                first()
            self._unread.popleft()

    def forget(self) -> None:
        """Let go of the spans that have not been told, and of what they would be told to."""
        self._unread.clear()


class _Span(NamedTuple):
    start: Moment
    end: Moment
    tell: Callable[[float], None]
    goes_on: bool


def new_moment(cuda: bool) -> Moment:
    return torch.cuda.Event(enable_timing=True) if cuda else _HostMoment()
