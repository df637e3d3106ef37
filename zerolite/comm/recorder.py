"""Record of logical collectives, independent of the algorithm that carries them out."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from zerolite.utils.accelerator import address

ALIGNMENT = 16
"""Alignment of buffers in bytes: NCCL is slower for buffers at other addresses."""


@dataclass(frozen=True)
class CollectiveCall:
    """One logical collective, or a message between two stages.

    Attributes:
        op: all_reduce, reduce_scatter, all_gather, all_to_all, permute, broadcast, send or receive.
        numel: elements of the full tensors on one rank.
        dtype: dtype of the first tensor.
        nbytes: bytes of the full tensors on one rank.
        tag: its purpose: "gradients", "parameters", "stats", "initial_sync", "buffers", ...
        tensors: tensors in this launch.
        dimension: dimension of the grid of ranks: data, tensor, pipe, model or world.
        ranks: number of ranks that take part.
        key: tells collectives of equal sizes apart, see :class:`~zerolite.comm.flight_recorder.Entry`.
        unaligned: buffers (full tensors, ranks' parts of them, shards) that do not begin on 16 bytes.
        moves: ranks by which a permute sends on; 0: to the mirror image.
    """

    op: str
    numel: int
    dtype: torch.dtype
    nbytes: int
    tag: str
    tensors: int = 1
    dimension: str = "data"
    ranks: int = 1
    key: int = 0
    unaligned: int = 0
    moves: int = 0


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
        """Return the number of calls by (op, tag)."""
        return dict(Counter((call.op, call.tag) for call in self.calls))

    def on_launch(self, call: CollectiveCall) -> None:
        """Add a collective that is being launched."""
        self.calls.append(call)

    def on_wait(self, call: CollectiveCall) -> None:
        """Called before the wait for a collective that was launched while a recorder was active."""


active: list[Recorder] = []  # recorders that record now


@contextlib.contextmanager
def record(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Record the logical collectives that zerolite launches inside the context; contexts nest.

    Args:
        recorder: takes the collectives; None: a new one.
    """
    recorder = recorder or Recorder()
    active.append(recorder)
    try:
        yield recorder
    finally:
        active.remove(recorder)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Context whose collectives are not recorded by recorders outside of it: those of a dry run."""
    outside, active[:] = active[:], []
    try:
        yield
    finally:
        active[:] = outside


def note(
    op: str, tensor: torch.Tensor, tag: str, dimension: str = "data", ranks: int = 1, key: int = 0, moves: int = 0
) -> CollectiveCall | None:
    """Record a collective, and return it; None if no recorder is active. The communicator calls this once for each
    logical collective."""
    if not active:
        return None
    unaligned = _unaligned(tensor, ranks if op in _DIVIDED else 1)
    nbytes = tensor.numel() * tensor.element_size()
    return _add(
        CollectiveCall(op, tensor.numel(), tensor.dtype, nbytes, tag, 1, dimension, ranks, key, unaligned, moves)
    )


def note_wait(call: CollectiveCall) -> None:
    """Report the wait for a recorded collective."""
    for recorder in active:
        recorder.on_wait(call)


def note_gather(
    fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], tag: str, dimension: str, ranks: int, key: int
) -> CollectiveCall | None:
    """Record a gather of several tensors, unless all are empty, and return it."""
    numel = sum(full.numel() for full in fulls)
    if not (active and numel):
        return None
    unaligned = sum(_unaligned(full, ranks) for full in fulls) + sum(_unaligned(shard, 1) for shard in shards)
    nbytes = sum(full.numel() * full.element_size() for full in fulls)
    dtype, tensors = fulls[0].dtype, len(fulls)
    return _add(CollectiveCall("all_gather", numel, dtype, nbytes, tag, tensors, dimension, ranks, key, unaligned))


def _add(call: CollectiveCall) -> CollectiveCall:
    for recorder in active:
        recorder.on_launch(call)
    return call


_DIVIDED = ("all_gather", "reduce_scatter", "all_to_all")
"""Collectives that work on each rank's equal part of a tensor."""


def _unaligned(tensor: torch.Tensor, parts: int) -> int:
    """Count the parts of a tensor, of ``parts`` equal ones, that do not begin on 16 bytes."""
    if not tensor.numel():
        return 0
    start, length = address(tensor), tensor.numel() // parts * tensor.element_size()
    if start % ALIGNMENT == 0 and (parts == 1 or length % ALIGNMENT == 0):
        return 0
    return sum((start + part * length) % ALIGNMENT != 0 for part in range(parts))
