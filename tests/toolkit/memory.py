"""Memory that the CPU's allocator has given out, by phase; and a host and a device that do not share theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.profiler import ProfilerActivity, profile, record_function

from zerolite.offload.placements import Placements


def memory_profile() -> Any:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)


def events_in_order(profiler: Any) -> list[tuple[int, int, str]]:
    """``(time, bytes, "")`` for every allocation and release, ``(time, 0, name)`` for every mark."""
    found = []
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            found.append((event.start_ns(), event.nbytes(), ""))
        elif event.name().startswith("mark "):
            found.append((event.start_ns(), 0, event.name()[5:]))
    return sorted(found)


def mark(name: str) -> None:
    with record_function(f"mark {name}"):
        pass


@contextlib.contextmanager
def two_memories() -> Iterator[None]:
    """Treat host and device as two memories, as where the device is not the CPU: offloaded tensors pass through
    buffers."""
    original = Placements.__init__

    def init(self: Placements, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "apart": True})

    with mock.patch.object(Placements, "__init__", init):
        yield
