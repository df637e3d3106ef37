"""Loaders that know the samples of each batch and their position in the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from zerolite.data.position import (
    DataPosition,
    EpochSampler,
    SampleOrder,
    preserve_rng_state,
    remaining_indices,
    remaining_per_rank,
    with_indices,
)


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
        return replace(self, numel=remaining_per_rank(left, self.world_size, drop_last), total=left)

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


class LoaderPass:
    """A pass over a loader, or the remainder of a pass that a checkpoint continues."""

    rows: Rows | None = None  # of the latest batch
    ended = False

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

    def end(self) -> None:
        """Note that the loop has asked for a batch, and there was none."""
        self.ended = True

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
        self._order = SampleOrder(loader.batch_sampler.sampler)  # type: ignore[union-attr]
        # A random order comes from our own sampler, which remembers the generator's state that it was drawn from.
        self.loader = with_indices(loader, self._order) if self._order.draws else loader
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
            current.end()
        finally:
            self._running.remove(current)

    def __len__(self) -> int:
        """Return the number of batches of the pass under way, or else of the next one.

        For a pass that a checkpoint continues these are the remaining ones. `len(self.loader)` is that of a whole pass.
        """
        start = self._start_of_next()
        if start:
            return self.share.after(start, self._order.drop_last).batches
        last = self._last
        if last is not None and last.start and last in self._running and self._restored is None:
            return last.share.batches
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while a copy is being made it has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def weight(self) -> int:
        """Number of samples in the batch in hand, for ``engine.backward(weight=)``; 0 before the first one."""
        rows = None if self._last is None else self._last.rows
        return 0 if rows is None else rows.per_rank

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
        next_pass = self._order.next_pass(self.share.total)
        last = self._last
        if self._restored is not None:
            return self._restored if self._start_of_next() else next_pass
        if last is None or last.ended:
            return next_pass
        left = last not in self._running
        if left and not (self._order.shuffled and self._order.epoch == self._order.epoch_after(last.epoch)):
            return next_pass
        return self._order.in_pass(self.share.total, last.epoch, last.consumed)

    def restore(self, position: DataPosition) -> str | None:
        """Continue at `position`, also in a pass under way.

        Returns None, or a sentence that says why the pass begins at its first sample instead.
        """
        obstacle = self._order.obstacle(position) if position.consumed else None
        self._order.restore(position)
        self._restored = replace(
            position,
            order=self._order.name,
            epoch=self._order.epoch,
            consumed=0 if obstacle else position.consumed,
        )
        return obstacle

    def _start_of_next(self) -> int:
        """Return how many samples of the pass come before the next batch: 0 unless a position was loaded. A position of
        another epoch than the sampler's does not count: the user has chosen the epoch with ``set_epoch``."""
        restored = self._restored
        return restored.consumed if restored is not None and restored.epoch == self._order.epoch else 0

    def _begin(self, current: LoaderPass) -> Iterator[object]:
        start, restored, self._restored = self._start_of_next(), self._restored, None
        epoch = self._order.epoch
        self._last = current
        if restored is None or not start:
            current.begin(self.share, 0, epoch)
            return iter(self.loader)
        current.begin(self.share.after(start, self._order.drop_last), start, epoch)
        indices = self._order.begin_again(restored)
        rest = remaining_indices(indices, start, self._rank, self.share.world_size, self._order.drop_last)
        # torch draws a seed for the workers at each iter(). The interrupted pass has drawn its own already, so a second
        # draw would change the random numbers that the user's code gets after it.
        with preserve_rng_state(torch.default_generator, self.loader.generator):
            return iter(with_indices(self.loader, rest))
