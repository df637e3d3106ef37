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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


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
        drawn_from: random state (hexadecimal) from which the order of a pass under way was drawn; None for samplers
            that draw nothing.
        generator: state of the sampler's own generator; None for samplers that have none.
    """

    samples: int
    order: str
    epoch: int | None
    consumed: int
    drawn_from: str | None
    generator: str | None


_TYPES = {"samples": int, "order": str, "epoch": int, "consumed": int, "drawn_from": str, "generator": str}
_OPTIONAL = ("epoch", "drawn_from", "generator")


def position_from(entry: Any) -> DataPosition:
    """Return the DataPosition whose ``asdict`` is `entry`. Raises ValueError for any other value."""
    fits = isinstance(entry, dict) and entry.keys() == _TYPES.keys()
    for name, cls in _TYPES.items() if fits else ():
        fits = fits and (type(entry[name]) is cls or (name in _OPTIONAL and entry[name] is None))
    if not fits or not 0 <= entry["consumed"] <= entry["samples"]:
        raise ValueError(
            f"expected the position of a loader, {', '.join(_TYPES)}, with consumed from 0 to samples, got {entry!r}"
        )
    return DataPosition(**entry)


class SampleOrder:
    """The order in which a sampler gives the samples of its passes. Iterates over the sampler."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.draws = type(sampler) in _DRAWING  # its order comes from a random generator, anew in each pass
        self._drawn_from: torch.Tensor | None = None  # state of the generator before the latest pass

    def __iter__(self) -> Iterator[int]:
        if self.draws:
            self._drawn_from = self._generator.get_state()
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def name(self) -> str:
        """Name of the order. Samplers with equal names, and equal epochs or random states, give equally many samples in
        the same order."""
        if isinstance(self.sampler, DistributedSampler):
            return f"shuffled with seed {self.sampler.seed}" if self.sampler.shuffle else "in sequence"
        return "in sequence" if type(self.sampler) is SequentialSampler else f"drawn by {type(self.sampler).__name__}"

    @property
    def shuffled(self) -> bool:
        return self.name != "in sequence"

    @property
    def epoch(self) -> int | None:
        """The next pass's."""
        return self.sampler.epoch if isinstance(self.sampler, DistributedSampler) else None

    @property
    def drop_last(self) -> bool:
        """True if samples that do not reach all ranks are left out."""
        return isinstance(self.sampler, DistributedSampler) and self.sampler.drop_last

    def epoch_after(self, epoch: int | None) -> int | None:
        """Return the value of :attr:`epoch` after a pass in `epoch`."""
        return epoch + 1 if epoch is not None and isinstance(self.sampler, EpochSampler) else epoch

    def next_pass(self, samples: int) -> DataPosition:
        """Return the position before the next pass."""
        generator = self._own_generator
        return DataPosition(
            samples, self.name, self.epoch, 0, None, None if generator is None else _to_text(generator.get_state())
        )

    def in_pass(self, samples: int, epoch: int | None, consumed: int) -> DataPosition:
        """Return the position in the pass begun last, which is in `epoch`."""
        drawn_from = None if self._drawn_from is None else _to_text(self._drawn_from)
        return replace(self.next_pass(samples), epoch=epoch, consumed=consumed, drawn_from=drawn_from)

    def obstacle(self, position: DataPosition) -> str | None:
        """Return why the pass at `position` cannot be continued, or None if it can."""
        if position.order != self.name:
            return f"its samples were {position.order} and are now {self.name}"
        if isinstance(self.sampler, DistributedSampler) or type(self.sampler) is SequentialSampler:
            return None
        if not self.draws:
            return f"{type(self.sampler).__name__} draws its indices in a way of its own"
        if position.drawn_from is None or not _fits(position.drawn_from, self._generator):
            return "the random state that its order was drawn from is not one of the sampler's generator"
        return None

    def restore(self, position: DataPosition) -> None:
        """Give the sampler the epoch and the generator's state of `position`, for its next pass."""
        if position.epoch is not None and isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(position.epoch)
        generator = self._own_generator
        if generator is not None and position.generator is not None and _fits(position.generator, generator):
            generator.set_state(_from_text(position.generator))

    def begin_again(self, position: DataPosition) -> list[int]:
        """Return the indices of the pass at `position`: those of all ranks, without repetitions.

        The sampler is left as the interrupted pass would leave it. Nothing is drawn from torch's default generator,
        because the interrupted pass has drawn from it already.
        """
        if isinstance(self.sampler, DistributedSampler):
            sampler: DistributedSampler[Any] = DistributedSampler(
                self.sampler.dataset, 1, 0, self.sampler.shuffle, self.sampler.seed
            )
            sampler.set_epoch(self.sampler.epoch)
            self.sampler.set_epoch(self.epoch_after(self.sampler.epoch))  # type: ignore[arg-type]
            return list(sampler)
        if position.drawn_from is None:
            return list(self)
        # A RandomSampler with a generator of its own draws from it at the end of a pass, too. So that generator keeps
        # the state that drawing the indices again gives it; only torch's default generator is put back.
        with preserve_rng_state(torch.default_generator):
            self._generator.set_state(_from_text(position.drawn_from))
            return list(self)

    @property
    def _own_generator(self) -> torch.Generator | None:
        return self.sampler.generator if self.draws else None

    @property
    def _generator(self) -> torch.Generator:
        generator = self._own_generator
        return torch.default_generator if generator is None else generator


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


def with_indices(loader: DataLoader[object], indices: Iterable[int]) -> DataLoader[Any]:
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


def _to_text(state: torch.Tensor) -> str:
    """Return a generator's state (uint8) in hexadecimal."""
    return bytes(state.tolist()).hex()


def _from_text(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8, device="cpu")


def _fits(text: str, generator: torch.Generator) -> bool:
    """Return True if `text` is the state of a generator of this kind."""
    try:
        torch.Generator(generator.device).set_state(_from_text(text))
    except (ValueError, RuntimeError):
        return False
    return True
