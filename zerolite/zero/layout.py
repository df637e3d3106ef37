"""Partition layout: buckets, slots and shards, in plain integers.

Pure: standard library only. Everything that is flat is indexed by a :class:`PartitionLayout`: compute parameters,
gradients, master weights and every optimizer state.

::

              bucket 0                          bucket 1
    |--------------------------------|--------------------------|
    | slot head.w   | pad | slot n.b | slot blocks.1.w |   pad   |     full, one copy per rank
    |-------|-------|-------|--------|------|------|------|-----|
      rank0   rank1   rank2   rank3    r0     r1     r2     r3        shards: part r of every bucket

The design follows ZeRO (Rajbhandari et al., 2020, section 5); cutting every bucket in world_size equal parts,
instead of cutting the whole flat model once, makes each bucket one uniform reduce-scatter and one all-gather.

Where parameters themselves are partitioned (stage 3), every rank must hold an equal part of *each parameter*
(:func:`part_numel`). Then a bucket is *sliced*: it has world_size rows, row r belongs to rank r, and every slot has the
same place in each row. ::

          slot a       slot b     the last parts are padded
    row 0 | a[0:k]   | b[0:m]   |
    row 1 | a[k:2k]  | b[m:2m]  |      shards: the rows, so ds_tensor is a view of one
    row 2 | a[2k:] . | b[2m:] . |

It still is one reduce-scatter, straight into the shard, and every other range follows the same table.

Where an optimizer needs whole parameters, each slot lies within the part of one rank, which owns all of it. The parts
are equal, so the bucket travels like any other, and what a rank's parameters leave of its part is padding. ::

    |----------------|----------------|
    | slot c | slot a| slot b  |  pad |     rank 0 owns c and a, rank 1 owns b
    |----------------|----------------|
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

ALIGNMENT = (
    32  # elements: 128 bytes in fp32 and 64 in 16 bits, so that every slot and every shard starts on a cache line
)
PART_ALIGNMENT = 16  # elements: at least 16 bytes in every dtype; parts of sliced buckets are many and often small
MIN_AUTO_BUCKET = 4 << 20
AUTO_BUCKET = 40_000_000
AUTO_BUCKET_PER_RANK = 1_000_000
WHOLE_PADDING = 0.2  # of the elements of a bucket of whole parameters, at most where enough are left to fill it


class Range(NamedTuple):
    """Elements ``[start, end)`` of a bucket or of a flattened parameter."""

    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as the layout sees it. ``kind`` keeps apart what may not share a bucket (dtypes). ``whole``: one rank
    owns all of it; the same for all of a kind."""

    name: str
    numel: int
    kind: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: elements ``[start, start + numel)`` of its bucket; in a sliced bucket ``[start,
    start + part)`` of every row, row r holding elements ``[r × part, (r + 1) × part)`` of the parameter."""

    name: str
    index: int  # position of the parameter in registration order
    bucket: int
    start: int
    numel: int
    part: int = 0  # part_numel(numel, world_size) in a sliced bucket, otherwise 0
    whole: bool = False  # within one rank's part of the bucket

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Bucket:
    """A run of slots that travels in one collective. ``numel`` is a multiple of world_size × alignment; ``rows`` is
    world_size in a sliced bucket, otherwise 0."""

    index: int
    kind: str
    numel: int
    slots: tuple[Slot, ...]
    rows: int = 0

    @cached_property
    def gaps(self) -> tuple[Range, ...]:
        """Ranges that cover all elements of the bucket that belong to no parameter; of a sliced one with padding
        the whole."""
        if self.rows:
            full = sum(slot.numel for slot in self.slots) == self.numel
            return () if full else (Range(0, self.numel),)
        ranges, position = [], 0
        for slot in self.slots:
            if slot.start > position:
                ranges.append(Range(position, slot.start))
            position = slot.end
        if self.numel > position:
            ranges.append(Range(position, self.numel))
        return tuple(ranges)


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter that rests on one rank; all ranges are ``[start, start + numel)``."""

    slot: Slot
    numel: int
    param_start: int  # in the flattened parameter
    bucket_start: int  # in the full bucket
    shard_start: int  # in the rank's part of the bucket


