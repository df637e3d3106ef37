"""The `elasticity` block and its arithmetic: one global batch that does not depend on the world size.

A world size *fits* a batch if the batch is micro-batch x accumulation x world size
with one of the micro-batch sizes that the block allows. All sizes are in samples; a world size is a number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, Field

from .batch import BatchSizes
from .errors import ConfigError
from .values import Block, Bool, Count, Finite, Natural, Sizes

MAX_CHOICE = 1_000_000
"""The largest batch size among which one is chosen."""

Size = Annotated[Count, Field(le=MAX_CHOICE)]
Ranks = Annotated[Count, Field(le=100_000)]


def _version(value: float) -> float:
    if value not in (0.1, 0.2):
        raise ValueError(f"expected 0.1 or 0.2, got {value:g}; write one of these or leave the key out")
    return value


Version = Annotated[
    Finite,
    AfterValidator(_version),
    Field(title="0.1 or 0.2", description="write one of these or leave the key out"),
]


@lru_cache(maxsize=16)
def choose_batch(max_train: int, micros: tuple[int, ...], worlds: range, prefer_larger: bool) -> int | None:
    """The batch size of at most `max_train` that the most of the world sizes fit; of several the largest, or the
    smallest. None where none fits any.

    A world size fits a batch if their quotient, the samples of a rank, is a multiple of a micro-batch size. Each world
    size adds one at its multiples: slices of bytes, so that a million batches take well below a second. A byte is
    enough: no size up to MAX_CHOICE has 256 divisors.
    """
    splits = bytearray(max_train + 1)  # 1 at the samples of a rank that micro-batches can split
    for micro in set(micros):
        splits[micro::micro] = b"\1" * (max_train // micro)
    counts = bytearray(max_train + 1)
    for world in worlds[: max(0, (max_train - worlds.start) // worlds.step + 1)]:
        multiples = slice(world, None, world)
        counts[multiples] = _sum(counts[multiples], splits[1 : max_train // world + 1])
    best = max(counts)
    if best == 0:
        return None
    return counts.rindex(best) if prefer_larger else counts.index(best)


def _sum(one: bytearray, other: bytearray) -> bytes:
    """Byte by byte, of sums below 256: as one large integer, since none carries over."""
    both = int.from_bytes(one, "little") + int.from_bytes(other, "little")
    return both.to_bytes(len(one), "little")


class ElasticityConfig(Block):
    """One global batch, whatever the number of ranks: a job that goes on with fewer or more of them takes the same
    steps. See [Batch sizes](#batch-sizes)."""

    enabled: Bool = False
    """Choose the batch sizes from this block. The other keys are without effect if false."""
    max_train_batch_size: Size | None = None
    """The global batch is chosen among the sizes up to this one, in samples: the one that the most numbers of ranks can
    split. Needed unless `train_batch_size` is given, which is then the global batch."""
    micro_batch_sizes: Sizes | None = None
    """The micro-batch sizes, in samples, that are allowed. Needed."""
    min_gpus: Ranks = 1
    """Smallest number of ranks that the job may have."""
    max_gpus: Ranks = 10_000
    """Largest number of ranks that the job may have."""
    num_gpus_per_node: Ranks = 1
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
    model_parallel_size: Annotated[Count, Field(le=1), Field(title="1")] = 1
    """Only 1 is possible: zerolite has no model parallelism."""

    @property
    def worlds(self) -> range:
        """The world sizes that the job may have."""
        step = self.num_gpus_per_node
        return range(-(-self.min_gpus // step) * step, self.max_gpus + 1, step)

    def solve(self, train_batch_size: int | None, world_size: int) -> BatchSizes:
        """The sizes at a world size.

        Raises:
            ConfigError: it does not fit; the sentence says why and names the nearest ones that do.
        """
        given = None if self.ignore_non_elastic_batch_info else train_batch_size
        allowed, worlds = self.micro_batch_sizes or (), self.worlds
        most = self.max_train_batch_size or 0
        train = given or choose_batch(most, allowed, worlds, self.prefer_larger_batch) or 0
        divisors = [world for world in worlds if train and train % world == 0]
        fitting = [world for world in divisors if any(train % (micro * world) == 0 for micro in allowed)]
        between = f"from {self.min_gpus} to {self.max_gpus}"
        if self.num_gpus_per_node > 1:
            between += f" (in multiples of {self.num_gpus_per_node})"
        if not fitting:
            size = f"of {given}" if given is not None else f"of at most {most}"
            sentence = (
                f"expected a global batch that some number of ranks {between} splits into micro-batches of "
                f"{_words(allowed)}, got a batch {size}, which none does; allow other micro_batch_sizes, fewer ranks "
                "or a larger batch"
            )
            raise ConfigError([("elasticity", sentence)])
        if world_size not in fitting:
            origin = "train_batch_size"
            if given is None:
                origin = f"chosen, since the most numbers of ranks split it, among those up to {most}"
            near = {max(w for w in fitting if w < world_size)} if fitting[0] < world_size else set()
            near |= {min(w for w in fitting if w > world_size)} if fitting[-1] > world_size else set()
            reason = f"{train / world_size:.4g} samples for each"
            if world_size < self.min_gpus:
                reason = "fewer than min_gpus"
            elif world_size > self.max_gpus:
                reason = "more than max_gpus"
            elif world_size not in worlds:
                reason = "not a multiple of num_gpus_per_node"
            sentence = (
                f"expected a number of ranks {between} that splits the global batch of {train} samples ({origin}) into "
                f"micro-batches of {_words(allowed)}, got {world_size} ranks ({reason}); the nearest that do: "
                f"{_words(near)}"
            )
            raise ConfigError([("elasticity", sentence)])
        micros = [micro for micro in allowed if train % (micro * world_size) == 0]
        micro = max(micros) if self.prefer_larger_batch else min(micros)
        return BatchSizes(train, micro, train // (micro * world_size))


def _words(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in sorted(set(values)))
