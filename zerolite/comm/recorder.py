"""Record of logical collectives, independent of the algorithm that carries them out."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from zerolite.utils.accelerator import address

ALIGNMENT = 16
"""Bytes on which NCCL wants every buffer to begin: from other addresses it takes a slow path."""


@dataclass(frozen=True)
class CollectiveCall:
    """One logical collective, or message between two stages. ``numel`` and ``nbytes`` count the full tensors that it
    concerns, on one rank; ``dtype`` is the first one's; ``key`` tells collectives of equal sizes apart, as in
    :class:`~zerolite.comm.flight_recorder.Entry`."""

    op: str  # all_reduce | reduce_scatter | all_gather | broadcast | send | receive
    numel: int
    dtype: torch.dtype
    nbytes: int
    tag: str  # what it is for: "gradients", "parameters", "stats", "initial_sync", "buffers", …
    tensors: int = 1  # how many travel in this launch
    dimension: str = "data"  # of the grid of ranks: data | tensor | pipe | model | world
    ranks: int = 1  # how many take part
    key: int = 0
    unaligned: int = 0  # how many buffers (whole tensors, ranks' parts of them, shards) do not begin on 16 bytes


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
    """Record a collective; called by the communicator, once per logical collective."""
    if active:
        _add(op, [tensor], _unaligned(tensor, ranks if op in _DIVIDED else 1), tag, dimension, ranks, key)


def note_gather(
    fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], tag: str, dimension: str, ranks: int, key: int
) -> None:
    """Record a gather of several tensors; one without any element is none."""
    if active and any(full.numel() for full in fulls):
        unaligned = sum(_unaligned(full, ranks) for full in fulls) + sum(_unaligned(shard, 1) for shard in shards)
        _add("all_gather", fulls, unaligned, tag, dimension, ranks, key)


def _add(
    op: str, tensors: Sequence[torch.Tensor], unaligned: int, tag: str, dimension: str, ranks: int, key: int
) -> None:
    numel = sum(tensor.numel() for tensor in tensors)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    call = CollectiveCall(op, numel, tensors[0].dtype, nbytes, tag, len(tensors), dimension, ranks, key, unaligned)
    for recorder in active:
        recorder.calls.append(call)


_DIVIDED = ("all_gather", "reduce_scatter")
"""Collectives that work on each rank's equal part of a tensor."""


def _unaligned(tensor: torch.Tensor, parts: int) -> int:
    """Count those of ``parts`` equal parts of a tensor that do not begin on 16 bytes."""
    if not tensor.numel():
        return 0
    start, length = address(tensor), tensor.numel() // parts * tensor.element_size()
    if start % ALIGNMENT == 0 and (parts == 1 or length % ALIGNMENT == 0):
        return 0
    return sum((start + part * length) % ALIGNMENT != 0 for part in range(parts))
