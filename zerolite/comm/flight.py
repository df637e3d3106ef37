"""What is in the air: the latest collectives of each communicator, and what this process waits for.

Written by the main thread at every launch and wait, read by the watchdog's thread: a few attributes, and no lock.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

KEPT = 128


class Mismatch(RuntimeError):
    """The ranks have launched different collectives in the same place."""


class Entry(NamedTuple):
    """One logical collective. ``what``: the tensor's elements, or the shards [numel / world_size] that travel in one
    launch, which are kept alive anyway; ``key`` says what the tensors are: a parameter's or a bucket's number from 1,
    by ``tag``; 0 where there is none."""

    op: str
    tag: str
    what: int | Sequence[torch.Tensor]
    dtype: torch.dtype | None
    key: int = 0


Raw = tuple[str, str, int | Sequence[torch.Tensor], torch.dtype | None, int]
"""An :class:`Entry` as the hot path makes it."""


class Flight:
    """The collectives that one communicator has launched: how many, and the last 128 of them."""

    __slots__ = ("count", "latest")

    def __init__(self) -> None:
        self.count = 0
        self.latest: deque[Raw] = deque(maxlen=KEPT)

    def numbered(self) -> list[tuple[int, Entry]]:
        """The latest entries with their numbers, counted from 1. May be called by another thread."""
        for _ in range(8):  # a deque cannot be copied while it grows
            with contextlib.suppress(RuntimeError):
                count, entries = self.count, [Entry(*raw) for raw in self.latest]
                return list(enumerate(entries, count - len(entries) + 1))
        return []


class Wait:
    """What the host of this process waits for, or (on CUDA) what its device waited for last."""

    __slots__ = ("entry", "explain", "on_device", "since", "works")

    def __init__(self) -> None:
        # Says more about a collective that has failed, or differs from that of other ranks: the watchdog.
        self.explain: Callable[[RuntimeError], RuntimeError | None] = lambda error: None
        self.on_device = False  # waiting returns at once, and the works' end is known to the device alone
        self.clear()

    def clear(self) -> None:
        self.works: Sequence[Any] = ()
        self.entry: Raw | None = None
        self.since = 0.0

    def seconds(self) -> float:
        """For how long; 0 if nothing is waited for. May be called by another thread."""
        works, since = self.works, self.since
        if not works or all(work.is_completed() for work in works):
            return 0.0
        return time.monotonic() - since


class _Blocked:
    """Stands for a call that returns when it is done."""

    def is_completed(self) -> bool:
        return False


WAIT = Wait()
_BLOCKED = (_Blocked(),)


def wait_for(works: Sequence[Any], entry: Raw | None = None) -> None:
    """Wait for collectives. On CUDA the current stream waits, not the host, and what it waits for stays known until
    the next call. Raises RuntimeError if one fails."""
    wait = WAIT
    wait.since, wait.entry, wait.works = time.monotonic(), entry, works
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        explained = wait.explain(error)
        wait.clear()
        if explained is None:
            raise
        raise explained from error
    if not wait.on_device:
        wait.works = ()


@contextlib.contextmanager
def blocked(entry: Raw) -> Iterator[None]:
    """Around a call that waits for the other ranks."""
    WAIT.since, WAIT.entry, WAIT.works = time.monotonic(), entry, _BLOCKED
    try:
        yield
    except RuntimeError as error:
        explained = WAIT.explain(error)
        if explained is None:
            raise
        raise explained from error
    finally:
        WAIT.clear()
