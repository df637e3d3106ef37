"""Requests to the rendezvous' store, with a time limit: torch's may never return."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from zerolite.utils.failure_record import EXIT_COUNT, NUMBERED_EXIT

SILENT_S = 30.0  # how long the store may take to answer
_READ_EXITS = 64  # ranks: when all end normally, no rank needs to know of more

Answer = TypeVar("Answer")


class StoreSilent(RuntimeError):
    """The rendezvous' store does not answer: its host is cut off, or the process that holds it stands still."""


def ask_store(request: Callable[[], Answer]) -> Answer:
    """Return the result of ``request()``, which asks the rendezvous' store. Raises StoreSilent after 30 s."""
    try:
        return in_time(request, SILENT_S)
    except TimeoutError:
        raise StoreSilent(
            f"the store of the rendezvous has not answered for {SILENT_S:g} s: the process that holds it (rank 0, or "
            "the launcher) stands still, or its host is cut off"
        ) from None


def in_time(call: Callable[[], Answer], timeout_s: float) -> Answer:
    """Return the result of ``call()``, or raise what it raises.

    Raises TimeoutError after ``timeout_s`` seconds. The call goes on in a daemon thread: torch's requests to a store
    have no time limit and cannot be interrupted.
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
    except RuntimeError:  # the interpreter is ending, which starts no more threads
        return call()
    left = timeout_s
    while thread.is_alive() and left > 0:
        thread.join(min(left, 1.0))  # in short waits: time in which the process was suspended does not count
        left -= 1.0
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def exited_ranks(store: dist.Store, rank: int, world_size: int) -> list[int]:
    """The ranks of the job that are known to have exited with status 0, as the `zerolite` launcher's agent writes into
    the store; none where the script has numbered its ranks in a way of its own.

    Args:
        store: the rendezvous' one, behind any number of prefixes.
        rank, world_size: of this process in the job's process group.
    """
    if (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) != (str(rank), str(world_size)):
        return []
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    count = min(store.add(EXIT_COUNT, 0), _READ_EXITS)
    known = [NUMBERED_EXIT.format(number) for number in range(1, count + 1)]
    return sorted(int(store.get(key)) for key in known if store.check([key]))
