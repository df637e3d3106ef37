"""Position within an epoch of a loader: the part that a checkpoint stores, and the remaining samples.

The order of a pass does not depend on the number of ranks. A DistributedSampler shuffles with seed + epoch and pads the
result to a multiple of the ranks. Rank r gets every world_size-th index from r on. All ranks take equally many batches,
so together they have been given the first samples of that order. One number describes these, and the remaining samples
can be split over any other number of ranks.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler that shuffles anew in each pass: drawing the indices of a pass advances `epoch`.

    `set_epoch(epoch)` before a pass still works. All ranks must begin the same number of passes, or their parts
    overlap.
    """

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return indices


@dataclass(frozen=True)
class DataPosition:
    """Position of the passes over a loader, in plain data.

    Attributes:
        samples: samples of a whole pass.
        order: name of their order, see :attr:`SampleOrder.name`.
        epoch: the epoch of the pass; None if the sampler has none.
        consumed: samples of the pass that all ranks together have been given; 0 before it begins.
    """

    samples: int
    order: str
    epoch: int | None
    consumed: int


_TYPES: dict[str, tuple[type, ...]] = {
    "samples": (int,),
    "order": (str,),
    "epoch": (int, type(None)),
    "consumed": (int,),
}


def position_from(entry: Any) -> DataPosition:
    """Return the DataPosition whose ``asdict`` is `entry`, which may have more keys.

    Raises ValueError for any other value.
    """
    fits = isinstance(entry, dict) and all(type(entry.get(name)) in types for name, types in _TYPES.items())
    if not fits or not 0 <= entry["consumed"] <= entry["samples"]:
        raise ValueError(
            f"expected the position of a loader, {', '.join(_TYPES)}, with consumed from 0 to samples, got {entry!r}"
        )
    return DataPosition(**{name: entry.get(name) for name in _TYPES})


class SampleOrder:
    """The order in which a sampler gives the samples of its passes.

    It can be given again for torch's DistributedSampler and SequentialSampler. Others draw theirs anew in each pass.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    @property
    def name(self) -> str:
        """Name of the order. Samplers with equal names and epochs give equally many samples in the same order."""
        if isinstance(self.sampler, DistributedSampler):
            return f"shuffled with seed {self.sampler.seed}" if self.sampler.shuffle else "in sequence"
        return "in sequence" if type(self.sampler) is SequentialSampler else f"drawn by {type(self.sampler).__name__}"

    @property
    def shuffled(self) -> bool:
        return self.name != "in sequence"

    @property
    def epoch(self) -> int | None:
        """The epoch of the next pass; None if the sampler has no epochs."""
        return self.sampler.epoch if isinstance(self.sampler, DistributedSampler) else None

    @property
    def drop_last(self) -> bool:
        """True if samples that do not reach all ranks are left out."""
        return isinstance(self.sampler, DistributedSampler) and self.sampler.drop_last

    def epoch_after(self, epoch: int | None) -> int | None:
        """Return the value of :attr:`epoch` after a pass in `epoch`."""
        return epoch + 1 if epoch is not None and isinstance(self.sampler, EpochSampler) else epoch

    def obstacle(self, position: DataPosition) -> str | None:
        """Return why the pass at `position` cannot be continued, or None if it can."""
        if position.order != self.name:
            return f"its samples were {position.order} and are now {self.name}"
        if self.name.startswith("drawn by"):
            return (
                f"a {type(self.sampler).__name__} draws an order that nothing records (torch's DistributedSampler "
                "gives the same one again, also on one process)"
            )
        return None

    def restore(self, position: DataPosition) -> None:
        """Give the sampler the epoch of `position`, for its next pass."""
        if position.epoch is not None and isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(position.epoch)

    def begin_again(self) -> list[int]:
        """Return the indices of a pass of all ranks, without repetitions. The sampler is left as after that pass."""
        if not isinstance(self.sampler, DistributedSampler):
            return list(self.sampler)
        whole: DistributedSampler[Any] = DistributedSampler(
            self.sampler.dataset, 1, 0, self.sampler.shuffle, self.sampler.seed
        )
        whole.set_epoch(self.sampler.epoch)
        self.sampler.set_epoch(self.epoch_after(self.sampler.epoch))  # type: ignore[arg-type]
        return list(whole)


def remaining_per_rank(samples: int, world_size: int, drop_last: bool) -> int:
    """Return the indices of each rank for `samples` remaining samples. drop_last: leave out samples that would not give
    every rank one more."""
    return samples // world_size if drop_last else -(-samples // world_size)


def remaining_indices(indices: Sequence[int], start: int, rank: int, world_size: int, drop_last: bool) -> list[int]:
    """Return this rank's share of ``indices[start:]``, equally long on all ranks.

    Missing indices at the end are repeated from the beginning of `indices`, as a DistributedSampler does. So a pass
    that continues with the same number of ranks has the same indices as without the interruption.
    """
    total = remaining_per_rank(len(indices) - start, world_size, drop_last) * world_size
    rest = list(indices[start : start + total])
    rest += itertools.islice(itertools.cycle(indices), total - len(rest))
    return rest[rank::world_size]


def with_indices(loader: DataLoader[object], indices: Sequence[int]) -> DataLoader[Any]:
    """Return a copy of `loader` that loads the samples `indices`. `loader` has a BatchSampler."""
    batches: Any = loader.batch_sampler
    other = copy.copy(loader)
    # A DataLoader refuses to set `batch_sampler`, so write past its check. `_iterator` keeps persistent workers, which
    # are busy with the indices of the original: the copy starts its own.
    vars(other).update(batch_sampler=BatchSampler(indices, batches.batch_size, batches.drop_last), _iterator=None)
    return other


@contextlib.contextmanager
def preserve_rng_state(*generators: torch.Generator | None) -> Iterator[None]:
    """Context that restores the generators' states at its end."""
    states = [(generator, generator.get_state()) for generator in generators if generator is not None]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
