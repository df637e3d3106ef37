"""The rendezvous store, which works when collectives do not: requests with a time limit.

torch's own requests to a store have no time limit. If the host of the store is cut off, or its process is stopped, they
never return. A rank that asks why others are late must not get stuck itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from zerolite.utils.failure_record import EXIT_COUNT, NUMBERED_EXIT
from zerolite.utils.torch_private import job_store

Answer = TypeVar("Answer")

SILENT_S = 30.0  # how long the store may take to answer
_READ_EXITS = 64  # exited ranks that are read: one message names no more

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
