"""Memory that the CPU's allocator has given out, by phase."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function


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
