"""Flight recorder: the latest collectives of each communicator, and the wait in progress.

Written by the main thread at every launch and wait, read by the watchdog's thread: a few attributes, and no lock.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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


class FlightRecorder:
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


def _nothing_to_say(error: RuntimeError) -> RuntimeError | None:
    return None


class _Blocked:
    """Stands for a call that returns when it is done."""

    def is_completed(self) -> bool:
        return False


class Wait:
    """The wait of this process's host or (on CUDA) the last wait of its device."""

    __slots__ = ("_done", "_looked", "_seen", "_waited", "entry", "explain", "number", "on_device", "works")

    def __init__(self) -> None:
        # Says more about a collective that has failed, or differs from that of other ranks: the watchdog.
        self.explain: Callable[[RuntimeError], RuntimeError | None] = _nothing_to_say
        self.on_device = False  # waiting returns at once, and the works' end is known to the device alone
        self.works: Sequence[Any] = ()
        self.entry: Raw | None = None
        self.number = 0  # of the wait: a look remembers this and not the works, which hold tensors
        self._done = -1  # on a device, and known to have ended: it is asked about it no more
        self._seen = -1  # by the last look
        self._waited = 0.0  # seconds that the looks have seen it
        self._looked = 0.0  # when the last look was

    def wait_for(self, works: Sequence[Any], entry: Raw | None = None) -> None:
        """Wait for collectives. On CUDA the current stream waits, not the host, and what it waits for stays known until
        the next call. Raises RuntimeError if one fails."""
        self.number += 1
        self.entry, self.works = entry, works
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._raise_explained(error)
        if not self.on_device:
            self.works = ()

    @contextlib.contextmanager
    def blocked(self, entry: Raw) -> Iterator[None]:
        """Context of a call that waits for the other ranks."""
        self.number += 1
        self.entry, self.works = entry, (_Blocked(),)
        try:
            yield
        except RuntimeError as error:
            self._raise_explained(error)
        finally:
            self.works = ()

    def _raise_explained(self, error: RuntimeError) -> None:
        """Raise the error of a collective, with what the watchdog knows about it."""
        self.works = (_Blocked(),)  # what has failed counts as waited for while it is explained
        explained = self.explain(error)
        self.works = ()
        if explained is None:
            raise error
        raise explained from error

    def explain_with(self, explain: Callable[[RuntimeError], RuntimeError | None]) -> None:
        """Let ``explain`` say more about a collective that has failed, instead of an earlier watchdog."""
        self.explain = explain

    def explain_without(self, explain: Callable[[RuntimeError], RuntimeError | None]) -> None:
        """End what :meth:`explain_with` has begun, unless a later watchdog explains."""
        if self.explain == explain:
            self.explain = _nothing_to_say

    def returns_at_once(self) -> None:
        """Waiting returns at once from now on, as on CUDA."""
        self.on_device = True

    def under_way(self) -> bool:
        """True if the wait is not over. May be called by another thread."""
        works = self.works
        return bool(works) and self.number != self._done and not all(work.is_completed() for work in works)

    def look(self, longest_s: float = math.inf) -> float:
        """Return for how many seconds earlier looks have seen the same wait; 0 if nothing is waited for. Called again
        and again, so that waiting itself needs no clock. More than ``longest_s`` seconds between two looks are not
        counted: the process, and most likely the others too, stood still (a suspended job) and did not wait."""
        number, now = self.number, time.monotonic()
        since, self._looked = now - self._looked, now
        if not self.under_way():
            self._seen = -1
            self._done = number if self.on_device else -1
            return 0.0
        if number != self._seen:
            self._seen, self._waited = number, 0.0
        else:
            self._waited += min(since, longest_s)
        return self._waited

    def forget(self) -> None:
        """Let go of what was waited for last, which holds tensors, unless it is waited for still."""
        if self.under_way():
            return
        self.works, self._seen, self._done = (), -1, -1
        self.entry = None

    def seconds(self) -> float:
        """The same as of the last look."""
        return self._waited if self._seen == self.number and self.works else 0.0


WAIT = Wait()
wait_for, blocked = WAIT.wait_for, WAIT.blocked


def wait_for_result(result: object) -> None:
    """Wait for a collective of the user's own, of which ``result`` is what torch's operator has returned."""
    for item in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(item, torch.ScriptObject):
            wait_for([dist.Work.unbox(item)])
