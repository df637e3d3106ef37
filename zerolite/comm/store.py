"""The rendezvous store, which works when collectives do not: requests with a time limit, and a barrier with names.

torch's own requests to a store have no time limit. If the host of the store is cut off, or its process is stopped, they
never return. A rank that asks why others are late must not get stuck itself.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from zerolite.utils.failure_record import EXIT_COUNT, NUMBERED_EXIT
from zerolite.utils.text import name_ranks
from zerolite.utils.torch_private import job_store

logger = logging.getLogger("zerolite")

Answer = TypeVar("Answer")

SILENT_S = 30.0  # how long the store may take to answer
_READ_EXITS = 64  # exited ranks that are read: one message names no more
_FIRST_WARNING_S, _WARNINGS_S = 30.0, 60.0
_LONGEST_PAUSE_S = 0.5  # between two requests
_LOOKS_PER_S = 4000  # requests of all ranks together: a store answers about 10,000 a second
_GRACE_S = 10.0  # after the timeout: how long the others wait for the first rank to decide which ranks are missing
_FAREWELL_S = 3.0  # how long rank 0 stays, if the store ends with it, until others have read why the barrier failed

# ------------------------------------------------------------------ requests


class StoreSilent(RuntimeError):
    """The rendezvous store does not answer: its host is cut off, or its process is stopped."""


def ask_store(request: Callable[[], Answer]) -> Answer:
    """Return the result of ``request()``, a request to the rendezvous store. Raises StoreSilent after 30 s."""
    try:
        return call_with_timeout(request, SILENT_S)
    except TimeoutError:
        raise StoreSilent(
            f"the store of the rendezvous has not answered for {SILENT_S:g} s: the process that holds it (rank 0, or "
            "the launcher) stands still, or its host is cut off"
        ) from None


def call_with_timeout(call: Callable[[], Answer], timeout_s: float) -> Answer:
    """Return the result of ``call()``, or raise its exception.

    Raises TimeoutError after ``timeout_s`` seconds. Then the call goes on in a daemon thread, because a request to a
    store cannot be interrupted.
    """
    results: list[Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="zerolite store", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        return call()
    left = timeout_s
    while thread.is_alive() and left > 0:
        # In steps of a second, so that time in which this process was suspended counts as one step at most.
        thread.join(min(left, 1.0))
        left -= 1.0
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def exited_ranks(store: dist.Store, rank: int, world_size: int) -> list[int]:
    """Return the ranks that the `zerolite` launcher's agent knows to have exited with status 0.

    The list is empty if the script has numbered its ranks in another way than the launcher.

    Args:
        store: the rendezvous store, inside any number of prefixes.
        rank: this process's rank in the process group.
        world_size: number of ranks in the process group.
    """
    if (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) != (str(rank), str(world_size)):
        return []
    # The agent writes without the prefixes that torch and zerolite put before the keys of one process group.
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    count = min(store.add(EXIT_COUNT, 0), _READ_EXITS)
    known = [NUMBERED_EXIT.format(number) for number in range(1, count + 1)]
    return sorted(int(store.get(key)) for key in known if store.check([key]))


class SharedStore:
    """Store of the default process group's ranks, over a connection of its own, with keys under ``prefix``.

    Any rank and any thread may call its methods at any time. They raise RuntimeError if the process that hosts the
    store has ended, or has not answered for 30 s: no request waits for ever.
    """

    def __init__(self, prefix: str) -> None:
        self._group = dist.group.WORLD if dist.is_initialized() else None
        self.rank = dist.get_rank() if self._group is not None else 0
        self.world_size = dist.get_world_size() if self._group is not None else 1
        self._store: dist.Store | None = None
        self._silent = False
        if self.world_size > 1:
            store = job_store()
            # A connection of its own: a request that blocks would make all others of the connection wait. torch 2.6
            # cannot clone; there the connection is shared.
            clone = getattr(store, "clone", None)
            self._store = dist.PrefixStore(prefix, store if clone is None else clone())

    @property
    def alone(self) -> bool:
        """True in a job of one process, for which nothing is stored."""
        return self._store is None

    @property
    def held_by_launcher(self) -> bool:
        """True if the launcher hosts the store, which then outlives the ranks; otherwise rank 0's process does."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def belongs_to_default_group(self) -> bool:
        """Return True while the process group exists for which this store was made."""
        return self._group is (dist.group.WORLD if dist.is_initialized() else None)

    def close(self) -> None:
        self._store = self._group = None

    def set(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def get(self, key: str) -> str:
        """Return the value of an existing key."""
        return self._ask(lambda store: store.get(key)).decode()

    def has(self, *keys: str) -> bool:
        """Return True if all the keys exist."""
        return self._ask(lambda store: store.check(list(keys)))

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the counter ``key`` and return its new value; 0 reads it."""
        return self._ask(lambda store: store.add(key, number))

    def claim(self, key: str, value: str) -> str:
        """Set ``key`` unless another rank has. Return its value: the ``value`` of the rank that came first."""
        # An empty expected value means that the key is set only if it is missing.
        return self._ask(lambda store: store.compare_set(key, "", value)).decode()

    def exited(self) -> list[int]:
        """Return the ranks of the job that the launcher knows to have exited with status 0."""
        return self._ask(lambda store: exited_ranks(store, self.rank, self.world_size))

    def _ask(self, request: Callable[[dist.Store], Answer]) -> Answer:
        store = self._store
        if store is None or self._silent:
            raise RuntimeError("the store of the rendezvous cannot be asked")
        try:
            return ask_store(lambda: request(store))
        except StoreSilent:
            self._silent = True  # the request that still waits occupies the connection
            raise


# ------------------------------------------------------------------ waits


class Patience:
    """A wait that asks again and again until a timeout, with warnings on the way.

    Short sleeps in Python let Ctrl-C through, which a blocking request to the store would not.
    """

    def __init__(self, timeout_s: float, lookers: int = 1) -> None:
        """
        Args:
            timeout_s: seconds until the wait is over.
            lookers: number of processes that ask the same store.
        """
        self._start = time.monotonic()
        self._timeout_s = timeout_s
        self._shortest_s = max(0.002, lookers / _LOOKS_PER_S)
        self._warn_at = _FIRST_WARNING_S

    def left(self) -> float:
        """Return the seconds that are left; 0 or less when the time is over."""
        return self._start + self._timeout_s - time.monotonic()

    def pause(self, complaint: Callable[[], str] | None = None) -> None:
        """Sleep a little; longer, the longer the wait has lasted.

        Args:
            complaint: makes the text of the warning, "" for none.
        """
        waited, left = time.monotonic() - self._start, self.left()
        if waited >= self._warn_at and complaint is not None and (sentence := complaint()):
            self._warn_at += _WARNINGS_S
            logger.warning("%s (waiting for %.0f s, giving up after %g s)", sentence, waited, self._timeout_s)
        longest = min(waited / 10, _LONGEST_PAUSE_S)
        time.sleep(max(self._shortest_s, min(longest, left) if left > 0 else longest))


class StoreBarrier:
    """One barrier of ``ranks`` (global), for ``rank``, which names the ranks that do not come.

    A rank that arrives says so in the store. The first rank to set the outcome decides it, for all that have arrived.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], what: str) -> None:
        """
        Args:
            store: its keys are used for this barrier only.
            what: the call that all ranks make; messages begin with it.
        """
        self._store, self._rank, self._ranks, self._what = store, rank, ranks, what

    def decide(self, failure: str, missing: Sequence[int] = ()) -> None:
        """Set the outcome, unless there is one already.

        Args:
            failure: "" if all ranks are here, else a sentence about the missing ones.
            missing: the missing ranks.
        """
        # Sets a missing key only: all later ranks read the first outcome.
        self._store.compare_set("outcome", "", json.dumps([failure, list(missing)]))

    def wait(self, timeout_s: float, too_late: Callable[[list[int]], str]) -> bool:
        """Wait until all ranks are here. Return False if the others had given up before this rank came.

        A warning names the missing ranks after 30 s and then once a minute.

        Raises:
            RuntimeError: on all ranks that have come, with a sentence about the missing ones. After ``timeout_s``
                seconds it is ``too_late(missing)``. A rank that is known to have exited raises it at once.
            StoreSilent: the store does not answer.
        """
        store, patience = self._store, Patience(timeout_s, len(self._ranks))
        store.set(f"here/{self._rank}", "")
        arrived = store.add("here", 1)
        # Only the first to arrive asks for each rank by itself, and it gives up before the others. Otherwise all ranks
        # would send world_size requests each, at the same moment.
        first = arrived == 1
        latest_s = 0.0 if first else -_GRACE_S
        if arrived == len(self._ranks):
            self.decide("")
        while not ask_store(lambda: self._is_decided(too_late if patience.left() <= latest_s else None)):
            patience.pause((lambda: ask_store(self._complaint)) if first else None)
        failure, missing = json.loads(store.get("outcome"))
        if self._rank in missing:
            return False
        if failure:
            self._wait_for_readers(how_many_is_known=bool(missing))
            raise RuntimeError(f"{self._what}: {failure}")
        return True

    def clean(self) -> None:
        """Delete the keys of a barrier that all ranks have left. Called on each of them."""
        for key in (f"here/{self._rank}", *(("here", "outcome", "left") if self._rank == self._ranks[0] else ())):
            self._store.delete_key(key)

    def _is_decided(self, too_late: Callable[[list[int]], str] | None) -> bool:
        """Return True if there is an outcome. Set one if ranks cannot come any more or, with ``too_late``, have not
        come."""
        if self._store.check(["outcome"]):
            return True
        world_size = dist.get_world_size() if dist.is_initialized() else len(self._ranks)
        exited = [rank for rank in exited_ranks(self._store, self._rank, world_size) if rank in self._ranks]
        if exited := self._missing(exited):
            self.decide(self._exited_message(exited), exited)
        elif too_late is not None and (missing := self._missing(self._ranks)):
            self.decide(too_late(missing), missing)
        return False

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([f"here/{rank}"])]

    def _exited_message(self, exited: list[int]) -> str:
        who = name_ranks(exited)
        return (
            f"{who} of {len(self._ranks)} exited with status 0 before this call, and the others wait for "
            f"{'it' if len(exited) == 1 else 'them'}: the script has come to its end there, or has called sys.exit or "
            f"os._exit. All ranks must make this call, or none (see the output of {who})"
        )

    def _complaint(self) -> str:
        if not (missing := self._missing(self._ranks)):
            return ""
        have = "has" if len(missing) == 1 else "have"
        return f"{self._what}: {name_ranks(missing)} of {len(self._ranks)} {have} not arrived yet"

    def _wait_for_readers(self, how_many_is_known: bool) -> None:
        """Wait a little until the other ranks have read the outcome, because the store may end with this process.

        If processes contradict each other (two with the same rank), it is unknown how many will read it: wait the full
        time.
        """
        store, patience = self._store, Patience(_FAREWELL_S if self._rank == 0 else 0.0)
        left = store.add("left", 1)
        while patience.left() > 0 and (not how_many_is_known or left < store.add("here", 0)):
            patience.pause()
            left = store.add("left", 0)
