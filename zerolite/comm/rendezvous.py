"""Rendezvous store and first barrier of a job."""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from zerolite.comm.flight_recorder import collective
from zerolite.comm.store import StoreSilent, ask_store, call_with_timeout, exited_ranks
from zerolite.utils.network import keep_store
from zerolite.utils.text import list_of, name_ranks

logger = logging.getLogger("zerolite")
_CALL = "init_distributed"
_ANSWER_S = 60.0  # how long a process that listens at the port may take to answer as a store
_FIRST_WARNING_S, _WARNINGS_S = 30.0, 60.0
_LONGEST_PAUSE_S = 0.5  # between two requests
_LOOKS_PER_S = 4000  # requests of all ranks together: a store answers about 10,000 a second
_GRACE_S = 10.0  # after the timeout: how long the others wait for the first rank to decide which ranks are missing
_FAREWELL_S = 3.0  # how long rank 0 stays until the others have read why the barrier failed
_COMPLETE = "complete"


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


# ------------------------------------------------------------------ the store

_starts: dict[str, int] = {}  # number of starts of this process, by address


def open_store(init_method: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Open the store at ``init_method`` (``tcp://host:port``, ``file:///path``, or any other that torch knows).

    It waits only for the rank that hosts the store. Each job, restart and start gets keys of its own. Raises
    RuntimeError if nothing can be reached within ``timeout``, or if rank 0 cannot listen.
    """
    address = urlparse(init_method)
    if address.scheme == "tcp" and address.hostname and address.port:
        store: dist.Store = _tcp_store(address.hostname, address.port, rank, timeout)
    else:
        store, _, _ = next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    # The store may outlive this process group (a restart, or a second init_distributed): old keys must not be read.
    _starts[init_method] = start = _starts.get(init_method, 0) + 1
    job, restart = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    return dist.PrefixStore(f"zerolite/{job}/{restart}/{start}", store)


def _tcp_store(host: str, port: int, rank: int, timeout: timedelta) -> dist.Store:
    if rank == 0 and not _hosted_by_agent(host, port):
        try:
            return _make_tcp_store(host, port, True, timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"init_distributed: rank 0 cannot listen at port {port} of {socket.gethostname()}: {error}\nAnother "
                "program uses it, or another process of this job has rank 0 too: choose another MASTER_PORT (or port "
                "in init_method), and give each process a rank of its own."
            ) from error
    return _reach_tcp_store(host, port, rank, timeout)


def _hosted_by_agent(host: str, port: int) -> bool:
    """Return True if torchrun's agent hosts the store there."""
    ours = (os.environ.get("MASTER_ADDR", "").lower(), os.environ.get("MASTER_PORT"))
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and ours == (host.lower(), str(port))


def _make_tcp_store(host: str, port: int, keeps: bool, timeout: timedelta) -> dist.TCPStore:
    libuv = os.environ.get("USE_LIBUV", "1") == "1"
    make = functools.partial(
        dist.TCPStore, world_size=None, timeout=timeout, wait_for_workers=False, multi_tenant=keeps, use_libuv=libuv
    )
    if not keeps:
        return make(host, port, is_master=False)
    try:
        return keep_store(make, host, port, torch.__version__)
    except OSError:  # this process may host a store there already, which torch then uses (multi_tenant)
        return make(host, port, is_master=True)


def _reach_tcp_store(host: str, port: int, rank: int, timeout: timedelta) -> dist.Store:
    """Connect to the store that another process hosts; wait until one does."""
    patience = Patience(timeout.total_seconds())
    while (refusal := _refusal(host, port, patience.left())) is not None:
        if patience.left() <= 0:
            raise RuntimeError(
                f"init_distributed: rank {rank} on {socket.gethostname()} could not reach rank 0 at {host}:{port} "
                f"within {timeout.total_seconds():g} s ({refusal}). Has rank 0 failed before it came here? Otherwise "
                "check that MASTER_ADDR and MASTER_PORT (or init_method) are the same on all ranks, that the address "
                "is that of rank 0's host as others reach it, and that no firewall closes the port."
            )
        sentence = f"init_distributed: rank {rank} cannot reach rank 0 at {host}:{port} yet: {refusal}"
        patience.pause(lambda sentence=sentence: sentence)  # type: ignore[misc]
    try:
        # If another program listens at the port, torch's handshake would wait for its answer for ever.
        return call_with_timeout(
            lambda: _make_tcp_store(host, port, False, timeout), min(_ANSWER_S, timeout.total_seconds())
        )
    except (RuntimeError, TimeoutError) as error:
        raise RuntimeError(
            f"init_distributed: something listens at {host}:{port}, but it does not answer as rank 0 would. Another "
            "program seems to use the port: choose another MASTER_PORT (or port in init_method)."
        ) from error


def _refusal(host: str, port: int, left_s: float) -> str | None:
    """Return why no store can be reached there; None if one can."""
    try:
        socket.create_connection((host, port), timeout=min(max(left_s, 1.0), 10.0)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


# ------------------------------------------------------------------ the first barrier


class _FirstBarrier:
    """The barrier of all ranks of a job, which names those that do not come.

    A rank that arrives says so in the store. The first rank to set the outcome decides it, for all that have arrived.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size

    def decide(self, outcome: str) -> None:
        """Set the outcome, :data:`_COMPLETE` or a sentence about the missing ranks, unless there is one already."""
        # Sets a missing key only: all later ranks read the first outcome.
        self._store.compare_set("outcome", "", outcome)

    def wait(self, timeout_s: float, too_late: Callable[[list[int]], str]) -> None:
        """Wait until all ranks are here.

        A warning names the missing ranks after 30 s and then once a minute.

        Raises:
            RuntimeError: on all ranks that come, with a sentence about the missing ones. After ``timeout_s`` seconds it
                is ``too_late(missing)``. A rank that is known to have exited raises it at once.
            StoreSilent: the store does not answer.
        """
        store, patience = self._store, Patience(timeout_s, self._world_size)
        store.set(f"here/{self._rank}", "")
        arrived = store.add("here", 1)
        # Only the first to arrive asks for each rank by itself, and it gives up before the others. Otherwise all ranks
        # would send world_size requests each, at the same moment.
        first = arrived == 1
        latest_s = 0.0 if first else -_GRACE_S
        if arrived == self._world_size:
            self.decide(_COMPLETE)
        while not ask_store(lambda: self._is_decided(too_late if patience.left() <= latest_s else None)):
            patience.pause((lambda: ask_store(self._complaint)) if first else None)
        outcome = store.get("outcome").decode()
        if outcome != _COMPLETE:
            if self._rank == 0:  # the store may end with this process, and the others have not read it yet
                time.sleep(_FAREWELL_S)
            raise RuntimeError(f"{_CALL}: {outcome}")

    def _is_decided(self, too_late: Callable[[list[int]], str] | None) -> bool:
        """Return True if there is an outcome. Set one if ranks cannot come any more or, with ``too_late``, have not
        come."""
        if self._store.check(["outcome"]):
            return True
        if exited := self._missing(exited_ranks(self._store, self._rank, self._world_size)):
            self.decide(self._exited_message(exited))
        elif too_late is not None and (missing := self._missing(range(self._world_size))):
            self.decide(too_late(missing))
        return False

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([f"here/{rank}"])]

    def _exited_message(self, exited: list[int]) -> str:
        who = name_ranks(exited)
        return (
            f"{who} of {self._world_size} exited with status 0 before this call, and the others wait for "
            f"{'it' if len(exited) == 1 else 'them'}: the script has come to its end there, or has called sys.exit or "
            f"os._exit. All ranks must make this call, or none (see the output of {who})"
        )

    def _complaint(self) -> str:
        if not (missing := self._missing(range(self._world_size))):
            return ""
        have = "has" if len(missing) == 1 else "have"
        return f"{_CALL}: {name_ranks(missing)} of {self._world_size} {have} not arrived yet"


@collective
def first_barrier(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Wait until all ranks are here. Called once for each ``store`` (its keys).

    A warning names the missing ranks after 30 s and then once a minute.

    Raises:
        RuntimeError: on all ranks that have come. After ``timeout_s`` seconds, with the missing ranks. At once if two
            processes have the same rank or processes differ in ``world_size``.
    """
    store = dist.PrefixStore("arrival", store)
    barrier = _FirstBarrier(store, rank, world_size)

    def too_late(missing: list[int]) -> str:
        known = next(rank for rank in range(world_size) if rank not in missing)
        host, _ = json.loads(store.get(f"process/{known}"))
        return (
            f"{name_ranks(missing)} of {world_size} did not arrive within {timeout_s:g} s; rank {known} runs on "
            f"{host}. See what they have printed last: they may have failed before this call, still be busy (with "
            "data that they load, say), or never have been started. The argument timeout is the time that ranks wait "
            "for each other"
        )

    try:
        trouble = _same_job(store, rank, world_size)
        if trouble:
            barrier.decide(trouble)
        barrier.wait(timeout_s, too_late)
    except StoreSilent as error:
        raise RuntimeError(f"{_CALL}: rank {rank} waits for the others, and {error}") from error
    except dist.DistError as error:
        raise RuntimeError(
            f"{_CALL}: rank {rank} has lost the store of the rendezvous while it waited for the others; it ends with "
            "rank 0 or its launcher, whose output says why"
        ) from error
    if trouble:  # the others are complete without this process
        raise RuntimeError(f"{_CALL}: {trouble}")


def _same_job(store: dist.Store, rank: int, world_size: int) -> str:
    """Register this process. Returns a sentence about what is wrong with it, or ""."""
    this_process = [socket.gethostname(), os.getpid()]
    known = json.loads(store.compare_set(f"process/{rank}", "", json.dumps(this_process)))
    if known != this_process:
        processes = list_of([f"process {process} on {host}" for host, process in (known, this_process)])
        return (
            f"2 processes say that they are rank {rank} of {world_size}: {processes}. Give each process a rank of its "
            "own (RANK, or the argument rank); a file of an earlier job, as init_method, must be deleted before"
        )
    first, size, host, process = json.loads(
        store.compare_set("size", "", json.dumps([rank, world_size, *this_process]))
    )
    if size == world_size:
        return ""
    return (
        f"the ranks do not agree how many they are: WORLD_SIZE is {size} on rank {first} (process {process} on "
        f"{host}), but {world_size} on rank {rank} (process {this_process[1]} on {this_process[0]})"
    )
