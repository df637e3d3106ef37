"""The `elasticity` block and its arithmetic: one global batch that does not depend on the world size.

A world size *fits* a batch if the batch is micro-batch x accumulation x world size for one of the allowed micro-batch
sizes. All sizes are in samples; a world size is a number of ranks.
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
"""The largest batch size that can be chosen."""

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
    """Return the batch size of at most `max_train` that the most world sizes fit; None if no world size fits any.

    The method counts for all batch sizes at once. A world size fits a batch if the samples of one rank are a multiple
    of a micro-batch size. So each world size adds 1 at those of its multiples. The additions work on slices of bytes,
    and a million batch sizes take well below a second. A byte is enough, since no number up to MAX_CHOICE has 256
    divisors.

    Args:
        max_train: the largest batch size, in samples.
        micros: allowed micro-batch sizes, in samples.
        worlds: allowed numbers of ranks.
        prefer_larger: of several best sizes return the largest; else the smallest.
    """
    splits = bytearray(max_train + 1)  # 1 at each number of samples of one rank that micro-batches can split
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
    """Add byte by byte, by one addition of large integers: no sum reaches 256, so nothing carries over."""
    both = int.from_bytes(one, "little") + int.from_bytes(other, "little")
    return both.to_bytes(len(one), "little")


class ElasticityConfig(Block):
    """Keep the global batch the same at every number of ranks. So a job that continues with fewer or more ranks takes
    the same steps. See [Batch sizes](#batch-sizes)."""

    enabled: Bool = False
    """Choose the batch sizes from this block. false: its other keys have no effect."""
    max_train_batch_size: Size | None = None
    """Largest global batch, in samples. Among the sizes up to this one, the one is taken that the most numbers of ranks
    can split. Needed unless `train_batch_size` gives the global batch."""
    micro_batch_sizes: Sizes | None = None
    """Allowed micro-batch sizes, in samples. Needed."""
    min_gpus: Ranks = 1
    """Smallest number of ranks."""
    max_gpus: Ranks = 10_000
    """Largest number of ranks."""
    num_gpus_per_node: Ranks = 1
    """Allow only multiples of this number of ranks, since ranks come and go by whole nodes."""
    prefer_larger_batch: Bool = True
    """Take the largest of several best global batches, and of several micro-batch sizes that fit. false: the
    smallest."""
    ignore_non_elastic_batch_info: Bool = False
    """Ignore `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps`. false: the first
    gives the global batch, and the other two are errors."""
    min_time: Natural = 0
    """Accepted, without effect: for schedulers, the time for which the job should not change."""
    version: Version = 0.2
    """Accepted, without effect: there is one algorithm."""
    model_parallel_size: Annotated[Count, Field(le=1), Field(title="1")] = 1
    """Only 1 is possible: elasticity excludes tensor and pipeline parallelism."""

    @property
    def worlds(self) -> range:
        """The allowed world sizes."""
        step = self.num_gpus_per_node
        return range(-(-self.min_gpus // step) * step, self.max_gpus + 1, step)

    def solve(self, train_batch_size: int | None, world_size: int) -> BatchSizes:
        """Return the batch sizes at a world size.

        Raises:
            ConfigError: the world size does not fit; the sentence says why and names the nearest ones that do.
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
