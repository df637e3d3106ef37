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
    kept_random_state,
    rest_numel,
    rest_of_pass,
    with_indices,
)


@dataclass(frozen=True)
class Rows:
    """Mapping from the rows of a batch to samples, on all ranks together.

    Row j of rank r is sample j * world_size + r of those that the ranks hold together. `per_rank`: rows on every rank.
    `samples`: how many of the per_rank * world_size are different; the rest, at the end, are repetitions that make the
    ranks even.
    """

    per_rank: int
    samples: int


@dataclass(frozen=True)
class Share:
    """Split of a pass: `numel` indices for each of `world_size` ranks, in batches of `batch_size`, which cover `total`
    samples. `drop_last`: without a last batch that is smaller."""

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
        """Return the split of what is left behind the first `start` samples; `drop_last`: the sampler's."""
        left = self.total - start
        return replace(self, numel=rest_numel(left, self.world_size, drop_last), total=left)

    def batch(self, number: int) -> Rows:
        """The rows of batch `number`, from 0."""
        return self._rows(number * self.batch_size, min((number + 1) * self.batch_size, self.numel))

    def whole(self) -> Rows:
        """The rows of all batches of a pass."""
        return self._rows(0, self.numel - self.numel % self.batch_size if self.drop_last else self.numel)

    def _rows(self, start: int, end: int) -> Rows:
        held = (end - start) * self.world_size
        return Rows(end - start, min(held, self.total - start * self.world_size))


def share_of(loader: object, rank: int, world_size: int) -> Share:
    """Return the split of a pass of `loader` over the ranks.

    Raises ValueError for a loader of which that is not known: anything but a DataLoader that makes its batches with
    torch's BatchSampler from a DistributedSampler for this rank (on one process, from any sampler with a length).
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
    """A pass under way, or what is left of one."""

    rows: Rows | None = None  # of the batch that it yielded last
    ended = False  # a batch was asked for and there was none

    def begin(self, share: Share, start: int, epoch: int | None) -> None:
        """It is behind the first `start` samples; what follows is split as `share` says."""
        self.share = share
        self.start = start
        self.epoch = epoch
        self.yielded = 0

    def count(self) -> None:
        """One more batch."""
        self.rows = self.share.batch(self.yielded)
        self.yielded += 1

    @property
    def consumed(self) -> int:
        """Samples that all ranks together were given."""
        given = self.yielded * self.share.batch_size * self.share.world_size
        return self.start + min(given, self.share.total)


class TrackedLoader:
    """A DataLoader whose batch in hand and position are known to :class:`Loaders`. Everything else is the DataLoader's:
    `dataset`, `sampler`, `batch_size`, …"""

    def __init__(self, loader: DataLoader[object], share: Share, rank: int, running: list[LoaderPass]) -> None:
        self.share = share  # of a whole pass
        self._rank = rank
        self._running = running
        self._order = SampleOrder(loader.batch_sampler.sampler)  # type: ignore[union-attr]
        self.loader = with_indices(loader, self._order) if self._order.draws else loader
        self._last: LoaderPass | None = None  # the pass begun last
        self._restored: DataPosition | None = None  # of the next batch, until that is fetched

    def __iter__(self) -> Iterator[Any]:
        current = LoaderPass()
        batches = self._begin(current)
        self._running.append(current)
        try:
            while (batch := next(batches, _END)) is not _END:
                current.count()
                yield batch
                if self._restored is not None:
                    batches = self._begin(current)
            current.ended = True
        finally:
            self._running.remove(current)

    def __len__(self) -> int:
        """Batches of the pass under way, otherwise of the next one: where a checkpoint's pass is continued, those that
        are left of it. `len(self.loader)`: of a whole pass."""
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
    def last_share(self) -> Share:
        """Split of the pass begun last."""
        return self.share if self._last is None else self._last.share

    @property
    def last_epoch(self) -> int | None:
        """The epoch of the pass begun last."""
        return None if self._last is None else self._last.epoch

    def position(self) -> DataPosition:
        """Return the position of the next batch. A pass that was left before its end is under way until the next one
        begins; but one in sequence has ended, since such passes all begin at the first sample."""
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
        """The next batch, of a pass under way too, is the one at `position`. Returns why it is the first one of a pass
        instead, None if it is not."""
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
        """Samples that the next batch is behind of, if it was restored. In another epoch it is the first one."""
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
        rest = rest_of_pass(indices, start, self._rank, self.share.world_size, self._order.drop_last)
        # The pass drew its workers' seed when it began.
        with kept_random_state(torch.default_generator, self.loader.generator):
            return iter(with_indices(self.loader, rest))
