"""Timers of a device: spans of time between events, read without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class HostEvent:
    """A time of the host's clock, with the methods of a CUDA event that are used here."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: object) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return (end._at - self._at) * 1000.0


TimingEvent = Any
"""A ``torch.cuda.Event`` or a :class:`HostEvent`."""


class DeviceTimers:
    """Spans of time on ``device``: of its current stream on CUDA, of the host's clock elsewhere.

    Spans are reported in the order in which they were added, each as soon as the device has passed it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[TimingEvent] = []  # events to use again: creating a CUDA event is slow
        self._unread: deque[_Span | Callable[[], None]] = deque()

    def now(self) -> TimingEvent:
        """Return an event that the device reaches when it has done everything queued so far."""
        cuda = self._device.type == "cuda"
        moment = self._spare.pop() if self._spare else new_timing_event(cuda)
        moment.record(torch.cuda.current_stream(self._device) if cuda else None)
        return moment

    def add(self, start: TimingEvent, end: TimingEvent, report: Callable[[float], None], goes_on: bool = False) -> None:
        """Call ``report`` with the milliseconds from ``start`` to ``end``, later.

        Args:
            start: begin of the span.
            end: end of the span.
            report: function of the milliseconds.
            goes_on: ``end`` is also the begin of the next span.
        """
        self._unread.append(_Span(start, end, report, goes_on))

    def then(self, call: Callable[[], None]) -> None:
        """Call ``call()`` when all spans added so far have been reported."""
        self._unread.append(call)

    def read(self, wait: bool = False) -> None:
        """Report the spans that the device has passed.

        Args:
            wait: wait for the device and report all spans.
        """
        while self._unread:
            first = self._unread[0]
            if isinstance(first, _Span):
                if wait:
                    first.end.synchronize()
                elif not (first.start.query() and first.end.query()):
                    return
                first.report(first.start.elapsed_time(first.end))
                self._spare += [first.start] if first.goes_on else [first.start, first.end]
            else:
                first()
            self._unread.popleft()

    def forget(self) -> None:
        """Drop the spans that have not been reported, with the functions they would be reported to."""
        self._unread.clear()


class _Span(NamedTuple):
    start: TimingEvent
    end: TimingEvent
    report: Callable[[float], None]
    goes_on: bool


def new_timing_event(cuda: bool) -> TimingEvent:
    return torch.cuda.Event(enable_timing=True) if cuda else HostEvent()  # type: ignore[no-untyped-call]
