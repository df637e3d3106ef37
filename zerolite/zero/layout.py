"""Partition layout: buckets, slots and shards, in plain integers.

Standard library only. One :class:`PartitionLayout` indexes every flat tensor: compute parameters, gradients, master
weights and optimizer states. A parameter has a :class:`Slot`, and slots fill a bucket (:class:`BucketLayout`). A bucket
has one shard per rank. The part of a slot in a shard is a :class:`Fragment`. There are two kinds of buckets.

**Plain** buckets (stages 0 to 2). Slots stand one behind the other. A shard may begin anywhere in a slot. ::

           bucket 0                         bucket 1
    full  |--------------------------------|--------------------------|   on every rank: reduced, gathered
          | slot head.w | pad | slot n.b   | slot blocks.1.w |   pad  |
    shard |-------|-------|-------|--------|------|------|------|-----|   on one rank: updated
            rank 0  rank 1  rank 2  rank 3    r0     r1     r2    r3

    fragments of head.w: the whole shard of rank 0, and most of the shard of rank 1

Every bucket is divided into world_size equal shards. ZeRO (Rajbhandari et al., 2020, section 5) divides the full model
once. With equal shards of every bucket, a bucket is one uniform reduce-scatter and one all-gather.

**Sliced** buckets (stage 3). Each rank keeps an equal, aligned part of *each parameter* (:func:`shard_numel`). The
bucket is a table with one row per rank. A slot is a column of the table: it has the same offset in each row. ::

          slot a       slot b
    row 0 | a[0:k]   | b[0:m]   |   shard of rank 0; its ds_tensors are views of it
    row 1 | a[k:2k]  | b[m:2m]  |   shard of rank 1
    row 2 | a[2k:] . | b[2m:] . |   shard of rank 2; the last parts are padded

A row may have several ranks. Each keeps the row's compute parameters, and updates a part of the row, which is its shard
then. A part may begin anywhere in a slot. ::

               | rank 0    | rank 2    |
    row 0 | a[0:k]   | b[0:m]   | . |     on ranks 0 and 2; the end of the row is padding
    row 1 | a[k:2k]  | b[m:2m]  | . |     on ranks 1 and 3
               | rank 1    | rank 3    |

A bucket of either kind may be **spread**: ``spread`` neighbouring ranks have other parameters of the same sizes there
(experts), and a shard for each of the other ranks. With 4 ranks and spread 2, ranks 0 and 2 divide one bucket, and
ranks 1 and 3 another one of the same layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

# Elements: 128 bytes in fp32 and 64 in 16 bits, so that every slot and every shard starts on a cache line.
ALIGNMENT = 32
# Elements: at least 16 bytes in every dtype. Parts of sliced buckets are many and often small.
SHARD_ALIGNMENT = 16
# Elements of a bucket: auto_bucket_numel says why.
MIN_AUTO_BUCKET = 4 << 20
AUTO_BUCKET = 40_000_000
AUTO_BUCKET_PER_RANK = 1_000_000


class Range(NamedTuple):
    """Elements ``[start, end)`` of a bucket or of a flattened parameter."""

    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start


class Gap(NamedTuple):
    """Elements [start, start + width) of a bucket, and those below them in the next rows, ``rows`` in all."""

    start: int
    rows: int
    width: int

    @property
    def numel(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True)
class ParameterSpec:
    """Input of the layout: one parameter.

    Attributes:
        name: its qualified name.
        numel: its elements.
        bucket_kind: parameters of different kinds (dtypes, for example) never share a bucket.
        spread: neighbouring ranks that have other parameters in this place. The same for all parameters of a kind.
    """

    name: str
    numel: int
    bucket_kind: str = ""
    spread: int = 1


@dataclass(frozen=True)
class Slot:
    """Position of one parameter in its bucket.

    It has the elements ``[start, start + numel)`` of the bucket. In a sliced bucket it has ``[start, start + part)`` of
    every row; row r has elements ``[r × part, (r + 1) × part)`` of the parameter.

    Attributes:
        name: qualified name of the parameter.
        index: position of the parameter in registration order.
        bucket: index of the bucket.
        start: first element in the bucket; in a sliced one, in each row.
        numel: elements of the parameter.
        part: ``shard_numel(numel, rows)`` in a sliced bucket, otherwise 0.
    """

    name: str
    index: int
    bucket: int
    start: int
    numel: int
    part: int = 0

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class BucketLayout:
    """Slots whose gradients are reduced in one collective, and whose parameters are gathered in one.

    Attributes:
        index: position of the bucket in the layout.
        bucket_kind: kind of its parameters.
        numel: elements with padding, a multiple of shards × alignment.
        slots: in the order of their starts.
        rows: rows of a sliced bucket: its number of shards, or a divisor of it if several ranks share a row; otherwise
            0.
        spread: neighbouring ranks that have other parameters here, each its own; there are world_size / spread shards.
    """

    index: int
    bucket_kind: str
    numel: int
    slots: tuple[Slot, ...]
    rows: int = 0
    spread: int = 1

    def row_of(self, position: int) -> int:
        """Return the row of the element at ``position``; 0 if the bucket is not sliced."""
        return position * self.rows // self.numel

    def origin_of(self, slot: Slot, position: int) -> int:
        """Return the number that turns elements of a parameter into positions in the bucket, in the row of
        ``position``: element ``i`` is at ``origin + i``."""
        # A row further on, the bucket has gone on by a row, and the parameter by a part.
        return slot.start + self.row_of(position) * (self.numel // (self.rows or 1) - slot.part)

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """The padding: between slots, and in a sliced bucket also at the ends of slots."""
        rows = self.rows or 1
        row = self.numel // rows
        gaps, position = [], 0
        for slot in self.slots:
            gaps.append(Gap(position, rows, slot.start - position))
            position = slot.start + (slot.part if self.rows else slot.numel)
            if slot.part:
                full, rest = divmod(slot.numel, slot.part)
                if rest:
                    gaps.append(Gap(full * row + slot.start + rest, 1, slot.part - rest))
                    full += 1
                gaps.append(Gap(full * row + slot.start, rows - full, slot.part))
        gaps.append(Gap(position, rows, row - position))
        return tuple(gap for gap in gaps if gap.numel)


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter that one rank owns: the same ``numel`` elements in three coordinate systems.

    Attributes:
        slot: slot of the parameter.
        numel: elements of the part.
        param_start: first of them in the flattened parameter.
        bucket_start: first of them in the full bucket.
        shard_start: first of them in the rank's shard of the bucket.
    """

    slot: Slot
    numel: int
    param_start: int
    bucket_start: int
    shard_start: int


