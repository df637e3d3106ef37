"""Rendezvous store and first barrier of a job; ranks that do not arrive are named."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from zerolite.comm.exits import exited_ranks
from zerolite.comm.ranks import list_of, name_ranks
from zerolite.utils.listening import keep_store

logger = logging.getLogger("zerolite")

_FIRST_WARNING_S, _WARNINGS_S = 30.0, 60.0
_LONGEST_PAUSE_S = 0.5  # between two looks
_LOOKERS = 16  # ranks from 0 on that look again and again; the others let the store wake them, which bears many more
_LONGEST_WAIT_S = 60.0  # of those, after which they look whether the lookers are missing; torch logs every such end
_GRACE_S = 10.0  # that ranks wait for the lowest one to say who has not come in time
_ANSWER_S = 60.0  # for whoever listens to say that it is a store
_FAREWELL_S = 3.0  # that rank 0 stays for others to read why the meeting failed, since the store ends with it


class Patience:
    """Waiting by looking again and again (so that Ctrl-C works), until some time is over, with warnings on the way."""

    def __init__(self, timeout_s: float) -> None:
        self._start = time.monotonic()
        self._timeout_s = timeout_s
        self._warn_at = _FIRST_WARNING_S

    def left(self) -> float:
        """Seconds, 0 or less when the time is over."""
        return self._start + self._timeout_s - time.monotonic()

    def pause(self, complaint: Callable[[], str | None] = lambda: None) -> None:
        """Wait a little: the longer, the longer it has been. ``complaint`` makes the warning, if there is to be one."""
        waited = time.monotonic() - self._start
        if waited >= self._warn_at:
            self._warn_at += _WARNINGS_S
            sentence = complaint()
            if sentence is not None:
                logger.warning("%s (waiting for %.0f s, giving up after %g s)", sentence, waited, self._timeout_s)
        time.sleep(max(0.0, min(0.002 + waited / 10, _LONGEST_PAUSE_S, self.left())))


# ------------------------------------------------------------------ the store

_starts: dict[str, int] = {}  # by address: how often this process has started there


def open_store(init_method: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store at ``init_method`` (``tcp://host:port``, ``file:///path`` or what else torch knows), without waiting
    for ranks other than the one that keeps it, and with keys of its own for each job, restart and start.

    Raises RuntimeError if nothing can be reached there within ``timeout``, or rank 0 cannot listen.
    """
    address = urlparse(init_method)
    if address.scheme == "tcp" and address.hostname and address.port:
        store: dist.Store = _tcp_store(address.hostname, address.port, rank, timeout)
    else:
        store, _, _ = next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    _starts[init_method] = start = _starts.get(init_method, 0) + 1
    job, restart = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    return dist.PrefixStore(f"zerolite/{job}/{restart}/{start}", store)


def _tcp_store(host: str, port: int, rank: int, timeout: timedelta) -> dist.Store:
    if rank == 0 and not _kept_by_agent(host, port):
        try:
            return _make_tcp_store(host, port, True, timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"init_distributed: rank 0 cannot listen at port {port} of {socket.gethostname()}: {error}\nAnother "
                "program uses it, or another process of this job has rank 0 too: choose another MASTER_PORT (or port "
                "in init_method), and give each process a rank of its own."
            ) from error
    return _reach_tcp_store(host, port, rank, timeout)


def _kept_by_agent(host: str, port: int) -> bool:
    """Whether torchrun's agent keeps the store there."""
    here = (os.environ.get("MASTER_ADDR", "").lower(), os.environ.get("MASTER_PORT"))
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and here == (host.lower(), str(port))


def _make_tcp_store(host: str, port: int, keeps: bool, timeout: timedelta) -> dist.TCPStore:
    libuv = os.environ.get("USE_LIBUV", "1") == "1"
    make = functools.partial(
        dist.TCPStore, world_size=None, timeout=timeout, wait_for_workers=False, multi_tenant=keeps, use_libuv=libuv
    )
    if not keeps:
        return make(host, port, is_master=False)
    try:
        return keep_store(make, host, port, torch.__version__)
    except OSError:  # this process may keep one there already, which torch finds
        return make(host, port, is_master=True)


def _reach_tcp_store(host: str, port: int, rank: int, timeout: timedelta) -> dist.Store:
    """A connection to the store that somebody else keeps; waits until somebody does."""
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
    return _in_time(
        lambda: _make_tcp_store(host, port, False, timeout),
        min(_ANSWER_S, timeout.total_seconds()),
        f"init_distributed: something listens at {host}:{port}, but it does not answer as rank 0 would. Another "
        "program seems to use the port: choose another MASTER_PORT (or port in init_method).",
    )


