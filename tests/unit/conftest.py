"""Fixtures of the unit tests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from zerolite.monitor import device_timers
from zerolite.planning.fake_backend import DryPlatform
from zerolite.utils.accelerator import use_platform


class Device:
    """A device whose time stands still until the test moves it, and that may be behind the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.done = math.inf  # what has been executed
        self.events = 0
        monkeypatch.setattr(device_timers, "new_timing_event", self.event)

    def event(self, cuda: bool) -> Device.Event:
        self.events += 1
        return Device.Event(self)

    class Event:
        def __init__(self, device: Device) -> None:
            self.device = device
            self.at = math.nan

        def record(self, stream: Any) -> None:
            self.at = self.device.now

        def query(self) -> bool:
            return self.at <= self.device.done

        def elapsed_time(self, end: Device.Event) -> float:
            assert self.query() and end.query(), "read before the device has come to it"
            return end.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.fixture
def without_ranks() -> Iterator[None]:
    with use_platform(DryPlatform()):
        yield
