"""`training_data` to a loader that gives each rank its own part of the data, and which samples its batches hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

logger = logging.getLogger("zerolite")

ROUTES = ("train", "eval", "predict")


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler that shuffles anew in each pass: drawing the indices of a pass advances `epoch`.

    `set_epoch(epoch)` before a pass still works, for instance to resume a run. All ranks must begin the same number of
    passes, or their parts overlap.
    """

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return indices


class RepeatingLoader:
    """Iterates over a loader for ever: when it is exhausted, it begins a new pass. `iter()` continues, it does not
    begin anew.

    Each pass is shuffled anew: where `loader.sampler` has an epoch that the pass before left as it was (torch's
    DistributedSampler), it is advanced by one.

    Raises ValueError when a pass yields nothing, since the next one would not either.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._epoch = self._sampler_epoch()
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._begin_pass()
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError(
                "RepeatingLoader got nothing from a new pass over its loader. Give it a loader that can be iterated "
                "more than once and is not empty, such as a DataLoader; a generator is neither."
            ) from None

    def _begin_pass(self) -> None:
        epoch = self._sampler_epoch()
        if epoch is not None and epoch == self._epoch:
            self.loader.sampler.set_epoch(epoch + 1)  # type: ignore[attr-defined]
        self._epoch = self._sampler_epoch()
        self._batches = iter(self.loader)

    def _sampler_epoch(self) -> int | None:
        sampler = getattr(self.loader, "sampler", None)
        return getattr(sampler, "epoch", None) if hasattr(sampler, "set_epoch") else None


@dataclass(frozen=True)
class Rows:
    """Which samples the rows of a batch are, on all ranks together.

    Row j of rank r is sample j * world_size + r of those that the ranks hold together. `per_rank`: rows on every rank.
    `samples`: how many of the per_rank * world_size are different; the rest, at the end, are repetitions that make the
    ranks even.
    """

    per_rank: int
    samples: int


@dataclass(frozen=True)
class Share:
    """How a pass is split: `numel` indices for each of `world_size` ranks, in batches of `batch_size`, which cover
    `total` samples. `drop_last`: without a last batch that is smaller."""

    numel: int
    total: int
    world_size: int
    batch_size: int
    drop_last: bool

    def batch(self, number: int) -> Rows:
        """The rows of batch `number`, from 0."""
        return self._rows(number * self.batch_size, min((number + 1) * self.batch_size, self.numel))

    def whole(self) -> Rows:
        """The rows of all batches of a pass."""
        return self._rows(0, self.numel - self.numel % self.batch_size if self.drop_last else self.numel)

    def _rows(self, start: int, end: int) -> Rows:
        held = (end - start) * self.world_size
        return Rows(end - start, min(held, self.total - start * self.world_size))


def share_of(loader: Any, rank: int, world_size: int) -> Share:
    """How `loader` splits a pass over the ranks.

    Raises ValueError for a loader of which that is not known: anything but a DataLoader that makes its batches with
    torch's BatchSampler from a DistributedSampler for this rank (on one process, from any sampler with a length).
    """
    expected = (
        "expected a torch DataLoader with a torch.utils.data.DistributedSampler for this rank, so that it is known "
        "which samples its batches hold"
    )
    remedy = "Give it such a sampler, pass its dataset to engine.deepspeed_io, or iterate over it as it is."
    if not isinstance(loader, DataLoader):
        raise ValueError(f"engine.prepare_loader: {expected}; got {type(loader).__name__}. {remedy}")
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        kind = type(loader.dataset).__name__
        raise ValueError(f"engine.prepare_loader: {expected}; it loads the IterableDataset {kind}. {remedy}")
    if type(batches) is not BatchSampler:
        raise ValueError(f"engine.prepare_loader: {expected}; its batches come from {type(batches).__name__}. {remedy}")
    sampler: Any = batches.sampler
    if not isinstance(sampler, DistributedSampler):
        if world_size > 1 or not hasattr(sampler, "__len__"):
            raise ValueError(f"engine.prepare_loader: {expected}; it has a {type(sampler).__name__}. {remedy}")
        return Share(len(sampler), len(sampler), 1, batches.batch_size, batches.drop_last)
    if type(sampler).__iter__ not in (DistributedSampler.__iter__, EpochSampler.__iter__):
        raise ValueError(
            f"engine.prepare_loader: {expected}; {type(sampler).__name__} draws its indices in a way of its own. "
            f"{remedy}"
        )
    if (sampler.num_replicas, sampler.rank) != (world_size, rank):
        raise ValueError(
            f"engine.prepare_loader: {expected}; its sampler is that of rank {sampler.rank} of {sampler.num_replicas}, "
            f"and this is rank {rank} of {world_size}. Make it with num_replicas=engine.world_size, rank=engine.rank."
        )
    total = len(sampler.dataset)  # type: ignore[arg-type]
    return Share(len(sampler), total, world_size, batches.batch_size, batches.drop_last)


class _Pass:
    """A pass under way: the rows of the batch that it yielded last."""

    rows: Rows | None = None


class TrackedLoader:
    """A DataLoader whose batch in hand is known to :class:`Loaders`. Everything else is the DataLoader's: `dataset`,
    `sampler`, `batch_size`, …"""

    def __init__(self, loader: DataLoader[Any], share: Share, running: list[_Pass]) -> None:
        self.loader = loader
        self.share = share
        self._running = running

    def __iter__(self) -> Iterator[Any]:
        current = _Pass()
        self._running.append(current)
        try:
            for number, batch in enumerate(self.loader):
                current.rows = self.share.batch(number)
                yield batch
        finally:
            self._running.remove(current)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while a copy is being made it has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)


class Loaders:
    """Makes the loaders of one engine and knows which batch is in hand."""

    def __init__(
        self, rank: int, world_size: int, device_type: str, micro_batch_size: int | None, drop_last: bool
    ) -> None:
        self.collate_fn: Callable[[list[Any]], Any] | None = None  # for loaders that are given none
        self._rank = rank
        self._world_size = world_size
        self._device_type = device_type
        self._micro_batch_size = micro_batch_size
        self._drop_last = drop_last
        self._running: list[_Pass] = []

    def make(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> Any:
        """A loader of `dataset`: see :meth:`zerolite.runtime.engine.Engine.deepspeed_io`."""
        if route not in ROUTES:
            raise ValueError(f"engine.deepspeed_io: expected route to be one of {', '.join(ROUTES)}, got {route!r}.")
        loader = build_dataloader(
            dataset,
            self._micro_batch_size if batch_size is None else batch_size,
            self._rank,
            self._world_size,
            collate_fn=collate_fn or self.collate_fn,
            device_type=self._device_type if pin_memory else "cpu",
            num_workers=num_workers,
            drop_last=self._drop_last and route == "train",
            shuffle=route == "train",
        )
        return loader if isinstance(dataset, IterableDataset) else self.prepare(loader)

    def prepare(self, loader: Any) -> TrackedLoader:
        """`loader`, its batches known. Raises ValueError where that cannot be: see :func:`share_of`."""
        if isinstance(loader, TrackedLoader):
            return loader
        return TrackedLoader(loader, share_of(loader, self._rank, self._world_size), self._running)

    def rows(self, loader: Any = None) -> Rows | None:
        """The rows of the batch in hand: of the pass begun last and not ended; None outside of any. With `loader`: of
        a whole pass over it. Raises ValueError for a loader that this did not make."""
        if loader is None:
            return self._running[-1].rows if self._running else None
        if not isinstance(loader, TrackedLoader) or loader._running is not self._running:
            raise ValueError(
                f"expected loader to come from engine.deepspeed_io, engine.prepare_loader or engine.dataloader of this "
                f"engine, got {type(loader).__name__}; pass what engine.prepare_loader(loader) returns"
            )
        return loader.share.whole()


def build_dataloader(
    dataset: Dataset[Any] | Iterable[Any],
    micro_batch_size: int | None,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    device_type: str = "cpu",
    seed: int = 0,
    num_workers: int = 0,
    drop_last: bool = False,
    shuffle: bool = True,
) -> DataLoader[Any]:
    """A loader of batches of `micro_batch_size` samples for this rank.

    dataset: with `__len__` and `__getitem__`: split over the ranks; with `shuffle` in an order drawn from `seed`,
    another one in each pass. An IterableDataset: batched as it comes; it splits itself over ranks (and workers), since
    nobody else can. A DataLoader: refused, since it has batches already. collate_fn: a list of samples to a batch;
    default: torch's. device_type: "cuda" pins the host memory of batches. num_workers: processes that load; 0 loads in
    this one. drop_last: False: every sample comes in each pass; the first ones are repeated at its end where the ranks'
    shares would differ, and the last batch may be smaller, on all ranks alike. True: all batches are full and no sample
    is repeated; what is left over is left out.

    Raises ValueError for a missing or wrong size, and TypeError for data that cannot be loaded.
    """
    if micro_batch_size is None:
        raise ValueError(
            "training_data needs a batch size: set train_micro_batch_size_per_gpu in the configuration (or "
            "train_batch_size and gradient_accumulation_steps, from which it follows)."
        )
    _check_size("train_micro_batch_size_per_gpu", micro_batch_size, 1)
    _check_size("num_local_io_workers", num_workers, 0)
    options: dict[str, Any] = {
        "batch_size": micro_batch_size,
        "collate_fn": collate_fn,
        "pin_memory": device_type == "cuda",
        "num_workers": num_workers,
        "drop_last": drop_last,
    }
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "training_data must be a dataset, but is a DataLoader, which has made its batches already. Pass its "
            "dataset, or iterate over it yourself."
        )
    if isinstance(dataset, IterableDataset):
        if world_size > 1 and rank == 0:
            logger.warning(
                "training_data is an IterableDataset (%s): each of the %d ranks iterates over all that it yields "
                "there; it must yield a different part on each rank, and equally many samples.",
                type(dataset).__name__,
                world_size,
            )
        return DataLoader(dataset, **options)
    samples = _length(dataset)
    if drop_last and samples < micro_batch_size * world_size:
        raise ValueError(
            f"training_data has {samples} samples, too few for a batch of {micro_batch_size} on each of {world_size} "
            "ranks, and dataloader_drop_last leaves out what does not fill one. Set it to false or take smaller "
            "batches."
        )
    sampler = EpochSampler(
        dataset,  # type: ignore[arg-type]
        num_replicas=world_size,
        rank=rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
    return DataLoader(dataset, sampler=sampler, **options)  # type: ignore[arg-type]


def _check_size(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {value!r}.")


def _length(dataset: Any) -> int:
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise TypeError(
            f"training_data must have a length and an index, or be a torch IterableDataset, but "
            f"{type(dataset).__name__} has no {' and no '.join(missing)}. Add it, or derive the class from "
            f"torch.utils.data.IterableDataset and let it yield this rank's samples."
        )
    samples = len(dataset)
    if samples == 0:
        raise ValueError(f"training_data ({type(dataset).__name__}) is empty: there is nothing to train on.")
    return samples