def _refusal(host: str, port: int, left_s: float) -> str | None:
    """Why nobody can be reached there; None if somebody can."""
    try:
        socket.create_connection((host, port), timeout=min(max(left_s, 1.0), 10.0)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _in_time(call: Callable[[], dist.Store], timeout_s: float, otherwise: str) -> dist.Store:
    """What ``call`` gives; RuntimeError with the sentence ``otherwise`` if it fails or takes too long (some of torch's
    waits have no end)."""
    results: list[dist.Store] = []
    errors: list[RuntimeError] = []

    def run() -> None:
        try:
            results.append(call())
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="zerolite-store", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not results:
        raise RuntimeError(otherwise) from (errors[0] if errors else None)
    return results[0]


# ------------------------------------------------------------------ the meeting


class _Process(NamedTuple):
    """Who says that it is a rank."""

    host: str
    pid: int
    world_size: int


def meet(store: dist.Store, rank: int, world_size: int, timeout_s: float, what: str = "init_distributed") -> None:
    """Wait until all ranks are here.

    Raises RuntimeError on all that have come: after ``timeout_s`` seconds, with those who have not; at once, if two
    processes say they are the same rank, or processes differ in ``world_size``. A warning names those who are missing
    after 30 s and then once a minute. Called once for each ``store`` (its keys), on all ranks.
    """
    _Meeting(dist.PrefixStore("arrival", store), rank, world_size, timeout_s, what).run()


class _Meeting:
    """What happened is decided once, by whoever is first at a counter, and the same for all."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float, what: str) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s, self._what = timeout_s, what

    def run(self) -> None:
        try:
            outcome = self._outcome()
        except dist.DistError as error:
            raise RuntimeError(
                f"{self._what}: rank {self._rank} has lost the store of the rendezvous while it waited for the others; "
                "it ends with rank 0 or its launcher, whose output says why"
            ) from error
        if outcome != "all":
            raise RuntimeError(f"{self._what}: {outcome}")

    def _outcome(self) -> str:
        """ "all", or what went wrong."""
        store, patience = self._store, Patience(self._timeout_s)
        trouble = self._arrive()
        if trouble is None and store.add("count", 1) == self._world_size:
            self._decide("all")
        if trouble is not None:
            self._decide(trouble)
        while not store.check(["outcome"]):
            left = patience.left()
            if exited := self._exited():
                self._decide(exited)
            elif left <= 0 and (left < -_GRACE_S or self._is_lowest()) and (missing := self._missing()):
                self._decide(self._too_late(missing))
            if self._rank < _LOOKERS and left > 0:
                patience.pause(self._complaint)
            else:
                self._wait(min(_LONGEST_WAIT_S, max(left, 1.0)))
        outcome = store.get("outcome").decode()
        if outcome != "all":
            self._stay_for_others()
        return trouble or outcome

    def _arrive(self) -> str | None:
        """Say who this is; returns what is wrong about it, if anything is."""
        store, rank = self._store, self._rank
        own = _Process(socket.gethostname(), os.getpid(), self._world_size)
        store.add("arrived", 1)
        times = store.add(f"{rank}/times", 1)
        store.set(f"{rank}/{times}", json.dumps(own))
        if times > 1:
            processes = [self._process(rank, time) for time in range(1, times + 1)]
            names = list_of([f"process {process.pid} on {process.host}" for process in processes])
            return (
                f"{times} processes say that they are rank {rank} of {self._world_size}: {names}. Give each process a "
                "rank of its own (RANK, or the argument rank); a file of an earlier job, as init_method, must be "
                "deleted before"
            )
        first = json.dumps(own)
        agreed = json.loads(store.compare_set("size", "", json.dumps([rank, first])))
        other = _Process(*json.loads(agreed[1]))
        if other.world_size == self._world_size:
            return None
        return (
            f"the ranks do not agree how many they are: WORLD_SIZE is {other.world_size} on rank {agreed[0]} (process "
            f"{other.pid} on {other.host}), but {own.world_size} on rank {rank} (process {own.pid} on {own.host})"
        )

    def _process(self, rank: int, time: int = 1) -> _Process:
        return _Process(*json.loads(self._store.get(f"{rank}/{time}")))

    def _decide(self, outcome: str) -> None:
        if self._store.add("decided", 1) == 1:
            self._store.set("outcome", outcome)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._store.check([f"{rank}/times"])]

    def _exited(self) -> str:
        """What is said of ranks that will never come, since they have ended; "" if there are none."""
        exited = exited_ranks(self._store, self._rank, self._world_size)
        gone = [rank for rank in exited if not self._store.check([f"{rank}/times"])]
        if not gone:
            return ""
        return (
            f"{name_ranks(gone)} of {self._world_size} exited with status 0 before this call, and the others wait for "
            f"{'it' if len(gone) == 1 else 'them'}: the script has come to its end there, or has called sys.exit or "
            "os._exit. All ranks must make this call, or none (see the output of "
            f"{name_ranks(gone)})"
        )

    def _too_late(self, missing: list[int]) -> str:
        known = next(rank for rank in range(self._world_size) if rank not in missing)
        return (
            f"{name_ranks(missing)} of {self._world_size} did not arrive within {self._timeout_s:g} s; rank {known} "
            f"runs on {self._process(known).host}. See what they have printed last: they may have failed before this "
            "call, still be busy (with data that they load, say), or never have been started. The argument timeout is "
            "the time that ranks wait for each other"
        )

    def _wait(self, longest_s: float) -> None:
        """Until the outcome is there, without a request meanwhile, or for ``longest_s`` seconds."""
        with contextlib.suppress(RuntimeError):  # not there yet; if the store is lost, the next look says so
            self._store.wait(["outcome"], timedelta(seconds=longest_s))

    def _is_lowest(self) -> bool:
        """Return True if no lower rank is here."""
        return not any(self._store.check([f"{rank}/times"]) for rank in range(self._rank))

    def _complaint(self) -> str | None:
        """On the lowest rank that is here."""
        if not self._is_lowest() or not (missing := self._missing()):
            return None
        have = "has" if len(missing) == 1 else "have"
        return f"{self._what}: {name_ranks(missing)} of {self._world_size} {have} not arrived yet"

    def _stay_for_others(self) -> None:
        """The store may end with this process: wait a little until all that are here have read the outcome."""
        store, patience = self._store, Patience(_FAREWELL_S if self._rank == 0 else 0.0)
        left = store.add("left", 1)
        while left < store.add("arrived", 0) and patience.left() > 0:
            patience.pause()
            left = store.add("left", 0)
