"""Gathers of several tensors in one launch, a second order of collectives, and what happens where ranks disagree."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerolite
from tests.toolkit.compare import from_all_ranks
from tests.toolkit.configs import ADAMW, config
from tests.toolkit.pool import Pool
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import engine_window, make_engine
from tests.toolkit.transports import CPU, UNITS, pair, transport
from zerolite.comm import Communicator, create_communicator, process_group, record, second_communicator
from zerolite.comm.flight_recorder import WAIT


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
        self.expected = comm.shard(sum(fulls[1:], fulls[0]) / 2).clone()
        self.pending = comm.reduce_scatter(fulls[comm.rank].clone(), "gradients", divisor=2.0)

    def check(self) -> None:
        assert torch.equal(self.pending.wait(), self.expected)


KINDS = {
    "shared memory": "SharedMemoryCommunicator",
    "messages": "GlooCommunicator",
    "little memory": "SharedMemoryCommunicator",
    "native": "NativeCommunicator",
}


@pytest.mark.fast("2-shared memory", "2-native", "3-little memory", "4-messages")
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 3, 4)
def test_every_full_is_the_concatenation_of_the_shards(kind: str) -> None:
    with transport(kind):
        comms = pair()
        with record() as recorder:
            for salt, comm in enumerate(comms):
                for name in UNITS:
                    Gather(comm, name, salt).check()
            flights = [Gather(comms[1], name, salt) for salt in range(3) for name in UNITS]
            for flight in reversed(flights):
                flight.check()
        recorded = [weakref.ref(shard) for flight in flights for shard in flight.shards]
        del flights, flight
        WAIT.forget()  # where the device waits, it knows the works of the last one
        # The flight recorder has their sizes alone: shards of activations would be gigabytes.
        assert not any(alive() is not None for alive in recorded)
    assert [type(comm).__name__ for comm in comms] == [KINDS[kind]] * 2
    world, wanted = dist.get_world_size(), []
    for unit in UNITS.values():
        if any(numel for numel, _ in unit):  # a gather of nothing is no collective
            numel = sum(numel for numel, _ in unit) * world
            nbytes = sum(numel * dtype.itemsize for numel, dtype in unit) * world
            wanted.append(("all_gather", "parameters", numel, nbytes, unit[0][1], len(unit)))
    assert [(c.op, c.tag, c.numel, c.nbytes, c.dtype, c.tensors) for c in recorder.calls] == wanted * 5


@pytest.mark.fast("2-shared memory", "4-shared memory")
@pytest.mark.parametrize("kind", ["shared memory", "native"])
@on_ranks(2, 3, 4)
def test_two_communicators_may_mix_in_any_order(kind: str) -> None:
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


MISMATCHES = {
    "length": ["all_gather of 512 bytes for 'parameters'", "all_gather of 4288 bytes for 'parameters'"],
    "memory that grows on one rank": ["all_gather of 173504 bytes", "all_gather of 4288 bytes"],
    "key": ["all_gather of 512 bytes"] * 2,
    "tag": ["all_gather of 512 bytes for 'parameters'", "all_gather of 512 bytes for 'masters'"],
    "operation": [r"reduce_scatter of \d+ bytes for 'gradients'", r"all_gather of \d+ bytes for 'x'"],
    "statistics": ["all_reduce of 80 bytes for 'stats'", r"reduce_scatter of \d+ bytes for 'gradients'"],
    "broadcast": ["broadcast of 80 bytes", "all_reduce_max of 12 bytes"],
    "lengths of the same sum": ["all_gather of 192 bytes"] * 2,
}


def launch(comm: Communicator, what: str, odd: bool) -> Any:
    """Launch a collective; that of the odd rank is not the others'."""
    sizes, world = (16, 32) if odd else (32, 16), comm.world_size
    launches: dict[str, Callable[[], Any]] = {
        "length": lambda: Gather(comm, "mixed" if odd else "odd lengths").pending,
        "memory that grows on one rank": lambda: Gather(comm, "long" if odd else "odd lengths").pending,
        "key": lambda: Gather(comm, "mixed", key=1 if odd else 2).pending,
        "tag": lambda: Gather(comm, "mixed", tag="parameters" if odd else "masters").pending,
        "operation": lambda: (
            Reduction(comm, 16).pending
            if odd
            else comm.gather_shards([torch.empty(16 * world**2)], [torch.ones(16 * world)], "x")
        ),
        "statistics": lambda: comm.all_reduce(torch.ones(20), "stats") if odd else Reduction(comm, 16).pending,
        "broadcast": lambda: (
            comm.broadcast(torch.ones(20), "buffers") if odd else comm.all_reduce_max(torch.ones(3), "x")
        ),
        "lengths of the same sum": lambda: comm.gather_shards(
            [torch.empty(n * world) for n in sizes], [torch.ones(n) for n in sizes], "parameters"
        ),
    }
    return launches[what]()