@dataclass(frozen=True)
class PartitionLayout:
    """Slots in buckets, buckets in ``world_size`` equal parts. The same on every rank, by construction."""

    world_size: int
    alignment: int
    buckets: tuple[Bucket, ...]

    @classmethod
    def build(
        cls, specs: Sequence[ParameterSpec], world_size: int, bucket_numel: int, alignment: int = ALIGNMENT
    ) -> PartitionLayout:
        """Fill buckets of at most ``bucket_numel`` elements with ``specs`` in reverse registration order.

        A parameter larger than ``bucket_numel`` gets a bucket of its own. Whole parameters are dealt out to the ranks,
        balanced by elements; their buckets are larger, so that padding is a small part of them. Buckets are numbered
        in the order in which their last slot was filled, which is the order in which backward completes them. Raises
        ValueError for sizes that make no sense.
        """
        if world_size < 1 or alignment < 1 or bucket_numel < 1:
            raise ValueError(
                f"PartitionLayout: world_size, alignment and bucket_numel must be at least 1, got {world_size}, "
                f"{alignment} and {bucket_numel}"
            )
        groups = _group_by_bucket(specs, world_size, bucket_numel, alignment)
        unit = world_size * alignment
        buckets = []
        for index, (kind, members) in enumerate(groups):
            whole = specs[members[0]].whole
            place = _place_whole if whole else _place_in_order
            offsets, numel = place([specs[i].numel for i in members], world_size, alignment)
            slots = [
                Slot(specs[i].name, i, index, offset, specs[i].numel, whole=whole)
                for i, offset in zip(members, offsets, strict=True)
            ]
            slots.sort(key=lambda slot: (slot.start, slot.numel))  # empty ones before what begins there
            numel = max(unit, _round_up(numel, unit))
            buckets.append(Bucket(index, kind, numel, tuple(slots)))
        return cls(world_size, alignment, tuple(buckets))

    @classmethod
    def build_sliced(
        cls,
        specs: Sequence[ParameterSpec],
        groups: Sequence[Sequence[int]],
        world_size: int,
    ) -> PartitionLayout:
        """One sliced bucket for every group of parameters (indices into ``specs``, each in one group) and kind.

        Buckets are numbered in reverse order of ``groups``. Raises ValueError for sizes that make no sense.
        """
        if world_size < 1:
            raise ValueError(f"PartitionLayout: world_size must be at least 1, got {world_size}")
        buckets: list[Bucket] = []
        for group in reversed(groups):
            kinds: dict[str, list[int]] = {}
            for index in group:
                kinds.setdefault(specs[index].kind, []).append(index)
            for kind, members in kinds.items():
                slots, row = [], 0
                for index in members:
                    numel = specs[index].numel
                    part = part_numel(numel, world_size)
                    slots.append(Slot(specs[index].name, index, len(buckets), row, numel, part))
                    row += _round_up(part, PART_ALIGNMENT)
                numel = max(PART_ALIGNMENT, row) * world_size
                buckets.append(Bucket(len(buckets), kind, numel, tuple(slots), rows=world_size))
        return cls(world_size, PART_ALIGNMENT, tuple(buckets))

    def extended(self, more: PartitionLayout) -> PartitionLayout:
        """This layout with the buckets of ``more`` behind its own, whose indices and starts are counted on. What was
        at some place stays there."""
        slots, buckets = len(self.slots), len(self.buckets)
        added = tuple(
            replace(
                bucket,
                index=bucket.index + buckets,
                slots=tuple(replace(s, index=s.index + slots, bucket=s.bucket + buckets) for s in bucket.slots),
            )
            for bucket in more.buckets
        )
        return replace(self, buckets=self.buckets + added)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """All slots in registration order."""
        return tuple(sorted((slot for bucket in self.buckets for slot in bucket.slots), key=lambda slot: slot.index))

    @property
    def numel(self) -> int:
        """Elements of the whole layout, padding included."""
        return sum(bucket.numel for bucket in self.buckets)

    def shard_range(self, bucket: Bucket, rank: int) -> Range:
        """Return the part of ``bucket`` that rank ``rank`` owns, as a range of the bucket."""
        part = bucket.numel // self.world_size
        return Range(rank * part, (rank + 1) * part)

    def param_range(self, slot: Slot, rank: int) -> Range:
        """Return the part of a parameter that rank ``rank`` owns, as a range of the flattened parameter. It may be
        empty."""
        if slot.part:
            start = min(rank * slot.part, slot.numel)
            return Range(start, min(start + slot.part, slot.numel))
        low, high = self.shard_range(self.buckets[slot.bucket], rank)
        start, end = max(low, slot.start), min(high, slot.end)
        return Range(start - slot.start, end - slot.start) if start < end else Range(0, 0)

    def fragments(self, rank: int) -> Iterator[Fragment]:
        """Yield the fragments that rank ``rank`` owns, parameter by parameter, bucket after bucket. Empty parameters
        have no fragment."""
        for bucket in self.buckets:
            shard = self.shard_range(bucket, rank)
            for slot in bucket.slots:
                owned = self.param_range(slot, rank)
                if owned.numel:
                    # In a sliced bucket a slot has the same offset in every row, and a row is a shard.
                    start = shard.start + slot.start if bucket.rows else slot.start + owned.start
                    yield Fragment(slot, owned.numel, owned.start, start, start - shard.start)

    def full_fragments(self) -> Iterator[Fragment]:
        """Fragments of an owner of everything: one per non-empty parameter."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.numel:
                    yield Fragment(slot, slot.numel, 0, slot.start, slot.start)


def part_numel(numel: int, world_size: int) -> int:
    """Elements of each rank's equal part of a parameter: ceil(numel / world_size), rounded up.

    A gather writes rank r's part at r × part, and NCCL takes its slow path for an address that is no multiple of 16
    bytes. So the last ranks may own fewer elements of a small parameter than the others, or none. One rank alone
    has the parameter as it is.
    """
    return numel if world_size == 1 else _round_up(-(-numel // world_size), PART_ALIGNMENT)


def auto_bucket_numel(total_numel: int, world_size: int) -> int:
    """Return the elements per bucket when the config names none, for ``total_numel`` elements over ``world_size`` data
    ranks: 40 M, or 1 M for each rank if that is more (Megatron's rule), but at most an eighth of the model, and at
    least 4 Mi.

    A ring sends a bucket in ``world_size`` parts, and parts below about a million elements are bound by latency.

    The eighth keeps the first reduction early and the last one short, and bounds memory: up to three buckets exist at
    once (one fills, two travel). In fp32 they take at most 1.5 bytes per element of the model, less than the 2 bytes
    that its 16-bit parameters take on every rank at stages 0 to 2. The size follows from the model and the number of
    ranks alone, because all ranks must cut alike.

    Buckets below 16 MB of fp32 cost more in launches than they hide.
    """
    wanted = max(AUTO_BUCKET, AUTO_BUCKET_PER_RANK * world_size)
    return max(MIN_AUTO_BUCKET, min(wanted, total_numel // 8))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _group_by_bucket(
    specs: Sequence[ParameterSpec], world_size: int, bucket_numel: int, alignment: int
) -> list[tuple[str, list[int]]]:
    """``(kind, parameter indices)`` per bucket, ordered by the position of each bucket's last member."""
    kinds: dict[str, list[int]] = {}
    for index in reversed(range(len(specs))):
        kinds.setdefault(specs[index].kind, []).append(index)
    found: list[tuple[str, list[int]]] = []
    for kind, indices in kinds.items():
        groups: list[list[int]] = []
        size = 0  # of the last group, with what aligns its members
        for index in indices:
            full = size + specs[index].numel > bucket_numel
            if not groups or (full and not _is_sparse(groups[-1], specs, world_size, alignment)):
                groups.append([])
                size = 0
            groups[-1].append(index)
            size += _round_up(specs[index].numel, alignment)
        # What leaves the last bucket sparse goes with the parameters before it.
        while len(groups) > 1 and _is_sparse(groups[-1], specs, world_size, alignment):
            last = groups.pop()
            groups[-1] += last
        found += ((kind, group) for group in groups)
    return sorted(found, key=lambda item: -item[1][-1])


def _is_sparse(group: Sequence[int], specs: Sequence[ParameterSpec], world_size: int, alignment: int) -> bool:
    """Return whether more than :data:`WHOLE_PADDING` of a bucket of these whole parameters would be padding."""
    if not specs[group[0]].whole:
        return False
    numels = [specs[index].numel for index in group]
    most = sum(numels) / (1 - WHOLE_PADDING)
    return world_size * max(numels) > most or _place_whole(numels, world_size, alignment)[1] > most


def _place_in_order(numels: Sequence[int], world_size: int, alignment: int) -> tuple[list[int], int]:
    """The start of each of several parameters in a bucket, one behind the other, and the end of the last."""
    starts, end = [], 0
    for numel in numels:
        starts.append(_round_up(end, alignment))
        end = starts[-1] + numel
    return starts, end


def _place_whole(numels: Sequence[int], world_size: int, alignment: int) -> tuple[list[int], int]:
    """The start of each of several parameters that one rank owns each, and the end of the last. The largest are placed
    first, each on the rank that has the least. Equal buckets are dealt out alike."""
    loads = [0] * world_size
    places: dict[int, tuple[int, int]] = {}
    for member in sorted(range(len(numels)), key=lambda member: -numels[member]):
        rank = loads.index(min(loads))
        places[member] = rank, loads[rank]
        loads[rank] += _round_up(numels[member], alignment)
    part = max(loads)
    return [
        rank * part + offset for rank, offset in (places[member] for member in range(len(numels)))
    ], world_size * part
