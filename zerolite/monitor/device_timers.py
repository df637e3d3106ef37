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
        self._unread: deque[_Span] = deque()

    def now(self) -> TimingEvent:
        """Return an event that the device reaches when it has done everything queued so far."""
        if self._device.type != "cuda":
            return HostEvent()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, start: TimingEvent, end: TimingEvent, report: Callable[[float], None]) -> None:
        """Call ``report`` with the milliseconds from ``start`` to ``end``, later."""
        self._unread.append(_Span(start, end, report))

    def read(self, wait: bool = False) -> None:
        """Report the spans that the device has passed.

        Args:
            wait: wait for the device and report all spans.
        """
        while self._unread:
            first = self._unread[0]
            if wait:
                first.end.synchronize()
            elif not (first.start.query() and first.end.query()):
                return
            first.report(first.start.elapsed_time(first.end))
            self._unread.popleft()

    def forget(self) -> None:
        """Drop the spans that have not been reported, with the functions they would be reported to."""
        self._unread.clear()


class _Span(NamedTuple):
    start: TimingEvent
    end: TimingEvent
    report: Callable[[float], None]