@pytest.mark.parametrize("what", MISMATCHES)
@on_ranks(3)
def test_ranks_that_launch_different_collectives_all_raise(what: str) -> None:
    """Rank 0 launches something else than the others. Afterwards all is well again."""
    comm = second_communicator(create_communicator(CPU), CPU)
    # After a gather of "long" there is memory for everything that follows.
    Gather(comm, "odd lengths" if what == "memory that grows on one rank" else "long").check()
    with pytest.raises(RuntimeError) as caught:
        launched = launch(comm, what, odd=comm.rank == 0)
        if launched is not None:
            launched.wait()
    Gather(comm, "long").check()
    message = str(caught.value)
    lengths = {int(re.search(r"of (\d+) bytes", each)[1]) for each in from_all_ranks(message)}  # type: ignore[index]
    assert f"rank {comm.rank}: the ranks launched different collectives" in message
    assert re.search(MISMATCHES[what][min(comm.rank, 1)], message), message
    assert f"{min(lengths)} to {max(lengths)} bytes" in message


@on_ranks(4, timeout=60)
def test_groups_beside_those_that_a_program_makes_on_some_ranks_and_ends() -> None:
    """torch would give two groups of the same ranks one name, which raises on the ranks without groups of their own."""
    world, rank = dist.group.WORLD, dist.get_rank()
    own = [dist.new_group([0, 1], use_local_synchronization=True) for _ in range(2) if rank < 2]
    ranks = [rank // 2 * 2, rank // 2 * 2 + 1]
    groups = [process_group.group_within(world, ranks, "own groups")]
    groups.append(process_group.second_group(groups[0], "gloo"))
    for group in own:
        dist.destroy_process_group(group)
    groups += [process_group.second_group(groups[0], "gloo", purpose) for purpose in ("after", "after that")]
    for group in groups:
        total = torch.tensor([rank])
        dist.all_reduce(total, group=group)
        assert int(total) == sum(ranks)
    names = [process_group.process_groups()[group] for group in groups]
    assert len(set(names)) == len(names)


def native_threads() -> list[str]:
    """The names of this process's threads as the kernel sees them, also those that Python does not know."""
    return sorted(Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task"))


def start_and_end_twice(directory: str) -> None:
    """For workers without a process group: zerolite starts one and a second one beside it, trains, and ends both."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    before = native_threads()
    for seconds in (77.0, 88.0):
        zerolite.init_distributed("gloo", f"file://{directory}/{seconds}", rank, world_size, timeout=seconds)
        zerolite.init_distributed()
        assert len(native_threads()) > len(before), "the test sees no thread of the process group"
        parent = dist.group.WORLD  # a user may hold it longer
        second = process_group.second_group(parent, "gloo")
        assert process_group.timeout_of(second).total_seconds() == seconds
        alive = weakref.ref(second)
        engine = make_engine(config(optimizer=ADAMW), "Mlp")
        assert engine.world_size == 2
        engine_window(engine, "Mlp", 0, 1)
        del engine, second
        zerolite.destroy()
        zerolite.destroy()
        assert alive() is None and not process_group._made and not dist.is_initialized()
        del parent
    ends = time.monotonic() + 5  # a thread that has been joined is in /proc until the kernel gets to it
    while native_threads() != before:
        assert time.monotonic() < ends, (native_threads(), before)
        time.sleep(0.01)
    assert {thread.name for thread in threading.enumerate()} == {"MainThread", "parent-watch"}


def test_destroy_ends_the_second_group_too_and_leaves_no_thread(tmp_path: Path) -> None:
    with Pool(2, init_group=False) as pool:
        pool.run(start_and_end_twice, {"directory": str(tmp_path)})
