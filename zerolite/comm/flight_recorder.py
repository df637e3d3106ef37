"""Flight recorder: the latest collectives of each communicator, and the wait in progress.

The main thread writes it at every launch and wait, and the watchdog's thread reads it. It consists of a few attributes
without a lock, because it is on the path of every collective.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

CAPACITY = 128
BRANCH_ADVICE = (
    "at stage 3 name the module whose forward has the branch in zero_optimization.leaf_modules; naming the module that "
    "some ranks do not call is not enough"
)


EVENTS: deque[str] = deque(maxlen=16)
"""What this process has done lately that all ranks must do alike, such as "set p.grad of all parameters to None in step
3". The diagnosis of a hang names what only some ranks have done."""


_calls: deque[tuple[int, str]] = deque(maxlen=CAPACITY)  # of marked functions in a debug run: numbers from 1, names

Marked = TypeVar("Marked", bound=Callable[..., Any])


def collective(function: Marked) -> Marked:
    """Mark a function that all ranks of its group call, in the same order: it launches collectives, or may do so. Of a
    marked class these are all methods.

    The diagnosis of a hang in a debug run (``TORCH_DISTRIBUTED_DEBUG=DETAIL``, when zerolite is imported) says in which
    call the ranks have parted. Otherwise the function itself is returned, and a call costs nothing.
    """
    function.is_collective = True  # type: ignore[attr-defined]
    if function.__doc__:
        whom = "its methods" if isinstance(function, type) else "it"
        function.__doc__ = f"{inspect.cleandoc(function.__doc__)}\n\nAll ranks call {whom}, in the same order."
    return _recorded(function) if _RECORDS_CALLS and not isinstance(function, type) else function


def _recorded(function: Any) -> Any:
    name = f"{function.__module__.removeprefix('zerolite.')}.{function.__qualname__}"

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # saves in the background come at any time
            _calls.append((_calls[-1][0] + 1 if _calls else 1, name))
        return function(*args, **kwargs)

    return recorded


_RECORDS_CALLS = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"


def latest_calls() -> list[tuple[int, str]]:
    """Return number and name of the latest calls of marked functions, in a debug run. May be called by another
    thread."""
    return _copied(_calls)


def _copied(entries: deque[Any]) -> list[Any]:
    for _ in range(8):  # a deque cannot be copied while it grows
        with contextlib.suppress(RuntimeError):
            return list(entries)
    return []


class CollectiveFailed(RuntimeError):
    """A collective has failed."""


NOTHING_MAY_FOLLOW = (CollectiveFailed, dist.DistError)
"""Errors of a collective, after which this process must launch no other one: ranks have parted, or some have gone."""


class Mismatch(CollectiveFailed):
    """The ranks have launched different collectives at the same place."""


class ShardSize:
    """Number of elements and dtype of a shard, in place of a tensor that the record would keep alive."""

    __slots__ = ("_numel", "dtype")

    def __init__(self, shard: torch.Tensor) -> None:
        self._numel, self.dtype = shard.numel(), shard.dtype

    def numel(self) -> int:
        return self._numel

    def element_size(self) -> int:
        return self.dtype.itemsize


class Entry(NamedTuple):
    """One logical collective.

    Attributes:
        op: such as "all_reduce".
        tag: purpose, such as "gradients".
        what: elements of the tensor; or the shards [numel / world_size] of one launch, as tensors if they are kept
            alive anyway.
        dtype: None if ``what`` has it.
        key: which tensors: number of a parameter or bucket from 1 (depending on the tag); 0 if there is none.
    """

    op: str
    tag: str
    what: int | Sequence[torch.Tensor | ShardSize]
    dtype: torch.dtype | None
    key: int = 0


Raw = tuple[str, str, int | Sequence[torch.Tensor | ShardSize], torch.dtype | None, int]
"""An :class:`Entry` as the hot path makes it."""


class FlightRecorder:
    """The collectives that one communicator has launched: their number, and the last 128."""

    __slots__ = ("count", "latest")

    def __init__(self) -> None:
        self.count = 0
        self.latest: deque[Raw] = deque(maxlen=CAPACITY)

    def numbered(self) -> list[tuple[int, Entry]]:
        """Return the latest entries with their numbers, counted from 1. May be called by another thread."""
        count, entries = self.count, _copied(self.latest)
        return [(number, Entry(*raw)) for number, raw in enumerate(entries, count - len(entries) + 1)]


def nothing_to_say(error: RuntimeError) -> RuntimeError | None:
    """Explain no failed collective: there is no watchdog."""
    return None


class _Blocked:
    """Stand-in for a work in a call that only returns when it is done."""

    def is_completed(self) -> bool:
        return False


class Wait:
    """The host's wait that is in progress or, on CUDA, the device's last wait."""

    __slots__ = ("_done", "_looked", "_seen", "_waited", "entry", "explain", "number", "on_device", "works")

    def __init__(self) -> None:
        # Set by the watchdog: explains the error of a collective that failed or differs between ranks.
        self.explain: Callable[[RuntimeError], RuntimeError | None] = nothing_to_say
        self.on_device = False  # wait() returns at once, and only the device knows when the works end
        self.works: Sequence[Any] = ()
        self.entry: Raw | None = None
        self.number = 0  # number of the wait. A look remembers it, and not the works, which hold tensors
        self._done = -1  # number of a wait on a device that is known to have ended, and need not be asked about again
        self._seen = -1  # number of the wait that the last look saw
        self._waited = 0.0  # seconds for which looks have seen this wait
        self._looked = 0.0  # time of the last look

    def wait_for(self, works: list[Any], entry: Raw | None = None) -> None:
        """Wait for collectives. Raises RuntimeError if one fails.

        On CUDA the current stream waits, not the host. There the works stay known until the next call, so that the
        watchdog can see if the device is stuck. Elsewhere those that have ended leave the list.
        """
        self.number += 1
        self.entry, self.works = entry, works
        try:
            for work in tuple(works):
                work.wait()
                if not self.on_device and works and works[0] is work:  # no handler of a signal has waited meanwhile
                    del works[0]
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
        """Raise the error of a collective, with the watchdog's explanation."""
        self.works = (_Blocked(),)  # while the error is explained, the report says that this rank waits here
        explained = self.explain(error)
        self.works = ()
        if explained is None:
            raise error
        raise explained from error

    def under_way(self) -> bool:
        """Return True if the wait is not over. May be called by another thread."""
        works = self.works
        return bool(works) and self.number != self._done and not all(work.is_completed() for work in works)

    def look(self, longest_s: float = math.inf) -> float:
        """Return for how many seconds earlier looks have seen the same wait; 0 if nothing is waited for.

        It is called regularly, so that waiting itself needs no clock. Of the time between two looks at most
        ``longest_s`` is counted. In a longer gap the process was suspended, and most likely the others too.
        """
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
        """Drop the works of the last wait, which hold tensors, unless it is still in progress."""
        if self.under_way():
            return
        self.works, self._seen, self._done = (), -1, -1
        self.entry = None


WAIT = Wait()
wait_for, blocked = WAIT.wait_for, WAIT.blocked


def wait_for_result(result: object) -> None:
    """Wait for a collective of the user's own.

    Args:
        result: return value of torch's operator.
    """
    for output in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(output, torch.ScriptObject):
            wait_for([dist.Work.unbox(output)])
