"""Memory report of an engine, by item, beside the allocator's totals.

Nothing is estimated: every component of the engine lists its tensors. Each storage counts once, even if several tensors
are views of it. A released parameter has a storage of 0 bytes.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
import torch

from zerolite.utils.memory_tags import (
    BUCKETS,
    BUFFERS,
    COMPUTE,
    DEVICE,
    GATHERED,
    HOST,
    ITEMS,
    LOCATIONS,
    MASTERS,
    MODEL_STATES,
    OTHER,
    PERSISTENT,
    STAGING,
    STATES,
    location_of,
)
from zerolite.utils.text import format_size
from zerolite.utils.torch_private import as_plain_tensors
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.stage3.absent_parameter import AbsentParameter
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of

HELD = tuple(category for category in ITEMS if category != OTHER)
"""Items that the components of the engine can list. Activations are only the idle buffers, which wait for the next
inputs."""

_ALLOCATOR = ("allocated", "allocated_peak", "reserved", "reserved_peak", "device_free", "device_total")
_PROCESS = ("resident", "resident_peak")


@dataclass(frozen=True)
class MemoryReport:
    """One rank's memory at one moment, in bytes.

    Attributes:
        rank: number of the rank.
        device: name of the engine's device.
        items: the engine's memory on its device, by item of :data:`HELD`.
        host: memory of offloaded tensors and staging buffers on the host, by item; also if the device is the CPU.
        disk: the same on disk.
        other: all other memory that is allocated on the device, such as activations in use. None on the CPU.
        allocated: memory that torch's allocator has handed out on the device. None on the CPU.
        allocated_peak: its peak since the process began, or since torch.cuda.reset_peak_memory_stats().
        reserved: memory that torch's allocator has taken from the device. None on the CPU.
        reserved_peak: its peak, as above.
        device_free: free memory of the device, with all processes counted. None on the CPU.
        device_total: all memory of the device. None on the CPU.
        resident: memory of this process on the host. It includes shared memory, and pages of mapped files in memory.
        resident_peak: its peak.
    """

    rank: int
    device: str
    items: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    other: int | None
    allocated: int | None
    allocated_peak: int | None
    reserved: int | None
    reserved_peak: int | None
    device_free: int | None
    device_total: int | None
    resident: int
    resident_peak: int

    @property
    def total(self) -> int:
        """Bytes of all items on the device."""
        return sum(self.items.values())

    @property
    def model_states(self) -> int:
        """Bytes of the model states, which ZeRO partitions: parameters, gradients and optimizer state."""
        return sum(self.items[category] for category in MODEL_STATES)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [(category.replace("_", " "), nbytes) for category, nbytes in self.items.items() if nbytes]
        rows.append(("all of these", self.total))
        for location, held in (("host", self.host), ("disk", self.disk)):
            rows += [
                (f"{category.replace('_', ' ')} ({location})", nbytes) for category, nbytes in held.items() if nbytes
            ]
        totals = [(name.replace("_", " "), getattr(self, name)) for name in ("other", *_ALLOCATOR, *_PROCESS)]
        rows += [(name, nbytes) for name, nbytes in totals if nbytes is not None]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {format_size(nbytes):>10}" for name, nbytes in rows]
        return "\n".join([f"memory of rank {self.rank} on {self.device}", *lines])


class Holding(NamedTuple):
    """One storage; ``location`` is one of :data:`zerolite.utils.memory_tags.LOCATIONS`."""

    category: str
    nbytes: int
    location: str


def memory_report(parts: EngineParts) -> MemoryReport:
    """Report the memory of an engine on this rank. Nothing is sent, and the host does not wait for the device."""
    items, host, disk = held = [dict.fromkeys(HELD, 0) for _ in LOCATIONS]
    for category, nbytes, location in holdings(parts).values():
        held[LOCATIONS.index(location)][category] += nbytes
    allocator = _allocator(parts.device)
    allocated = allocator["allocated"]
    resident = psutil.Process().memory_info().rss
    return MemoryReport(
        rank=parts.topology.data.rank,
        device=str(parts.device),
        items=items,
        host=host,
        disk=disk,
        other=None if allocated is None else allocated - sum(items.values()),
        resident=resident,
        # Linux counts the peak apart, in kilobytes, and it can be behind.
        resident_peak=max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, resident),
        **allocator,
    )


def holdings(parts: EngineParts) -> dict[int, Holding]:
    """Return every storage of an engine once, by its ``id``."""
    entries: dict[int, Holding] = {}
    for category, tensor in _owned_tensors(parts):
        if tensor.layout is not torch.strided:  # a sparse buffer has no single storage to count
            continue
        storage = tensor.untyped_storage()
        if id(storage) not in entries:
            entries[id(storage)] = Holding(category, storage.nbytes(), _location(tensor, parts.device))
    return entries


def _location(tensor: torch.Tensor, device: torch.device) -> str:
    """Return the placement of the memory of ``tensor``, for an engine on ``device``."""
    location = location_of(tensor)
    return HOST if location == DEVICE and tensor.device.type != device.type else location


def _owned_tensors(parts: EngineParts) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (item, tensor) for every tensor of the engine.

    The order matters: if tensors share a storage, it counts for the item that comes first.
    """
    buffer, topology = parts.buffer, parts.topology
    grid = (topology.data, topology.world, topology.pipe, *topology.communicators().values())
    communicators = {id(comm): comm for comm in grid}
    yield from ((COMPUTE, bucket.compute) for bucket in buffer.buckets)
    for parameter in parts.model.parameters():
        handle = sharded_param_of(parameter)
        if handle is None and isinstance(parameter, AbsentParameter):
            continue  # its values are the bucket's, which a gather writes
        if handle is None:
            with as_plain_tensors():  # during engine.offload_states() other access raises
                data = parameter.data
            yield COMPUTE, data
            continue
        communicators[id(handle.groups.shard)] = handle.groups.shard
        yield COMPUTE, handle.shard
        yield (PERSISTENT if handle.persistent else GATHERED), handle.full
    yield from ((MASTERS, bucket.master) for bucket in buffer.buckets)
    yield from ((COMPUTE, bucket.owned) for bucket in buffer.buckets)  # a part of `compute`, or memory of its own
    yield from ((STATES, state) for state in parts.optimizer.method.memory())
    yield from ((BUFFERS, tensor) for tensor in parts.model.buffers())
    for comm in communicators.values():
        yield from ((BUCKETS, tensor) for tensor in comm.memory())
    yield from parts.reducer.memory()
    gathers = [bucket.gathering for bucket in buffer.buckets]
    yield from ((BUCKETS, tensor) for gather in gathers if gather is not None for tensor in gather.memory())
    yield from ((STAGING, tensor) for tensor in parts.transfers.pool.memory())
    for source in parts.memory_sources:
        yield from source()


def _allocator(device: torch.device) -> dict[str, int | None]:
    """Return the statistics of CUDA's caching allocator for ``device``. On the CPU all are None: it keeps none."""
    if device.type != "cuda":
        return dict.fromkeys(_ALLOCATOR)
    cuda = torch.cuda
    read = (cuda.memory_allocated, cuda.max_memory_allocated, cuda.memory_reserved, cuda.max_memory_reserved)
    return dict(zip(_ALLOCATOR, (*(one(device) for one in read), *cuda.mem_get_info(device)), strict=True))
