"""Barrier over the rendezvous store, which names the ranks that do not arrive."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from zerolite.comm.ranks import name_ranks
from zerolite.comm.store_requests import ask_store, exited_ranks

logger = logging.getLogger("zerolite")

_FIRST_WARNING_S, _WARNINGS_S = 30.0, 60.0
_LONGEST_PAUSE_S = 0.5  # between two requests
_LOOKS_PER_S = 4000  # requests of all ranks together: a store answers about 10,000 a second
_GRACE_S = 10.0  # after the timeout: how long the others wait for the first rank to decide which ranks are missing
_FAREWELL_S = 3.0  # how long rank 0 stays, if the store ends with it, until others have read why the barrier failed


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
    """One barrier of ``ranks`` (global), for ``rank``.

    The first rank to set the outcome decides it, for all that have arrived. Use ``store`` (its keys) for one barrier
    only.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], what: str) -> None:
        """
        Args:
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

    def _is_decided(self, too_late: Callable[[list[int]], str] | None) -> bool:
        """Return True if there is an outcome. Set one if ranks cannot come any more or, with ``too_late``, have not
        come."""
        if self._store.check(["outcome"]):
            return True
        if exited := self._exited():
            self.decide(self._exited_message(exited), exited)
        elif too_late is not None and (missing := self._missing()):
            self.decide(too_late(missing), missing)
        return False

    def clean(self) -> None:
        """Delete the keys of a barrier that all ranks have left. Called on each of them."""
        for key in (f"here/{self._rank}", *(("here", "outcome", "left") if self._rank == self._ranks[0] else ())):
            self._store.delete_key(key)

    def _missing(self) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([f"here/{rank}"])]

    def _exited(self) -> list[int]:
        """Return the ranks that will never come, because they have exited."""
        world_size = dist.get_world_size() if dist.is_initialized() else len(self._ranks)
        exited = exited_ranks(self._store, self._rank, world_size)
        return [rank for rank in exited if rank in self._ranks and not self._store.check([f"here/{rank}"])]

    def _exited_message(self, exited: list[int]) -> str:
        who = name_ranks(exited)
        return (
            f"{who} of {len(self._ranks)} exited with status 0 before this call, and the others wait for "
            f"{'it' if len(exited) == 1 else 'them'}: the script has come to its end there, or has called sys.exit or "
            f"os._exit. All ranks must make this call, or none (see the output of {who})"
        )

    def _complaint(self) -> str:
        if not (missing := self._missing()):
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
