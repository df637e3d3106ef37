"""A rank of many that sends nothing, and who watches collectives. Beside real ones: tests/distributed/test_dry.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from zerolite.comm import (
    Communicator,
    dry_communicator,
    record,
)
from zerolite.utils import memory_tags

CPU, HALF, F32 = torch.device("cpu"), torch.bfloat16, torch.float32
KINDS = {"nccl": "NativeCommunicator", "gloo": "GlooCommunicator", "shared_memory": "SharedMemoryCommunicator"}


class Owned:
    """Listens to what communicators allocate."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []

    def tag_memory(self, storage: torch.UntypedStorage, item: str, place: str) -> None:
        self.storages.append(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        raise AssertionError("communicators resize nothing")


@contextlib.contextmanager
def listening() -> Iterator[Owned]:
    owned = Owned()
    memory_tags.listeners.append(owned)
    try:
        yield owned
    finally:
        memory_tags.listeners.remove(owned)


def launch_all(comm: Communicator, numel: int, dtype: torch.dtype, without_modes: bool) -> list[torch.Tensor]:
    """Every collective over tensors of ``numel`` elements a rank; what they gave."""
    world = comm.world_size
    full, half = torch.empty(numel * world, dtype=dtype), torch.empty(numel * world, dtype=HALF)
    fulls = [torch.empty(numel * world, dtype=dtype), torch.empty(3 * world, dtype=HALF)]
    shards = [torch.empty(numel, dtype=dtype), torch.empty(3, dtype=HALF)]
    few = [torch.empty(7 * world)], [torch.empty(7)]
    with _disable_current_modes() if without_modes else contextlib.nullcontext():
        staged = comm.staging(numel * world, dtype, 0)
        results = [
            comm.all_reduce(full, "gradients", 3.0).wait(),
            comm.reduce_scatter(full if staged is None else staged, "gradients", 3.0).wait(),
            comm.reduce_scatter(half, "gradients", 3.0, F32).wait(),
            comm.all_gather(full, "parameters").wait(),
        ]
        for pair in ((fulls, shards), few):
            comm.gather_shards(*pair, "parameters", 1).wait()
        comm.all_reduce_max(full, "check")
        comm.broadcast(full, "buffers", source=world - 1)
    return results


@pytest.mark.parametrize("without_modes", [False, True])
@pytest.mark.parametrize(
    ("kind", "world", "numel"), [("nccl", 1024, 10**12), ("gloo", 3, 10**6), ("shared_memory", 3, 10**6)]
)
def test_nothing_has_memory_where_tensors_have_none(kind: Any, world: int, numel: int, without_modes: bool) -> None:
    with FakeTensorMode(), listening() as owned, record() as recorder:
        comm = dry_communicator(kind, 1, world)
        results = launch_all(comm, numel, F32, without_modes)
        kept = [*results, *comm.memory()]
    assert [(r.numel(), r.dtype) for r in results] == [(n, F32) for n in (numel * world, numel, numel, numel * world)]
    assert all(type(tensor) is FakeTensor for tensor in kept)
    assert owned.storages and {storage.device.type for storage in owned.storages} == {"meta"}
    named = {storage._cdata for storage in owned.storages}
    assert all(tensor.untyped_storage()._cdata in named for tensor in (*results[1:3], *comm.memory()))
    assert [call.nbytes for call in recorder.calls] == [
        4 * numel * world,
        4 * numel * world,
        2 * numel * world,
        4 * numel * world,
        (4 * numel + 6) * world,
        28 * world,
        4 * numel * world,
        4 * numel * world,
    ]
    regions = [tensor.untyped_storage().nbytes() for tensor in comm.memory()]
    assert regions == ([3 * -(-4 * numel * world // 4096) * 4096] * world if kind == "shared_memory" else [])
