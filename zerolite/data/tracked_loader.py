"""Loaders that know the samples of each batch, and their position in the epoch: what a checkpoint stores of it.

The order of a pass does not depend on the number of ranks. A DistributedSampler shuffles with seed + epoch and pads the
result to a multiple of the ranks. Rank r gets every world_size-th index from r on. All ranks take equally many batches,
so together they have been given the first samples of that order. One number describes these, and the remaining samples
can be split over any other number of ranks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler


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
        order: name of their order. Samplers with equal names and epochs give equally many samples in the same order.
        epoch: the epoch of the pass; None if the sampler has none.
        consumed: samples of the pass that all ranks together have been given; 0 before it begins.
    """

    samples: int
    order: str
    epoch: int | None
    consumed: int


def position_from(entry: Any) -> DataPosition:
    """Return the DataPosition whose ``asdict`` is `entry`, which may have more keys. Raises ValueError for any other
    value."""
    types = {"samples": (int,), "order": (str,), "epoch": (int, type(None)), "consumed": (int,)}
    fits = isinstance(entry, dict) and all(type(entry.get(name)) in allowed for name, allowed in types.items())
    if not fits or not 0 <= entry["consumed"] <= entry["samples"]:
        raise ValueError(
            f"expected the position of a loader, {', '.join(types)}, with consumed from 0 to samples, got {entry!r}"
        )
    return DataPosition(**{name: entry[name] for name in types})


@dataclass(frozen=True)
class Rows:
    """Mapping from the rows of a batch to samples, on all ranks together.

    Row j of rank r is sample j * world_size + r of those that the ranks hold together.

    Attributes:
        per_rank: rows on every rank.
        samples: different samples among the per_rank * world_size rows. The rows behind them are repetitions, which
            give all ranks equally many.
    """

    per_rank: int
    samples: int


