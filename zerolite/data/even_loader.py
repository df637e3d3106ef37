"""Loader whose passes have equally many batches on all ranks, however many samples each rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, default_collate

from zerolite.comm import Communicator, HostMaximum, collective
from zerolite.zero.accumulation import GradAccumulation


class Counted(NamedTuple):
    """A batch, and how many samples it was made of."""

    samples: int
    batch: Any


class CountingCollate:
    """``collate_fn`` that also counts the samples of each batch."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate_fn or default_collate

    def __call__(self, samples: list[Any]) -> Counted:
        return Counted(len(samples), self._collate(samples))


class EvenLoader:
    """Loader of an ``IterableDataset`` that ends on all ranks together.

    A rank that has no batch left yields its last one again, with a :attr:`weight` of 0, until the last rank has run
    out. ``engine.backward(loss, weight=loader.weight)`` leaves such a batch out. So all ranks take the same steps, and
    the numbers are those of the joint batches.

    Before each batch the ranks exchange four numbers on the host. All other attributes are those of the DataLoader.

    Attributes:
        loader: the DataLoader, whose batches are :class:`Counted`.
        weight: samples of the batch in hand; 0 for a repeated one.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        comm: Communicator,
        accumulation: GradAccumulation,
        under_way: list[EvenLoader],
    ) -> None:
        """
        Args:
            comm: the data ranks. The first pass makes a process group.
            accumulation: refuses backwards without a weight while some rank repeats a batch.
            under_way: loaders whose passes are under way, where this one enters itself.
        """
        self.loader = loader
        self.weight = 0
        self._comm, self._accumulation, self._under_way = comm, accumulation, under_way
        self._maximum: HostMaximum | None = None

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        last: Counted | None = None
        self._under_way.append(self)
        try:
            while (counted := self._next(batches, last)) is not None:
                last, self.weight = counted, counted.samples
                yield counted.batch
        finally:
            self._under_way.remove(self)
            self._accumulation.needs_weights = False

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while a copy is being made it has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    @collective
    def _next(self, batches: Iterator[Counted], last: Counted | None) -> Counted | None:
        """Return this rank's next batch, the last one with 0 samples where it has run out, or None if all ranks have.

        Raises:
            ValueError: on all ranks, because one of them has no batch at all.
            RuntimeError: because another rank's dataset has raised an error; that rank raises it itself.
        """
        counted, error = None, None
        try:
            counted = next(batches, None)
        except Exception as failure:  # the other ranks are about to wait for this one, so they must be told
            error = failure
        rank = self._comm.rank + 1
        lacks, has_none, failed = counted is None, counted is None and last is None, error is not None
        numbers = [not lacks, rank * lacks, rank * (has_none and not failed), rank * failed]
        left, lacking, empty, broken = self._largest(list(map(int, numbers)))
        if error is not None:
            raise error
        if broken:
            raise RuntimeError(f"{self._name}: rank {broken - 1} has failed to load its next batch; see its error")
        if not left:
            return None
        if empty:
            raise ValueError(
                f"{self._name}: expected at least one batch on every rank, got none on rank {empty - 1}; let the "
                "dataset yield samples there, or use fewer ranks"
            )
        self._accumulation.needs_weights = bool(lacking)
        return counted if counted is not None or last is None else Counted(0, last.batch)

    def _largest(self, numbers: list[int]) -> list[int]:
        if self._comm.world_size == 1:
            return numbers
        if self._maximum is None:
            self._maximum = HostMaximum(self._comm)
        return self._maximum.of(numbers)

    @property
    def _name(self) -> str:
        return f"the loader of the IterableDataset {type(self.loader.dataset).__name__}"
