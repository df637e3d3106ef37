"""`training_data` to a loader that gives each rank its own part of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


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

    Raises ValueError when a pass yields nothing, since the next one would not either.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError(
                "RepeatingLoader got nothing from a new pass over its loader. Give it a loader that can be iterated "
                "more than once and is not empty, such as a DataLoader; a generator is neither."
            ) from None


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
) -> DataLoader[Any]:
    """A loader of batches of `micro_batch_size` samples for this rank.

    dataset: with `__len__` and `__getitem__`: shuffled with `seed`, differently in each pass, and split over the ranks;
    the first samples of a pass are repeated at its end where the ranks' shares would differ, so that all ranks see
    equally many batches. An IterableDataset: batched as it comes; it splits itself over ranks (and workers), since
    nobody else can. A DataLoader: refused, since it has batches already. collate_fn: a list of samples to a batch;
    default: torch's. device_type: "cuda" pins the host memory of batches. num_workers: processes that load; 0 loads in
    this one. drop_last: leave out a last batch that is smaller than the others.

    Raises ValueError for a missing or wrong batch size, and TypeError for data that cannot be loaded.
    """
    if micro_batch_size is None:
        raise ValueError(
            "training_data needs a batch size: set train_micro_batch_size_per_gpu in the configuration (or "
            "train_batch_size and gradient_accumulation_steps, from which it follows)."
        )
    if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int) or micro_batch_size < 1:
        raise ValueError(
            f"train_micro_batch_size_per_gpu must be a whole number of at least 1, but is {micro_batch_size!r}."
        )
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
        return DataLoader(dataset, **options)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise TypeError(
            f"training_data must have a length and an index, or be a torch IterableDataset, but "
            f"{type(dataset).__name__} has no {' and no '.join(missing)}. Add it, or derive the class from "
            f"torch.utils.data.IterableDataset and let it yield this rank's samples."
        )
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise ValueError(f"training_data ({type(dataset).__name__}) is empty: there is nothing to train on.")
    sampler = EpochSampler(
        dataset,  # type: ignore[arg-type]
        num_replicas=world_size,
        rank=rank,
        shuffle=True,
        seed=seed,
        drop_last=False,
    )
    return DataLoader(dataset, sampler=sampler, **options)  # type: ignore[arg-type]