@dataclass(frozen=True)
class Share:
    """Split of a pass over the ranks.

    Attributes:
        numel: indices of each rank.
        total: samples that all ranks together cover.
        world_size: ranks that share the pass.
        batch_size: samples in a batch of one rank.
        drop_last: leave out a last batch that is smaller.
    """

    numel: int
    total: int
    world_size: int
    batch_size: int
    drop_last: bool

    @property
    def batches(self) -> int:
        """Batches of a pass."""
        return self.numel // self.batch_size if self.drop_last else -(-self.numel // self.batch_size)

    def after(self, start: int, drop_last: bool) -> Share:
        """Return the split of the samples behind the first `start`. drop_last: the sampler's option."""
        left = self.total - start
        return replace(self, numel=left // self.world_size if drop_last else -(-left // self.world_size), total=left)

    def batch(self, number: int) -> Rows:
        """Return the rows of batch `number`, counted from 0."""
        return self._rows(number * self.batch_size, min((number + 1) * self.batch_size, self.numel))

    def all_rows(self) -> Rows:
        """Return the rows of all batches of a pass."""
        return self._rows(0, self.numel - self.numel % self.batch_size if self.drop_last else self.numel)

    def _rows(self, start: int, end: int) -> Rows:
        held = (end - start) * self.world_size
        return Rows(end - start, min(held, self.total - start * self.world_size))


def share_of(loader: object, rank: int, world_size: int) -> Share:
    """Return the split of a pass of `loader` over the ranks.

    The split is known only of a DataLoader with torch's BatchSampler over a DistributedSampler for this rank. On one
    process it may be any sampler with a length. Raises ValueError for every other loader.
    """
    remedy = "Give it such a sampler, pass its dataset to engine.deepspeed_io, or iterate over it as it is."
    batches: Any = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(batches, "sampler", None)
    distributed = isinstance(sampler, DistributedSampler)
    problem = ""
    if not isinstance(loader, DataLoader):
        problem = f"got {type(loader).__name__}"
    elif isinstance(loader.dataset, IterableDataset):
        problem = f"it loads the IterableDataset {type(loader.dataset).__name__}"
    elif type(batches) is not BatchSampler:
        problem = f"its batches come from {type(batches).__name__}"
    elif not distributed and (world_size > 1 or not hasattr(sampler, "__len__")):
        problem = f"it has a {type(sampler).__name__}"
    elif distributed and type(sampler).__iter__ not in (DistributedSampler.__iter__, EpochSampler.__iter__):
        problem = f"{type(sampler).__name__} draws its indices in a way of its own"
    elif distributed and (sampler.num_replicas, sampler.rank) != (world_size, rank):
        problem = (
            f"its sampler is that of rank {sampler.rank} of {sampler.num_replicas}, and this is rank {rank} of "
            f"{world_size}"
        )
        remedy = "Make it with num_replicas=engine.data_parallel_world_size, rank=engine.data_parallel_rank."
    if problem:
        raise ValueError(
            "engine.prepare_loader: expected a torch DataLoader with a torch.utils.data.DistributedSampler for this "
            f"rank, so that it is known which samples its batches hold; {problem}. {remedy}"
        )
    total, ranks = (len(sampler.dataset), world_size) if distributed else (len(sampler), 1)
    return Share(len(sampler), total, ranks, batches.batch_size, batches.drop_last)


_END: Any = object()
_IN_SEQUENCE = "in sequence"


class LoaderPass:
    """A pass over a loader, or the remainder of a pass that a checkpoint continues."""

    rows: Rows | None = None  # of the latest batch
    ended = False  # the loop has asked for a batch, and there was none

    def begin(self, share: Share, start: int, epoch: int | None) -> None:
        """Begin behind the first `start` samples. share: how the samples behind them are split."""
        self.share = share
        self.start = start
        self.epoch = epoch
        self.yielded = 0

    def count(self) -> None:
        """Count a batch that is about to be yielded."""
        self.rows = self.share.batch(self.yielded)
        self.yielded += 1

    @property
    def consumed(self) -> int:
        """Samples that all ranks together have been given in this pass."""
        samples = self.yielded * self.share.batch_size * self.share.world_size
        return self.start + min(samples, self.share.total)


class TrackedLoader:
    """A DataLoader whose current batch and position are known to :class:`Loaders`. All other attributes are those of
    the DataLoader: `dataset`, `sampler`, `batch_size`, ..."""

    def __init__(self, loader: DataLoader[object], share: Share, rank: int, running: list[LoaderPass]) -> None:
        self.share = share  # the split of a whole pass
        self._rank = rank
        self._running = running
        self._sampler: Any = loader.batch_sampler.sampler  # type: ignore[union-attr]
        self.loader = loader
        self._last: LoaderPass | None = None  # the pass begun last
        self._restored: DataPosition | None = None  # a loaded position, until its batch is fetched

    def __iter__(self) -> Iterator[Any]:
        current = LoaderPass()
        batches = self._begin(current)
        self._running.append(current)
        try:
            while (batch := next(batches, _END)) is not _END:
                current.count()
                yield batch
                if self._restored is not None:  # a checkpoint was loaded inside the loop: continue from its position
                    batches = self._begin(current)
            current.ended = True
        finally:
            self._running.remove(current)

    def __len__(self) -> int:
        """Return the number of batches of the pass under way, or else of the next one.

        For a pass that a checkpoint continues these are the remaining ones. `len(self.loader)` is that of a whole pass.
        """
        start = self._start_of_next()
        if start:
            return self.share.after(start, self._drops_last).batches
        last = self._last
        if last is not None and last.start and last in self._running and self._restored is None:
            return last.share.batches
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while a copy is being made it has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def last_share(self) -> Share:
        """Split of the pass begun last."""
        return self.share if self._last is None else self._last.share

    @property
    def last_epoch(self) -> int | None:
        """The epoch of the pass begun last."""
        return None if self._last is None else self._last.epoch

    def position(self) -> DataPosition:
        """Return the position of the next batch.

        A shuffled pass that the loop left before its end is under way until the next one begins. So a checkpoint
        continues it. A pass in sequence counts as ended, because the next one begins at the first sample.
        """
        next_pass = DataPosition(self.share.total, self._order, self._epoch, 0)
        last = self._last
        if self._restored is not None:
            return self._restored if self._start_of_next() else next_pass
        if last is None or last.ended:
            return next_pass
        if last not in self._running and (self._order == _IN_SEQUENCE or self._epoch != self._epoch_after(last.epoch)):
            return next_pass
        return replace(next_pass, epoch=last.epoch, consumed=last.consumed)

    def restore(self, position: DataPosition) -> str | None:
        """Continue at `position`, also in a pass under way.

        Returns None, or a sentence that says why the pass begins at its first sample instead.
        """
        obstacle = None
        if position.consumed and position.order != self._order:
            obstacle = f"its samples were {position.order} and are now {self._order}"
        elif position.consumed and not (self._is_distributed or self._order == _IN_SEQUENCE):
            obstacle = f"{type(self._sampler).__name__} draws its indices in a way of its own; use a DistributedSampler"
        if position.epoch is not None and self._is_distributed:
            self._sampler.set_epoch(position.epoch)
        consumed = 0 if obstacle else position.consumed
        self._restored = replace(position, order=self._order, epoch=self._epoch, consumed=consumed)
        return obstacle

    def _start_of_next(self) -> int:
        """Return how many samples of the pass come before the next batch: 0 unless a position was loaded. A position of
        another epoch than the sampler's does not count: the user has chosen the epoch with ``set_epoch``."""
        restored = self._restored
        return restored.consumed if restored is not None and restored.epoch == self._epoch else 0

    def _begin(self, current: LoaderPass) -> Iterator[object]:
        start, self._restored = self._start_of_next(), None
        self._last = current
        if not start:
            current.begin(self.share, 0, self._epoch)
            return iter(self.loader)
        current.begin(self.share.after(start, self._drops_last), start, self._epoch)
        loader = copy.copy(self.loader)
        # A DataLoader refuses to set `batch_sampler`, so write past its check. `_iterator` keeps persistent workers,
        # which are busy with the indices of the original: the copy starts its own.
        batches = BatchSampler(self._rest(start, current.share.numel), self.share.batch_size, self.share.drop_last)
        vars(loader).update(batch_sampler=batches, _iterator=None)
        # torch draws a seed for the workers at each iter(). The interrupted pass has drawn its own already, so a second
        # draw would change the random numbers that the user's code gets after it.
        with torch.random.fork_rng(devices=[]):
            return iter(loader)

    def _rest(self, start: int, numel: int) -> list[int]:
        """Return this rank's `numel` indices behind the first `start` samples of all ranks' pass in the next epoch.

        Missing indices at the end are repeated from the beginning, as a DistributedSampler does. So a pass that
        continues with the same number of ranks has the same indices as without the interruption.
        """
        sampler = self._sampler
        if self._is_distributed:
            sampler = DistributedSampler(sampler.dataset, 1, 0, sampler.shuffle, sampler.seed)
            sampler.set_epoch(self._sampler.epoch)
            self._sampler.set_epoch(self._epoch_after(self._sampler.epoch))
        indices = list(sampler)
        rest = itertools.chain(indices[start:], itertools.cycle(indices))
        return list(itertools.islice(rest, self._rank, numel * self.share.world_size, self.share.world_size))

    # ---------------------------------------------------------------- the sampler

    @property
    def _is_distributed(self) -> bool:
        return isinstance(self._sampler, DistributedSampler)

    @property
    def _drops_last(self) -> bool:
        """True if samples that do not reach all ranks are left out."""
        return self._is_distributed and self._sampler.drop_last

    @property
    def _order(self) -> str:
        """See :attr:`DataPosition.order`."""
        if self._is_distributed:
            return f"shuffled with seed {self._sampler.seed}" if self._sampler.shuffle else _IN_SEQUENCE
        sequential = type(self._sampler) is SequentialSampler
        return _IN_SEQUENCE if sequential else f"drawn by {type(self._sampler).__name__}"

    @property
    def _epoch(self) -> int | None:
        """The next pass's."""
        return self._sampler.epoch if self._is_distributed else None

    def _epoch_after(self, epoch: int | None) -> int | None:
        """Return the value of :attr:`_epoch` after a pass in `epoch`."""
        return epoch + 1 if epoch is not None and isinstance(self._sampler, EpochSampler) else epoch