@dataclass(frozen=True)
class PartitionLayout:
    """Layout of all parameters: buckets of slots, each divided into ``world_size`` / spread equal shards.

    It depends on sizes and config alone, so all ranks have the same one. The module's docstring draws it.
    """

    world_size: int
    alignment: int
    buckets: tuple[BucketLayout, ...]

    @classmethod
    def build(
        cls, specs: Sequence[ParameterSpec], world_size: int, bucket_numel: int, alignment: int = ALIGNMENT
    ) -> PartitionLayout:
        """Lay out plain buckets.

        Parameters fill buckets in reverse registration order, and buckets are numbered by their last parameter:
        backward completes them in this order. A parameter larger than ``bucket_numel`` gets a bucket of its own.

        Args:
            specs: parameters in registration order.
            world_size: ranks, and shards of a bucket that is not spread.
            bucket_numel: most elements of a bucket.
            alignment: every slot starts at a multiple of so many elements, and so does every shard.

        Raises:
            ValueError: a size is below 1.
        """
        if world_size < 1 or alignment < 1 or bucket_numel < 1:
            raise ValueError(
                f"PartitionLayout: world_size, alignment and bucket_numel must be at least 1, got {world_size}, "
                f"{alignment} and {bucket_numel}"
            )
        buckets = []
        for index, (bucket_kind, members) in enumerate(_group_by_bucket(specs, bucket_numel, alignment)):
            spread, slots, end = specs[members[0]].spread, [], 0
            for i in members:
                slots.append(Slot(specs[i].name, i, index, _round_up(end, alignment), specs[i].numel))
                end = slots[-1].end
            unit = world_size // spread * alignment
            numel = max(unit, _round_up(end, unit))
            buckets.append(BucketLayout(index, bucket_kind, numel, tuple(slots), spread=spread))
        return cls(world_size, alignment, tuple(buckets))

    @classmethod
    def build_sliced(
        cls,
        specs: Sequence[ParameterSpec],
        groups: Sequence[Sequence[int]],
        rows: int,
        ranks_of_row: int = 1,
        alignment: int = SHARD_ALIGNMENT,
    ) -> PartitionLayout:
        """Lay out sliced buckets: one for each group of parameters and kind, numbered in reverse order of ``groups``.

        Args:
            specs: parameters in registration order.
            groups: indices into ``specs``, each in one group.
            rows: rows of a bucket that is not spread.
            ranks_of_row: shards per row.
            alignment: slots and shards begin at its multiples. A multiple of ``SHARD_ALIGNMENT``.

        Raises:
            ValueError: a number is below 1.
        """
        if rows < 1 or ranks_of_row < 1:
            raise ValueError(f"PartitionLayout: expected at least 1, got {rows} rows of {ranks_of_row} ranks each")
        buckets: list[BucketLayout] = []
        for group in reversed(groups):
            kinds: dict[str, list[int]] = {}
            for index in group:
                kinds.setdefault(specs[index].bucket_kind, []).append(index)
            for bucket_kind, members in kinds.items():
                slots, row = [], 0
                spread = specs[members[0]].spread
                parts = rows // spread
                for index in members:
                    numel = specs[index].numel
                    part = shard_numel(numel, parts)
                    slots.append(Slot(specs[index].name, index, len(buckets), row, numel, part))
                    row += _round_up(part, alignment)
                numel = _round_up(max(1, row), alignment * ranks_of_row) * parts
                buckets.append(BucketLayout(len(buckets), bucket_kind, numel, tuple(slots), parts, spread))
        return cls(rows * ranks_of_row, alignment, tuple(buckets))

    def extended(self, more: PartitionLayout) -> PartitionLayout:
        """Return a layout with the buckets of ``more`` after those of this one, which do not move."""
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

    def shard_range(self, bucket: BucketLayout, rank: int) -> Range:
        """Return the part of ``bucket`` that rank ``rank`` owns, as a range of the bucket. If rows have several ranks,
        neighbouring ranks have different rows."""
        shards, rank = self.world_size // bucket.spread, rank // bucket.spread
        part, rows = bucket.numel // shards, bucket.rows or shards
        place = rank % rows * (shards // rows) + rank // rows
        return Range(place * part, (place + 1) * part)

    def param_range(self, slot: Slot, rank: int) -> Range:
        """Return the part of a parameter that rank ``rank`` owns, as a range of the flattened parameter. It may be
        empty."""
        bucket = self.buckets[slot.bucket]
        low, high = self.shard_range(bucket, rank)
        row, origin = bucket.row_of(low), bucket.origin_of(slot, low)
        start = max(low - origin, row * slot.part)
        end = min(high - origin, (row + 1) * slot.part or slot.numel, slot.numel)
        return Range(start, end) if start < end else Range(0, 0)

    def part_numels(self, bucket: BucketLayout, slots: Sequence[Slot]) -> Iterator[list[int]]:
        """Yield for each rank the elements that it owns of each of these slots of ``bucket``: the lengths of
        :meth:`param_range`, of thousands of ranks in a fraction of a second."""
        width = bucket.numel // (bucket.rows or 1)
        edges = [(slot.start, slot.numel, slot.part, slot.part or slot.numel) for slot in slots]
        for rank in range(self.world_size):
            low, high = self.shard_range(bucket, rank)
            row = bucket.row_of(low)
            low, high = low - row * width, high - row * width  # in the row
            numels = []
            for start, numel, part, in_row in edges:
                end = min(start + in_row, start + numel - row * part, high)
                numels.append(max(0, end - max(start, low)))
            yield numels

    def fragments(self, rank: int) -> Iterator[Fragment]:
        """Yield the fragments that rank ``rank`` owns, bucket by bucket. Empty parameters have none."""
        for bucket in self.buckets:
            yield from self.bucket_fragments(bucket, rank)

    def full_fragments(self) -> Iterator[Fragment]:
        """Yield the fragments of a rank that owns everything (stage 0): one for each parameter that is not empty."""
        for bucket in self.buckets:
            yield from self.bucket_fragments(bucket, None)

    def bucket_fragments(self, bucket: BucketLayout, rank: int | None) -> Iterator[Fragment]:
        """Yield the fragments of one bucket that rank ``rank`` owns; None for a rank that owns everything."""
        if rank is None:
            yield from (Fragment(slot, slot.numel, 0, slot.start, slot.start) for slot in bucket.slots if slot.numel)
            return
        shard = self.shard_range(bucket, rank)
        for slot in bucket.slots:
            owned = self.param_range(slot, rank)
            if owned.numel:
                start = bucket.origin_of(slot, shard.start) + owned.start
                yield Fragment(slot, owned.numel, owned.start, start, start - shard.start)


def shard_numel(numel: int, world_size: int) -> int:
    """Return the elements of each rank's part of a parameter: ceil(numel / world_size), rounded up if there are several
    ranks.

    An all-gather writes rank r's part at r × part, and NCCL is slow if an address is not a multiple of 16 bytes. The
    price of rounding up: the last ranks may own fewer elements of a small parameter than the others, or none.
    """
    return numel if world_size == 1 else _round_up(-(-numel // world_size), SHARD_ALIGNMENT)


def auto_bucket_numel(total_numel: int, world_size: int) -> int:
    """Return the elements per bucket if the config names none. All ranks must get the same number, so it depends only
    on two numbers that are equal on all ranks.

    - 40 M elements, or 1 M for each rank if that is more (Megatron's rule). A ring sends a bucket in ``world_size``
      parts, and parts below about a million elements take no less time, because latency dominates.
    - At most an eighth of the model, so that the first reduction starts early and the last one is short. This bounds
      memory, too: up to three buckets exist at once (one fills, two are reduced). In fp32 they take 1.5 bytes for each
      element of the model. At stages 0 to 2 its 16-bit parameters take 2 bytes on every rank.
    - At least 4 Mi elements: smaller buckets cost more in launches than they hide.

    Args:
        total_numel: elements of the model.
        world_size: data-parallel ranks.
    """
    wanted = max(AUTO_BUCKET, AUTO_BUCKET_PER_RANK * world_size)
    return max(MIN_AUTO_BUCKET, min(wanted, total_numel // 8))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _group_by_bucket(specs: Sequence[ParameterSpec], bucket_numel: int, alignment: int) -> list[tuple[str, list[int]]]:
    """Return ``(bucket_kind, parameter indices)`` of each bucket, in the order of the buckets' last members."""
    kinds: dict[str, list[int]] = {}
    for index in reversed(range(len(specs))):
        kinds.setdefault(specs[index].bucket_kind, []).append(index)
    packed: list[tuple[str, list[int]]] = []
    for bucket_kind, indices in kinds.items():
        groups: list[list[int]] = []
        size = 0  # elements of the last group, with the padding between its members
        for index in indices:
            if not groups or size + specs[index].numel > bucket_numel:
                groups.append([])
                size = 0
            groups[-1].append(index)
            size += _round_up(specs[index].numel, alignment)
        packed += ((bucket_kind, group) for group in groups)
    return sorted(packed, key=lambda entry: -entry[1][-1])
