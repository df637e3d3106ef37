"""Data loaders of an engine: distribution over ranks, checkpointed position, `RepeatingLoader`."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from zerolite.comm import Communicator
from zerolite.data.tracked_loader import (
    DataPosition,
    EpochSampler,
    LoaderPass,
    Rows,
    TrackedLoader,
    position_from,
    share_of,
)

logger = logging.getLogger("zerolite")

ROUTES = ("train", "eval", "predict")


class RepeatingLoader:
    """Endless iterator over a loader: it begins a new pass whenever one has ended. `iter()` continues the pass.

    Each pass is shuffled anew. If `loader.sampler` has an epoch (torch's DistributedSampler) and the pass has not
    changed it, this class advances it by one.

    Raises ValueError when a whole pass yields nothing, because the next one would not either.
    """

    def __init__(self, loader: Iterable[object]) -> None:
        self.loader = loader
        self._epoch: int | None = None  # of the sampler, before the pass under way
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for _ in range(2):  # a pass that a checkpoint continues may have no batch left: then the next one begins
            if self._batches is None:
                self._epoch = self._sampler_epoch()
                self._batches = iter(self.loader)
            try:
                return next(self._batches)
            except StopIteration:
                self._batches = None
                self._leave_epoch()
        raise ValueError(
            "RepeatingLoader got nothing from a new pass over its loader. Give it a loader that can be iterated "
            "more than once and is not empty, such as a DataLoader; a generator is neither."
        )

    def _leave_epoch(self) -> None:
        epoch = self._sampler_epoch()
        if epoch is not None and epoch == getattr(self.loader, "last_epoch", self._epoch):
            self.loader.sampler.set_epoch(epoch + 1)  # type: ignore[attr-defined]

    def _sampler_epoch(self) -> int | None:
        sampler = getattr(self.loader, "sampler", None)
        return getattr(sampler, "epoch", None) if hasattr(sampler, "set_epoch") else None


class Loaders:
    """Factory of an engine's loaders. It knows which batch the loop is using, and saves the loaders' positions."""

    def __init__(
        self,
        comm: Communicator,
        device_type: str,
        micro_batch_size: int | None,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """
        Args:
            comm: the data ranks.
            collate_fn: default of the loaders.
        """
        self._collate_fn = collate_fn
        self._rank, self._world_size = comm.rank, comm.world_size
        self._device_type = device_type
        self._micro_batch_size = micro_batch_size
        self._drop_last = drop_last
        self._running: list[LoaderPass] = []  # passes under way, the one begun last at the end
        # By number, in the order in which they were made. Weak, because a loader that the user drops needs no position.
        self._made: weakref.WeakValueDictionary[int, TrackedLoader] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._waiting: list[DataPosition] = []  # loaded positions of loaders that have not been made yet

    def make(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> Any:
        """Make a loader of `dataset` for this rank; see :meth:`zerolite.engine.engine.Engine.deepspeed_io`.

        A dataset with `__len__` and `__getitem__` is split over the ranks. An IterableDataset is batched as it comes:
        it must split itself over ranks (and workers), because no other code can.
        """
        if route not in ROUTES:
            raise ValueError(f"engine.deepspeed_io: expected route to be one of {', '.join(ROUTES)}, got {route!r}.")
        batch_size = self._micro_batch_size if batch_size is None else batch_size
        size = _check_size("train_micro_batch_size_per_gpu", batch_size, 1)
        shuffle = route == "train"
        drop_last = self._drop_last and shuffle
        options: dict[str, Any] = {
            "num_workers": _check_size("num_local_io_workers", num_workers, 0),
            "collate_fn": collate_fn or self._collate_fn,
            "pin_memory": pin_memory and self._device_type == "cuda",
            "drop_last": drop_last,
        }
        if isinstance(dataset, IterableDataset):
            _warn_of_iterable(dataset, self._rank, self._world_size)
            # Its workers keep their seeds. It may draw an order and take its part of it: the same one on all ranks.
            return DataLoader(dataset, size, **options)
        _check_length(dataset, size * self._world_size if drop_last else 1)
        sampler = EpochSampler(dataset, self._world_size, self._rank, shuffle, drop_last=drop_last)
        return self.prepare(DataLoader(dataset, size, sampler=sampler, **options))

    def prepare(self, loader: Any) -> TrackedLoader:
        """Return `loader` as one whose batches are known. Raises ValueError if they cannot be: see
        :func:`share_of`.

        Its workers draw other random numbers on each rank, unless it has a `worker_init_fn`.
        """
        if isinstance(loader, TrackedLoader):
            return loader
        share = share_of(loader, self._rank, self._world_size)
        if loader.worker_init_fn is None:
            loader.worker_init_fn = _worker_init_of(self._rank)
        tracked = TrackedLoader(loader, share, self._rank, self._running)
        number = next(self._numbers)
        self._made[number] = tracked
        if self._waiting:
            position = self._waiting.pop(0)
            same = position.samples == share.total
            self._report(number, position, tracked.restore(position) if same else f"it has {share.total} samples now")
        return tracked

    def rows(self, loader: object = None) -> Rows | None:
        """Return the rows of the current batch, or None outside of a pass.

        If several passes are under way, the batch is that of the pass begun last. With `loader`, return the rows of all
        batches of the latest pass over it. Raises ValueError for a loader that this factory did not make.
        """
        if loader is None:
            return self._running[-1].rows if self._running else None
        if not isinstance(loader, TrackedLoader) or loader._running is not self._running:
            raise ValueError(
                f"expected loader to come from engine.deepspeed_io, engine.prepare_loader or engine.dataloader of this "
                f"engine, got {type(loader).__name__}; pass what engine.prepare_loader(loader) returns"
            )
        return loader.last_share.all_rows()

    def state_dict(self) -> list[dict[str, int | str | None]]:
        """Return the positions of the existing loaders as plain data, in the order in which the loaders were made.

        They are equal on all ranks that have taken equally many batches. If several passes over one loader are under
        way, its position is that of the pass begun last.
        """
        return [asdict(loader.position()) for loader in self._made.values()]

    def load_state_dict(self, state: list[dict[str, int | str | None]]) -> None:
        """Continue each loader behind the batches that all ranks together had been given when `state` was saved.

        The number of ranks and the batch size may differ from then. A pass under way continues from that position, too.
        Loaders are identified by the order in which they are made: positions of loaders that do not exist yet are kept
        for them. If a pass cannot be continued, it begins anew, with a warning. Raises ValueError, and changes nothing,
        if :meth:`check_state_dict` does.
        """
        positions = self.check_state_dict(state)
        loaders = list(self._made.values())
        self._waiting = positions[len(loaders) :]
        for number, (loader, position) in enumerate(zip(loaders, positions, strict=False)):
            self._report(number, position, loader.restore(position))

    def _report(self, number: int, position: DataPosition, obstacle: str | None) -> None:
        if obstacle and position.consumed and self._rank == 0:
            logger.warning(
                "Loader %d of this engine had given %d of %d samples of a pass that cannot be continued, because %s. "
                "The pass begins anew, so these samples come again.",
                number,
                position.consumed,
                position.samples,
                obstacle,
            )

    def check_state_dict(self, state: list[dict[str, int | str | None]]) -> list[DataPosition]:
        """Return the positions in `state`. Raises ValueError if a loader has another number of samples than when
        `state` was saved."""
        positions = [position_from(entry) for entry in state]
        for number, (loader, position) in enumerate(zip(self._made.values(), positions, strict=False)):
            if position.samples != loader.share.total:
                raise ValueError(
                    f"expected {position.samples} samples in loader {number} of this engine, as when its position was "
                    f"saved, got {loader.share.total}; give it the same data, and make the loaders in the same order"
                )
        return positions


def _warn_of_iterable(dataset: object, rank: int, world_size: int) -> None:
    if world_size > 1 and rank == 0:
        logger.warning(
            "training_data is an IterableDataset (%s): each of the %d ranks iterates over all that it yields there; it "
            "must yield a different part on each rank.",
            type(dataset).__name__,
            world_size,
        )


def _worker_init_of(rank: int) -> Callable[[int], None] | None:
    """Return the `worker_init_fn` of a loader of this rank: None on rank 0, whose workers keep torch's seeds."""
    return functools.partial(_seed_by_rank, rank) if rank else None


def _seed_by_rank(rank: int, worker: int) -> None:
    """Seed a worker so that no other worker of any rank draws the same random numbers.

    torch seeds worker w with a base seed + w. Ranks that a script seeds alike draw the same base seed.
    """
    info: Any = get_worker_info()
    seed = info.seed + rank * info.num_workers
    object.__setattr__(info, "seed", seed)  # data sets make generators of their own from it; the class is frozen
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([seed % 2**32, seed >> 32])


def _check_size(name: str, value: int | None, least: int) -> int:
    if value is None:
        raise ValueError(
            f"training_data needs a batch size: set {name} in the configuration (or train_batch_size and "
            "gradient_accumulation_steps, from which it follows)."
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {value!r}.")
    return value


def _check_length(dataset: Any, least: int) -> None:
    """Raise TypeError for data that cannot be indexed, and ValueError for less than ``least`` samples."""
    class_name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "training_data must be a dataset, but is a DataLoader, which has made its batches already. Pass its "
            "dataset, or iterate over it yourself."
        )
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise TypeError(
            f"training_data must have a length and an index, or be a torch IterableDataset, but {class_name} has no "
            f"{' and no '.join(missing)}. Add it, or derive the class from torch.utils.data.IterableDataset and let it "
            "yield this rank's samples."
        )
    samples = len(dataset)
    if samples == 0:
        raise ValueError(f"training_data ({class_name}) is empty: there is nothing to train on.")
    if samples < least:
        raise ValueError(
            f"training_data has {samples} samples, too few for a batch on every rank, which takes {least} together; "
            "dataloader_drop_last leaves out what does not fill one. Set it to false or take smaller batches."
        )
