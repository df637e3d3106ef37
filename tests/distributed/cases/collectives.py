"""Collectives over several tensors, on two communicators, over every transport. Each case checks its own values."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zerolite
from zerolite.comm import (
    Communicator,
    NullCommunicator,
    create_communicator,
    host_memory,
    process_group,
    record,
    second_communicator,
    use_communicator,
)
from zerolite.comm.communicator import NativeCommunicator
from zerolite.comm.shared_memory import SharedMemoryCommunicator
from zerolite.comm.wire import ProcessGroupWire

CPU = torch.device("cpu")
F32, BF16, F64, I64, U8 = torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8

# Lengths of the shards and their dtypes. The last ones are longer than what travels as one message.
UNITS: dict[str, list[tuple[int, torch.dtype]]] = {
    "nothing": [],
    "one element": [(1, F32)],
    "no element": [(0, F32), (0, BF16)],
    "odd lengths": [(3, F32), (17, F32), (1, F32), (1001, F32)],
    "mixed": [(5, U8), (7, F32), (0, I64), (3, BF16), (9, F64), (2, BF16), (11, I64)],
    "long": [(33333, F32), (0, F32), (1, BF16), (20001, BF16)],
}


@contextlib.contextmanager
def transport(name: str) -> Iterator[None]:
    """``shared memory``, ``messages``, ``little memory`` (files of at most 20000 bytes), or ``native``."""
    create = host_memory._create
    if name == "little memory":
        host_memory._create = lambda path, size: size <= 20000 and create(path, size)
    os.environ["ZEROLITE_SHARED_MEMORY"] = "0" if name == "messages" else "1"
    with contextlib.ExitStack() as stack:
        if name == "native":  # gloo knows the calls that NCCL gets
            stack.enter_context(use_communicator(lambda r, w: NativeCommunicator(ProcessGroupWire(dist.group.WORLD))))
        try:
            yield
        finally:
            host_memory._create = create


def pair() -> tuple[Communicator, Communicator]:
    comm = create_communicator(CPU)
    return comm, second_communicator(comm, CPU)


def shards_of(rank: int, unit: Sequence[tuple[int, torch.dtype]], salt: int) -> list[Tensor]:
    """Numbers below 128, which every dtype holds exactly; another rank or ``salt`` gives others."""
    return [(torch.arange(n) * 7 + 31 * rank + 13 * i + salt).remainder(127).to(d) for i, (n, d) in enumerate(unit)]


class Gather:
    """A launched gather of ``UNITS[name]`` that knows what must come."""

    def __init__(self, comm: Communicator, name: str, salt: int = 0, tag: str = "parameters", key: int = 0) -> None:
        unit = UNITS[name]
        self.shards = shards_of(comm.rank, unit, salt)
        with torch.inference_mode(False):  # a parameter's storage
            self.fulls = [torch.full((n * comm.world_size,), 99).to(d) for n, d in unit]
        parts = zip(*(shards_of(rank, unit, salt) for rank in range(comm.world_size)), strict=True)
        self.expected = [torch.cat(part) for part in parts]
        self.sent = [shard.clone() for shard in self.shards]
        self.pending = comm.gather_shards(self.fulls, self.shards, tag, key)

    def check(self) -> None:
        self.pending.wait()
        self.pending.wait()  # may be called again
        assert self.pending.arrived()
        for full, expected in zip(self.fulls, self.expected, strict=True):
            assert full.dtype == expected.dtype and torch.equal(full, expected), (full, expected)
        for shard, sent in zip(self.shards, self.sent, strict=True):
            assert torch.equal(shard, sent)


class Reduction:
    """A launched reduce-scatter of ``numel`` elements a rank that knows what must come."""

    def __init__(self, comm: Communicator, numel: int, salt: int = 0) -> None:
        total = numel * comm.world_size
        fulls = [torch.arange(total).add(salt + 3 * rank).remainder(64).float() for rank in range(comm.world_size)]
        self.expected = comm.part(sum(fulls[1:], fulls[0]) / 2).clone()
        self.pending = comm.reduce_scatter(fulls[comm.rank].clone(), "gradients", divisor=2.0)

    def check(self) -> None:
        assert torch.equal(self.pending.wait(), self.expected)


def gathers(kind: str) -> dict[str, Any]:
    """Every unit over both communicators; gives the kind of each and what was recorded."""
    with transport(kind):
        comms = pair()
        with record() as recorder:
            for salt, comm in enumerate(comms):
                for name in UNITS:
                    Gather(comm, name, salt).check()
            flights = [Gather(comms[1], name, salt) for salt in range(3) for name in UNITS]
            for flight in reversed(flights):
                flight.check()
    calls = [(c.op, c.tag, c.numel, c.nbytes, str(c.dtype), c.tensors) for c in recorder.calls]
    return {"kinds": [type(comm).__name__ for comm in comms], "calls": calls[: len(calls) // 5]}


def one_process() -> list[Any]:
    comm, second = pair()
    assert second is comm
    own = torch.arange(5.0)
    other, version = torch.zeros(5), own._version
    with record() as recorder:
        comm.gather_shards([own, other], [own, torch.ones(5)], "parameters").wait()
        comm.gather_shards([], [], "parameters").wait()
    assert own._version == version, "what is there already is not copied"
    return [other.tolist(), len(recorder.calls)]


def different_orders(kind: str) -> None:
    """Each communicator has its own order; how the two mix depends on the rank. Rank 0 reduces only when all gathers
    are there, as does a rank whose last gradient comes late; the others begin to reduce before they gather."""
    with transport(kind):
        first, second = pair()
        Gather(second, "long").check()
        Reduction(first, 8001).check()  # there is memory now: making it is done by all ranks together
        for turn in range(6):
            names = ("odd lengths", "long", "mixed", "one element")
            if first.rank == turn % first.world_size:
                for name in names:
                    Gather(second, name, turn).check()
                late = Reduction(first, 8001, turn)
            else:
                late = Reduction(first, 8001, turn)
                for name in names:
                    Gather(second, name, turn).check()
            gather, reduction = (
                (Gather(second, "long", turn), Reduction(first, 5, turn))
                if first.rank % 2
                else (Reduction(first, 5, turn), Gather(second, "long", turn))[::-1]
            )
            for flight in (late, reduction, gather) if first.rank % 2 else (gather, late, reduction):
                flight.check()


def mismatch(what: str) -> str:
    """Rank 0 launches something else than the others; the error of this rank. Afterwards all is well again."""
    comm = second_communicator(create_communicator(CPU), CPU)
    odd = comm.rank == 0
    if what != "memory that grows on one rank":
        Gather(comm, "long").check()  # there is memory for everything that follows
    launches: dict[str, Callable[[], Any]] = {
        "length": lambda: Gather(comm, "mixed" if odd else "odd lengths"),
        "memory that grows on one rank": lambda: Gather(comm, "long" if odd else "odd lengths"),
        "key": lambda: Gather(comm, "mixed", key=1 if odd else 2),
        "tag": lambda: Gather(comm, "mixed", tag="parameters" if odd else "masters"),
        "operation": lambda: (
            Reduction(comm, 16)
            if odd
            else comm.gather_shards([torch.empty(16 * comm.world_size**2)], [torch.ones(16 * comm.world_size)], "x")
        ),
        "statistics": lambda: comm.all_reduce(torch.ones(20), "stats") if odd else Reduction(comm, 16),
        "statistics of another length": lambda: comm.all_reduce(torch.ones(20 if odd else 3), "stats"),
        "broadcast": lambda: (
            comm.broadcast(torch.ones(20), "buffers") if odd else comm.all_reduce_max(torch.ones(3), "x")
        ),
        "lengths of the same sum": lambda: comm.gather_shards(
            [torch.empty(n * comm.world_size) for n in ((16, 32) if odd else (32, 16))],
            [torch.ones(n) for n in ((16, 32) if odd else (32, 16))],
            "parameters",
        ),
    }
    if what == "memory that grows on one rank":
        Gather(comm, "odd lengths").check()
    try:
        launched = launches[what]()
        if launched is not None:
            getattr(launched, "pending", launched).wait()
    except RuntimeError as error:
        message = str(error)
    else:
        raise AssertionError("nothing was raised")
    Gather(comm, "long").check()
    return message


def first_in_inference_mode(kind: str) -> None:
    with transport(kind):
        first, second = pair()
        with torch.inference_mode():
            begun = [Gather(second, name) for name in UNITS]
            begun[0].check()
            reduction = Reduction(first, 5000)
            evaluated = Gather(second, "long")
            evaluated.check()
        for flight in begun:
            flight.check()
        result = reduction.pending.wait()
        assert not result.is_inference()
        memories = [comm._large.memory for comm in (first, second) if isinstance(comm, SharedMemoryCommunicator)]
        assert not any(mapped.is_inference() for memory in memories for mapped in memory.maps)
        reduction.check()
        result.add_(1.0)  # an inference tensor would refuse
        for salt in range(4):  # all regions
            staged = first.staging(5000 * first.world_size, F32, 0)
            assert (staged is None) == (kind != "shared memory")
            if staged is not None:
                staged.fill_(1.0)
                total = first.reduce_scatter(staged, "gradients").wait()
                assert torch.equal(total, torch.full((5000,), float(first.world_size)))
            Gather(second, "mixed", salt).check()
            Reduction(first, 5000, salt).check()


def weights_in_training(kind: str) -> list[float]:
    """Train with parameters that were gathered in an evaluation's inference mode."""
    with transport(kind):
        comm = pair()[1]
        full, shard = torch.empty(6 * comm.world_size), torch.full((6,), 2.0)
        with torch.inference_mode():
            comm.gather_shards([full], [shard], "parameters").wait()
        parameter = torch.nn.Parameter(full)
        (parameter * parameter).sum().backward()
        with torch.no_grad():
            parameter.add_(1.0)
        assert parameter.grad is not None
        return parameter.grad.tolist()


