"""A dry communicator does what the one that it stands for does, and sends nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.toolkit.ranks import on_ranks
from tests.toolkit.transports import UNITS, pair, transport
from zerolite.comm import Communicator, Pending, dry_communicator, gloo, record
from zerolite.utils import memory_tags
from zerolite.utils.nested import find_tensors

KINDS = {"native": "nccl", "messages": "gloo", "shared memory": "shared_memory"}
SMALL = 1024  # bytes: what ranks tell each other is not counted
HALF, F32 = torch.bfloat16, torch.float32


class Allocations(TorchDispatchMode):
    """Sizes in bytes of the storages that operators have made, in order, and of those that were named."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []
        self.named: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage_of(tensor) for tensor in find_tensors((args, kwargs))}
        for tensor in find_tensors(out):
            nbytes = tensor.untyped_storage().nbytes()
            if storage_of(tensor) not in given and nbytes > SMALL:
                self.made.append(nbytes)
        return out

    def tag_memory(self, storage: torch.UntypedStorage, item: str, place: str) -> None:
        if storage.nbytes() > SMALL:
            self.named.append((storage.nbytes(), item))

    def resized(self, storage: torch.UntypedStorage) -> None:
        raise AssertionError("communicators resize nothing")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        memory_tags.listeners.append(self)
        try:
            with self:
                yield
        finally:
            memory_tags.listeners.remove(self)


def storage_of(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


def launches(comm: Communicator) -> dict[str, Callable[[], Pending | None]]:
    """Every collective, over lengths and dtypes that take different ways; tensors are made at the launch."""
    world = comm.world_size

    def gather(name: str) -> Callable[[], Pending]:
        shards = [torch.ones(numel).to(dtype) for numel, dtype in UNITS[name]]
        fulls = [shard.new_zeros(shard.numel() * world) for shard in shards]
        return lambda: comm.gather_shards(fulls, shards, "parameters", 1)

    return {
        "sum": lambda: comm.all_reduce(torch.ones(6000 * world), "gradients", 2.0, 1),
        "sum of few": lambda: comm.all_reduce(torch.ones(5), "stats"),
        "sum of 16 bits": lambda: comm.all_reduce(torch.ones(70000 * world, dtype=HALF), "gradients", 2.0),
        "sum of a table": lambda: comm.all_reduce(torch.ones(100, 70), "gradients"),
        "maximum": lambda: comm.all_reduce_max(torch.ones(1000, dtype=torch.int64), "check"),
        "scatter": lambda: comm.reduce_scatter(torch.ones(6000 * world), "gradients", 2.0, key=1),
        "scatter 16 bits": lambda: comm.reduce_scatter(torch.ones(6000 * world, dtype=HALF), "gradients", 2.0),
        "scatter 16 bits to 32": lambda: comm.reduce_scatter(torch.ones(70000 * world).to(HALF), "x", 2.0, F32),
        "scatter 32 bits to 16": lambda: comm.reduce_scatter(torch.ones(6000 * world), "gradients", 2.0, HALF),
        "gather": lambda: comm.all_gather(torch.ones(6000 * world), "parameters", 3),
        **{f"gather {name}": gather(name) for name in UNITS},
        "broadcast": lambda: comm.broadcast(torch.ones(3000), "buffers", source=1),
    }


def account(comms: Sequence[Communicator]) -> list[Any]:
    """(what, its allocations, those that were named, the result) of every collective of both, and the record."""
    found: list[Any] = []
    with record() as recorder:
        for comm in comms:
            for name, launch in launches(comm).items():
                allocations = Allocations()
                with allocations.listening():
                    pending = launch()
                    result = None if pending is None else pending.wait()
                shape = None if result is None else (tuple(result.shape), str(result.dtype), result.is_inference())
                found.append((name, allocations.made, allocations.named, shape))
            regions = [(tensor.numel(), str(tensor.dtype)) for tensor in comm.memory()]
            found.append((type(comm).__name__, comm.flight_recorder.count, regions))
    return [*found, recorder.calls]


@pytest.mark.fast("2-native")
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 4)
def test_a_dry_communicator_launches_and_allocates_what_a_real_one_does(kind: str) -> None:
    """With tensors that have memory, and with those that have none. Of 16-bit sums, which are made in chunks, the last
    rank makes one chunk only: here all make one."""
    with pytest.MonkeyPatch.context() as patch, transport(kind):
        patch.setattr(gloo, "_CHUNK", 1 << 20)
        comms = pair()
        real = account(comms)
        for mode in (contextlib.nullcontext(), FakeTensorMode()):
            with mode:
                dry = dry_communicator(KINDS[kind], comms[0].rank, comms[0].world_size)  # type: ignore[arg-type]
                for one, other in zip(account((dry, dry.second("gloo"))), real, strict=True):
                    assert one == other, mode
    named = [entry for _, *more in real[:-1] if len(more) == 3 for entry in more[1]]
    assert named and {item for _, item in named} == {"communication_buckets"}
    assert len(real[-1]) >= 30, "collectives are recorded"
