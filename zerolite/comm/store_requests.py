"""Requests to the rendezvous store with a time limit, which torch's own requests do not have.

If the host of the store is cut off, or its process is stopped, such a request never returns. A rank that asks why
others are late must not get stuck itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from zerolite.utils.failure_record import EXIT_COUNT, NUMBERED_EXIT

SILENT_S = 30.0  # how long the store may take to answer
_READ_EXITS = 64  # exited ranks that are read: one message names no more

Answer = TypeVar("Answer")


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
