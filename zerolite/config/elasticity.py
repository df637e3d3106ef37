"""The `elasticity` block and its arithmetic: one global batch that does not depend on the world size.

A world size *fits* a batch if the batch is micro-batch x accumulation x world size
with one of the micro-batch sizes that the block allows. All sizes are in samples; a world size is a number of ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, Field

from .batch import BatchSizeError, BatchSizes, divisors
from .values import Block, Bool, Count, Finite, Hint, Natural, Sizes

MAX_CHOICE = 1_000_000
"""The largest batch size among which one is chosen, and the largest world size."""

Size = Annotated[Count, Field(le=MAX_CHOICE)]


def _version(value: float) -> float:
    if value not in (0.1, 0.2):
        raise ValueError(f"expected 0.1 or 0.2, got {value:g}; write one of these or leave the key out")
    return value


Version = Annotated[Finite, AfterValidator(_version), Hint("0.1 or 0.2", "write one of these or leave the key out")]


_ONE_MORE = bytes((value + 1) % 256 for value in range(256))


@lru_cache(maxsize=16)
def choose_batch(max_train: int, micros: tuple[int, ...], worlds: range, prefer_larger: bool) -> int | None:
    """The batch size of at most `max_train` that the most of the world sizes fit; of several the largest, or the
    smallest. None where none fits any.

    A world size fits a batch if their quotient, the samples of a rank, is a multiple of a micro-batch size. All
    (world size, samples of a rank) with a product of at most `max_train` are counted at their product: row by row where
    the world size is below the root of `max_train`, and column by column where it is above. Both are slices of bytes,
    so that a million takes well below a second. A byte is enough: no size up to MAX_CHOICE has 256 divisors.
    """
    splits = bytearray(max_train + 1)  # 1 at the samples of a rank that micro-batches can split
    for micro in set(micros):
        splits[micro::micro] = b"\1" * (max_train // micro)
    counts = bytearray(max_train + 1)
    root = math.isqrt(max_train)
    few = range(worlds.start, min(root + 1, worlds.stop), worlds.step)
    for world in few:
        row = slice(world, None, world)
        counts[row] = _sum(counts[row], splits[1 : max_train // world + 1])
    many = range(worlds.start + len(few) * worlds.step, worlds.stop, worlds.step)
    for samples in range(1, max_train // (root + 1) + 1):
        last = many[: bisect_right(many, max_train // samples)]
        if splits[samples] and last:
            column = slice(last[0] * samples, last[-1] * samples + 1, worlds.step * samples)
            counts[column] = counts[column].translate(_ONE_MORE)
    best = max(counts)
    if best == 0:
        return None
    return counts.rindex(best) if prefer_larger else counts.index(best)


def _sum(one: bytearray, other: bytearray) -> bytes:
    """Byte by byte, of sums below 256: as one large integer, since none carries over."""
    both = int.from_bytes(one, "little") + int.from_bytes(other, "little")
    return both.to_bytes(len(one), "little")


def fitting_worlds(train: int, micros: Sequence[int], worlds: range) -> list[int]:
    """The world sizes that fit this batch, ascending."""
    return [
        world for world in divisors(train) if world in worlds and any(train % (micro * world) == 0 for micro in micros)
    ]


def choose_micro(train: int, micros: Iterable[int], world_size: int, prefer_larger: bool) -> int | None:
    """The largest micro-batch (or the smallest) with which the world size fits the batch; None if there is none."""
    fitting = [micro for micro in micros if train % (micro * world_size) == 0]
    if not fitting:
        return None
    return max(fitting) if prefer_larger else min(fitting)


def nearest_worlds(worlds: Sequence[int], world_size: int) -> list[int]:
    """Return the largest of ascending world sizes below this one and the smallest above, where they exist."""
    below = [world for world in worlds if world < world_size]
    above = [world for world in worlds if world > world_size]
    return below[-1:] + above[:1]


class ElasticityConfig(Block):
    """One global batch, whatever the number of ranks: a job that goes on with fewer or more of them takes the same
    steps. See [Batch sizes](#batch-sizes)."""

    enabled: Bool = False
    """Choose the batch sizes from this block. The other keys are without effect if false."""
    max_train_batch_size: Annotated[Size, Hint(null="train_batch_size is given")] | None = None
    """The global batch is chosen among the sizes up to this one, in samples: the one that the most numbers of ranks can
    split. Needed unless `train_batch_size` is given, which is then the global batch."""
    micro_batch_sizes: Sizes | None = None
    """The micro-batch sizes, in samples, that are allowed. Needed."""
    min_gpus: Size = 1
    """Smallest number of ranks that the job may have."""
    max_gpus: Size = 10_000
    """Largest number of ranks that the job may have."""
    num_gpus_per_node: Size = 1
    """Numbers of ranks are multiples of this one: ranks come and go by whole nodes."""
    prefer_larger_batch: Bool = True
    """Of global batches that equally many numbers of ranks can split, the largest; false: the smallest. So too of the
    micro-batch sizes that fit."""
    ignore_non_elastic_batch_info: Bool = False
    """Ignore `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps`. false: the first
    is the global batch, and the other two are errors."""
    min_time: Natural = 0
    """Accepted, without effect: it tells a scheduler how long not to change the job."""
    version: Version = 0.2
    """Accepted, without effect: there is one way to choose."""
    model_parallel_size: Annotated[Count, Field(le=1), Hint("1")] = 1
    """Only 1 is possible: zerolite has no model parallelism."""

    @property
    def worlds(self) -> range:
        """The world sizes that the job may have."""
        step = self.num_gpus_per_node
        return range(-(-self.min_gpus // step) * step, self.max_gpus + 1, step)

    def solve(self, train_batch_size: int | None, world_size: int) -> BatchSizes:
        """The sizes at a world size.

        Raises:
            BatchSizeError: it does not fit; the sentence says why and names the nearest ones that do.
        """
        given = None if self.ignore_non_elastic_batch_info else train_batch_size
        micros, larger = self.micro_batch_sizes or (), self.prefer_larger_batch
        assert given is not None or self.max_train_batch_size is not None
        train = given or choose_batch(self.max_train_batch_size or 0, micros, self.worlds, larger)
        worlds = [] if train is None else fitting_worlds(train, micros, self.worlds)
        if train is None or not worlds:
            size = f"of {given}" if given is not None else f"of at most {self.max_train_batch_size}"
            sentence = (
                f"expected a global batch that some number of ranks {self._range} splits into micro-batches of "
                f"{_words(micros)}, got a batch {size}, which none does; allow other micro_batch_sizes, fewer ranks or "
                "a larger batch"
            )
            raise BatchSizeError("elasticity", sentence)
        micro = choose_micro(train, micros, world_size, larger)
        if micro is None or world_size not in self.worlds:
            origin = "train_batch_size"
            if given is None:
                most = self.max_train_batch_size
                origin = f"chosen, since the most numbers of ranks split it, among those up to {most}"
            raise BatchSizeError(
                "elasticity", self._does_not_fit(f"{train} samples ({origin})", train, worlds, world_size)
            )
        return BatchSizes(train, micro, train // (micro * world_size))

    def _does_not_fit(self, batch: str, train: int, worlds: list[int], world_size: int) -> str:
        if world_size > self.max_gpus:
            reason = "more than max_gpus"
        elif world_size < self.min_gpus:
            reason = "fewer than min_gpus"
        elif world_size % self.num_gpus_per_node:
            reason = f"not a multiple of num_gpus_per_node, {self.num_gpus_per_node}"
        else:
            reason = f"{train / world_size:.4g} samples for each"
        return (
            f"expected a number of ranks {self._range} that splits the global batch of {batch} into micro-batches of "
            f"{_words(self.micro_batch_sizes or ())}, got {world_size} ranks ({reason}); the nearest that do: "
            f"{_words(nearest_worlds(worlds, world_size))}"
        )

    @property
    def _range(self) -> str:
        text, step = f"from {self.min_gpus} to {self.max_gpus}", self.num_gpus_per_node
        return text if step == 1 else f"{text} (in multiples of {step})"


def _words(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in sorted(set(values)))