def groups() -> dict[str, Any]:
    """The second group is made once; it goes with its communicator's close, and not with its collection."""
    comm, second = pair()
    group = second.group
    assert group is not None and group is not comm.group
    again = pair()
    known = [again[1].group is group]
    comm.close()
    closed = (comm.group, second.group)
    Gather(again[1], "long").check()  # another engine's communicator goes on
    del comm, second, again
    gc.collect()
    fresh = pair()[1]
    known.append(fresh.group is group)
    Gather(fresh, "long").check()
    assert fresh.group is not None
    ranks = dist.get_process_group_ranks(fresh.group)
    return {"known": known, "closed": closed, "ranks": ranks, "description": fresh.group.group_desc}


def subgroup() -> None:
    """A second communicator of some ranks only: the others do not take part."""
    parent = dist.new_group([0, 2])
    try:
        if dist.get_rank() != 1:
            comm = create_communicator(CPU, parent)
            second = second_communicator(comm, CPU)
            assert (second.rank, second.world_size) == (comm.rank, 2)
            Gather(second, "mixed").check()
            assert second.group is not None
            dist.destroy_process_group(second.group)
            process_group._second_groups.pop(parent)
            second.close()
    finally:
        dist.destroy_process_group(parent)
    Gather(pair()[1], "mixed").check()  # ranks that have made more communicators than others still agree


def lifetime() -> list[Any]:
    """On a worker without a process group: start, make a second group, end, start again."""
    answers: list[Any] = []
    for seconds in (77.0, 88.0):
        zerolite.init_distributed(timeout=seconds)
        parent = dist.group.WORLD  # a user may hold it longer
        assert parent is not None
        group = process_group.second_group(parent, "gloo")
        timeout = process_group.timeout_of(group)
        alive = weakref.ref(group)
        del group
        zerolite.destroy()
        answers.append((timeout.total_seconds(), alive() is None, len(process_group._second_groups)))
    return answers


def injected() -> list[Any]:
    """A communicator of 64 ranks in one process, and none of it outside the context."""
    with use_communicator(lambda rank, world: NullCommunicator(rank + 3, 64)):
        comm = create_communicator(CPU)
        with use_communicator(NullCommunicator):
            inner = create_communicator(CPU)
    outside = create_communicator(CPU)
    assert second_communicator(comm, CPU) is comm
    return [type(comm).__name__, comm.rank, comm.world_size, inner.world_size, type(outside).__name__]
