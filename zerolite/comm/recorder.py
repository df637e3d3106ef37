"""A record of logical collectives: what the runtime asked for, whatever algorithm carries it out."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class CollectiveCall:
    """One logical collective, or message between two stages. ``numel`` and ``nbytes`` count the full tensors that it
    concerns, on one rank; ``dtype`` is the first one's; ``key`` tells collectives of equal sizes apart, as in
    :class:`~zerolite.comm.flight.Entry`."""

    op: str  # all_reduce | reduce_scatter | all_gather | broadcast | send | receive
    numel: int
    dtype: torch.dtype
    nbytes: int
    tag: str  # what it is for: "gradients", "parameters", "stats", "initial_sync", "buffers", …
    tensors: int = 1  # how many travel in this launch
    dimension: str = "data"  # of the grid of ranks: data | tensor | pipe | model | world
    ranks: int = 1  # how many take part
    key: int = 0


@dataclass
class Recorder:
    """The collectives launched by this process while the recorder was active, in order."""

    calls: list[CollectiveCall] = field(default_factory=list)

    def count(self, op: str | None = None, tag: str | None = None) -> int:
        return len(self.select(op, tag))

    def numel(self, op: str | None = None, tag: str | None = None) -> int:
        return sum(call.numel for call in self.select(op, tag))

    def nbytes(self, op: str | None = None, tag: str | None = None) -> int:
        return sum(call.nbytes for call in self.select(op, tag))

    def select(self, op: str | None = None, tag: str | None = None) -> list[CollectiveCall]:
        return [c for c in self.calls if (op is None or c.op == op) and (tag is None or c.tag == tag)]

    def summary(self) -> dict[tuple[str, str], int]:
        """Number of calls by (op, tag)."""
        return dict(Counter((call.op, call.tag) for call in self.calls))


active: list[Recorder] = []  # those that record now


@contextlib.contextmanager
def record() -> Iterator[Recorder]:
    """Record the logical collectives that zerolite launches inside the context; contexts nest."""
    recorder = Recorder()
    active.append(recorder)
    try:
        yield recorder
    finally:
        active.remove(recorder)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, collectives are none of a recorder that is active outside: those of a dry run."""
    outside, active[:] = active[:], []
    try:
        yield
    finally:
        active[:] = outside


def note(op: str, tensor: torch.Tensor, tag: str, dimension: str = "data", ranks: int = 1, key: int = 0) -> None:
    """Called by the communicator, once per logical collective."""
    if active:
        nbytes = tensor.numel() * tensor.element_size()
        call = CollectiveCall(op, tensor.numel(), tensor.dtype, nbytes, tag, 1, dimension, ranks, key)
        for recorder in active:
            recorder.calls.append(call)


def note_several(
    op: str, tensors: Sequence[torch.Tensor], tag: str, dimension: str = "data", ranks: int = 1, key: int = 0
) -> None:
    """Called by the communicator for a collective over several tensors; one without any element is none."""
    if active and (numel := sum(tensor.numel() for tensor in tensors)):
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        call = CollectiveCall(op, numel, tensors[0].dtype, nbytes, tag, len(tensors), dimension, ranks, key)
        for recorder in active:
            recorder.calls.append(call)
