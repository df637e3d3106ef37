"""Memory that the CPU's allocator has given out, by phase; tensors that are alive; and a host and a device that do not
share their memory."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zerolite.offload.placement import Placements
from zerolite.utils.memory_tags import listeners


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
        original(self, *args, **{**kwargs, "separate_memory": True})

    with mock.patch.object(Placements, "__init__", init):
        yield


class Tagged:
    """Storages that the engine names while this listens. ``nbytes``: all that were named, by item and location."""

    def __init__(self) -> None:
        self.nbytes: Counter[tuple[str, str]] = Counter()
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], tuple[str, str]]] = {}

    def tag_memory(self, storage: torch.UntypedStorage, item: str, location: str) -> None:
        self.nbytes[item, location] += storage.nbytes()
        self._known[id(storage)] = (weakref.ref(storage), (item, location))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Ignore a resize: sizes are read when they are asked for."""

    def alive(self, *items: str) -> dict[tuple[str, str], int]:
        """The bytes that ``items`` have now, by item and location."""
        found: Counter[tuple[str, str]] = Counter()
        for known, key in self._known.values():
            storage = known()
            if storage is not None and key[0] in items:
                found[key] += storage.nbytes()
        return dict(+found)


@contextlib.contextmanager
def tagged() -> Iterator[Tagged]:
    listener = Tagged()
    listeners.append(listener)
    try:
        yield listener
    finally:
        listeners.remove(listener)


TICKET = 48  # bytes of a fence's tensor, which gloo's threads free a moment later, where the profiler does not see it


def live_tensors() -> Iterator[torch.Tensor]:
    """All tensors and parameters that Python can reach, but for tickets."""
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type != "meta":
            try:
                ticket = item.untyped_storage().nbytes() == TICKET
            except NotImplementedError:  # torch 2.6 leaves undefined tensors behind
                continue
            if not ticket:
                yield item


def tensor_bytes() -> int:
    """Bytes of the storages of all live tensors and of their gradients, each once."""
    sizes = {}
    for tensor in live_tensors():
        for one in (tensor, tensor.grad) if tensor.is_leaf and tensor.grad is not None else (tensor,):
            sizes[id(one.untyped_storage())] = one.untyped_storage().nbytes()
    return sum(sizes.values())
