"""Reader of shards for gathers, with memory in the place of the disk."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from zerolite.offload.placements import SPAN_ALIGNMENT, DiskPlacement, HostPlacement, Placement, Placements, Transfer
from zerolite.offload.shard_reader import ShardReader, cover, places, spans
from zerolite.offload.transfers import Transfers
from zerolite.utils.memory_tags import COMPUTE

CPU = torch.device("cpu")


class _Read(Transfer):
    """Carried out when it is waited for."""

    def __init__(self, offloaded: torch.Tensor, into: torch.Tensor, fails: bool) -> None:
        self.ends = (offloaded, into)
        self.fails = fails
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.fails:
            raise OSError(5, "the disk is gone")
        self.ends[1].copy_(self.ends[0])


@dataclass
class Memory:
    """A file that is none."""

    reads: list[_Read] = field(default_factory=list)
    failing: int = -1  # this read
    forgotten: int = 0

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def read(self, offloaded: torch.Tensor, into: torch.Tensor) -> _Read:
        assert offloaded.storage_offset() % SPAN_ALIGNMENT == 0
        self.reads.append(_Read(offloaded, into, len(self.reads) == self.failing))
        return self.reads[-1]

    def write(self, offloaded: torch.Tensor, source: torch.Tensor) -> Any:
        raise AssertionError("nothing is written here")

    def forget_cached(self) -> None:
        self.forgotten += 1

    def close(self) -> None:
        pass


@dataclass
class Member:
    shard: torch.Tensor
    placement: Placement
    full: torch.Tensor = field(default_factory=lambda: torch.empty(0))


def row(placement: Placement, *numels: int, gap: int = 3) -> list[Member]:
    """Members next to each other, with different values."""
    memory = placement.zeros(sum(numels) + gap * len(numels), torch.float32, COMPUTE)
    memory.copy_(torch.arange(len(memory)))
    members, start = [], 0
    for numel in numels:
        members.append(Member(memory.narrow(0, start, numel), placement, torch.zeros(numel)))
        start += numel + gap
    return members


def reader(apart: bool = False) -> tuple[ShardReader, Memory, DiskPlacement, HostPlacement]:
    file = Memory()
    disk, host = DiskPlacement(file, pin=False), HostPlacement(pin=False)
    placements = Placements(CPU, Placement(CPU), disk, apart=apart)
    return ShardReader(placements, Transfers(placements)), file, disk, host


@pytest.mark.parametrize("alignment", [1, SPAN_ALIGNMENT])
@pytest.mark.parametrize("seed", range(3))
def test_spans_cover_every_tensor_once_and_little_else(seed: int, alignment: int) -> None:
    rng = random.Random(seed)
    tensors = []
    for _ in range(3):
        memory = torch.arange(60_000)
        position = 0
        while position < 40_000:
            numel = rng.choice([0, 1, 8, 500, 6000])
            tensors.append(memory.narrow(0, position, numel))
            position += numel + rng.choice([0, 0, 5, SPAN_ALIGNMENT - 1, SPAN_ALIGNMENT, 9000])
    rng.shuffle(tensors)
    found = spans(tensors, alignment)
    assert sorted(i for span in found for i in span.indices) == [i for i, t in enumerate(tensors) if t.numel()]
    for span in found:
        assert span.start % alignment == 0
        copied = cover(span, tensors).clone()
        assert len(copied) == span.numel
        for index, place in places(span, tensors, copied).items():
            assert torch.equal(place, tensors[index])
        wanted = sum(tensors[index].numel() for index in span.indices)
        assert span.numel < wanted + len(span.indices) * SPAN_ALIGNMENT


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_every_tier_arrives(apart: bool, alone: bool) -> None:
    one, file, disk, host = reader(apart)
    on_disk, on_host, here = row(disk, 5, 0, 7), row(host, 3, 4), row(Placement(CPU), 6)
    members = [on_host[1], *on_disk, *here, on_host[0]]
    one.ahead(on_disk[:1])
    arrival = one.bring(members, alone)
    for member, shard in zip(members, arrival.shards, strict=True):
        assert torch.equal(shard, member.shard)
        assert not alone or shard is member.full
    assert len(file.reads) == 2, "the first by itself, then the other"
    storages = {shard.untyped_storage()._cdata for shard in arrival.shards if shard.numel()}
    if not alone:  # two reads, what is on the host in one copy or where it is, and what is on the device
        assert len(storages) == 4
        at_home = {id(member) for member, shard in zip(members, arrival.shards, strict=True) if shard is member.shard}
        assert {id(here[0])} <= at_home
        assert apart == (id(on_host[0]) not in at_home)
    arrival.end()
    assert not any(one.is_ahead(member) for member in members)


def _address(file: Memory, read: int) -> int:
    return file.reads[read].ends[1].data_ptr()


def test_where_memories_are_apart_a_buffer_is_not_used_while_it_may_be_copied_from() -> None:
    one, file, disk, _ = reader(apart=True)
    members = [row(disk, 9)[0] for _ in range(3)]
    for member in members:
        one.bring([member], alone=False).end()
    assert _address(file, 0) != _address(file, 1)
    assert _address(file, 0) == _address(file, 2)


def test_what_has_been_read_is_forgotten_when_something_is_written() -> None:
    one, file, disk, host = reader()
    (member,) = row(disk, 5)
    one.ahead([member])
    member.shard.fill_(7)
    one.written(member)
    assert file.forgotten == 1
    assert not one.is_ahead(member)
    arrival = one.bring([member], alone=False)
    assert arrival.shards[0].eq(7).all()
    arrival.end()
    one.written(row(host, 3)[0])
    assert file.forgotten == 1


def test_a_read_that_fails_is_told_to_the_gather_that_needs_it() -> None:
    one, file, disk, _ = reader()
    first, second = row(disk, 5)[0], row(disk, 5)[0]
    file.failing = 0
    one.ahead([first, second])
    arrival = one.bring([second], alone=False)
    assert torch.equal(arrival.shards[0], second.shard)
    arrival.end()
    with pytest.raises(OSError, match="the disk is gone"):
        one.bring([first], alone=False)
    one.bring([first], alone=False).end()  # it is there again
    file.failing = len(file.reads)
    one.ahead([first])
    one.forget()  # it is not needed
    assert not one.is_ahead(first)
