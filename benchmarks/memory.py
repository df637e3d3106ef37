"""Bytes of tensors, by the allocator's own accounting: every allocation and release, wherever it happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_WINDOW = "benchmarks.memory.window"


class Meter:
    """Counts from `with meter:` on; `with meter.window():` inside it marks the steps whose peak is wanted.

    `peak_bytes` is the most that was allocated at one moment of the window, `resident_bytes` what was left at its end.
    On the CPU the figures come from the profiler's memory events; memory that a library maps by itself, past torch's
    allocator, is not in them.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.peak_bytes: int | None = None
        self.resident_bytes: int | None = None
        self._profile: profile | None = None

    def __enter__(self) -> Meter:
        if not self.cuda:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()
        return self

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            yield
            torch.cuda.synchronize()
            self.peak_bytes, self.resident_bytes = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        else:
            with record_function(_WINDOW):
                yield

    def __exit__(self, *exc: object) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        if exc[0] is None:
            self.peak_bytes, self.resident_bytes = _read_memory_events(self._profile)
        self._profile = None


def _read_memory_events(profiled: profile) -> tuple[int, int]:
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = list(profiled.profiler.kineto_results.events())
    window = next(event for event in events if event.name() == _WINDOW)
    start, end = window.start_ns(), window.start_ns() + window.duration_ns()
    memory = sorted(
        (event.start_ns(), event.nbytes())  # type: ignore[attr-defined]
        for event in events
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    )
    current = peak = 0
    for when, nbytes in memory:
        if when > end:
            break
        current += nbytes
        if when >= start:
            peak = max(peak, current)
    return peak, current
