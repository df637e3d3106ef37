"""Rendezvous of a job's nodes at the first node's store, and what they then tell each other there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from zerolite.launcher.failures import Failure, causes_first
from zerolite.launcher.job import NodeJob
from zerolite.utils.failure_record import EXIT_COUNT, NUMBERED_EXIT
from zerolite.utils.network import keep_store

CONNECT_TIMEOUT_S = 5.0
"""Seconds for which the first node is tried at a time."""

POLL_INTERVAL_S = 0.2
"""Seconds between two reports of a node."""

SILENCE_S = 20.0
"""A node without a sign of life for so many seconds is lost."""

_STEP_S = 1.0
"""Most seconds of silence between two looks: a process that was suspended has heard nothing meanwhile."""

LEAVE_S = 5.0
"""The first node keeps the store, so it waits up to so many seconds until the others have read the verdict."""

CAUSE_WAIT_S = 2.0
"""Time to wait for the cause of a failure, and for the end of ranks that have reported an error."""


class NodeRendezvousError(RuntimeError):
    """The nodes of a job did not meet; the message names them and says what to do."""


class NodeRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous that listens on one address alone and names the nodes that do not come.

    Attributes:
        attempt: number of the current attempt, 0 for the first; the same on all nodes.
        board: what the nodes of the current attempt tell each other; None until they have come.
    """

    def __init__(self, job: NodeJob, host: str) -> None:
        super().__init__(
            job.master_addr, job.master_port, job.node_rank, job.num_nodes, job.job_id, timeout=int(job.join_s)
        )
        self._job = job
        self._host = host
        self._node_store: Any = None
        self.attempt = -1
        self.board: Board | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes have come to the next attempt.

        Raises:
            NodeRendezvousError: a node has not come, or two have the same number.
        """
        job = self._job
        if self._node_store is None:
            self._node_store = open_store(job)
            if job.node_rank == 0:
                self._node_store.set("zerolite/run_id", self.run_id)
            self.run_id = self._node_store.get("zerolite/run_id").decode()
        self.attempt += 1
        self.board = None
        store = PrefixStore(f"zerolite/attempt_{self.attempt}", self._node_store)
        hosts = self._await_nodes(store)
        # Another attempt gets another store: in the old one torch would read the old ranks' keys.
        rank_store = self._node_store if self.attempt == 0 else self._open_empty_store(store)
        self.board = Board(store, rank_store, job.node_rank, hosts)
        self.board.start()
        return RendezvousInfo(
            store, job.node_rank, len(hosts), RendezvousStoreInfo(job.master_addr, int(rank_store.port))
        )

    def _await_nodes(self, store: PrefixStore) -> list[str]:
        """Wait for all nodes; return the names of their hosts."""
        job = self._job
        keys = [f"host/{number}" for number in range(job.num_nodes)]
        if store.add(f"came/{job.node_rank}", 1) > 1:
            raise NodeRendezvousError(
                f"two nodes were started as number {job.node_rank}: {store.get(keys[job.node_rank]).decode()} and "
                f"{self._host}. Give each node a --node-rank of its own, 0 for the one at --master-addr."
            )
        store.set(f"state/{job.node_rank}", json.dumps([0, dataclasses.asdict(NodeState())]))
        store.set(keys[job.node_rank], self._host)
        try:
            store.wait(keys, timedelta(seconds=job.join_s))
        except RuntimeError as error:
            missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
            raise NodeRendezvousError(
                f"of {job.num_nodes} nodes, number {', '.join(missing)} did not come within {job.join_s:.0f} s. "
                "Start `zerolite` on every node with the same --num-nodes, --master-addr and --master-port."
            ) from error
        return [store.get(key).decode() for key in keys]

    def _open_empty_store(self, store: PrefixStore) -> TCPStore:
        """Host another store on the first node, or connect to it."""
        job, make = self._job, store_maker(self._job)
        if job.node_rank:
            return make(job.master_addr, int(store.get("port")), is_master=False)
        empty = keep_store(make, job.master_addr, 0, torch.__version__)
        store.set("port", str(empty.port))
        return empty


def store_maker(job: NodeJob) -> Callable[..., TCPStore]:
    return functools.partial(TCPStore, timeout=timedelta(seconds=job.join_s), wait_for_workers=False)


def open_store(job: NodeJob) -> TCPStore:
    """Host the job's store on the first node, or connect to it from another one.

    Raises:
        NodeRendezvousError: the store cannot be hosted, or not be reached within the job's ``join_s``.
    """
    make, address, port = store_maker(job), job.master_addr, job.master_port
    endpoint = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    if job.node_rank == 0:
        try:
            return keep_store(make, address, port, torch.__version__)
        except (RuntimeError, OSError) as error:
            raise NodeRendezvousError(
                f"the rendezvous store could not be started at {endpoint}: {str(error).splitlines()[0]}. Choose "
                "another --master-port, and check that --master-addr is an address of this machine."
            ) from error
    deadline = time.monotonic() + job.join_s
    while True:
        try:
            socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
            return make(address, port, is_master=False)
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise NodeRendezvousError(
                    f"host {socket.gethostname()} cannot reach the first node's rendezvous store at {endpoint} within "
                    f"{job.join_s:.0f} s ({getattr(error, 'strerror', None) or error}). Check that the first node's "
                    "command runs, the address (--master-addr) and port (--master-port), and that no firewall closes "
                    "the port."
                ) from error
        time.sleep(POLL_INTERVAL_S)


@dataclass
class NodeState:
    """State of the ranks of one node.

    Attributes:
        failures: ranks that have ended with an error, or have reported one.
        failed: one of these has ended, or hangs.
        pending: a rank has reported an error and is about to end.
        finished: ranks that have exited with status 0, as failures with this status.
        succeeded: all have.
    """

    failures: list[Failure] = field(default_factory=list)
    failed: bool = False
    pending: bool = False
    finished: list[Failure] = field(default_factory=list)
    succeeded: bool = False

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> NodeState:
        for name in ("failures", "finished"):
            fields[name] = [Failure.from_json(one) for one in fields[name]]
        return cls(**fields)


class Judge:
    """Finds, on the first node, how an attempt has ended on all of them."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        self._beats: dict[int, tuple[int, float]] = {}  # latest number and seconds of silence since, by node
        self._looked_at = float("-inf")
        self._failed_at: float | None = None

    def decide(self, states: Sequence[NodeState], beats: Sequence[int], now: float) -> list[Failure] | None:
        """Return the failures of the attempt, causes first; none after success; None while it goes on.

        Args:
            states: of all nodes.
            beats: number of the reports of each node.
            now: time in seconds.
        """
        if all(state.succeeded for state in states):
            return []
        failures = [failure for state in states for failure in state.failures]
        lost = self._find_lost_nodes(beats, now)
        if not lost and not any(state.failed for state in states):
            return None
        self._failed_at = now if self._failed_at is None else self._failed_at
        cause_unknown = all(failure.consequence for failure in failures)
        pending = cause_unknown or any(state.pending for state in states)
        if not lost and pending and now - self._failed_at < CAUSE_WAIT_S:
            return None
        if cause_unknown:  # it may be a rank that has exited with status 0
            failures += [rank for state in states for rank in state.finished]
        return causes_first([*lost, *failures])

    def _find_lost_nodes(self, beats: Sequence[int], now: float) -> list[Failure]:
        lost = []
        step, self._looked_at = min(now - self._looked_at, _STEP_S), now
        for node, host in enumerate(self._hosts):
            known, silent_s = self._beats.get(node, (-1, 0.0))
            self._beats[node] = (beats[node], silent_s + step if beats[node] == known else 0.0)
            if self._beats[node][1] > SILENCE_S:
                sentence = (
                    f"host {host} gave no sign of life for {SILENCE_S:.0f} s: its agent has ended, the machine is "
                    "down, or the network to it is broken"
                )
                lost.append(Failure(host=host, seen=time.time() - SILENCE_S, node_failure=sentence))
        return lost


class Board(threading.Thread):
    """Thread in which a node reports to the first one, and reads its verdict, in one attempt.

    A request waits for ever if the first node's host is cut off. So this thread alone makes requests, and the agent
    calls :meth:`look`.

    Attributes:
        state: what is reported.
        verdict: failures of the attempt, causes first; none after success; None while it goes on.
        broken: the error that has ended it before the verdict, such as a lost connection; "" while it works.
    """

    def __init__(self, store: PrefixStore, rank_store: Any, node: int, hosts: Sequence[str]) -> None:
        super().__init__(name="zerolite board", daemon=True)
        self._store = store
        self._rank_store = rank_store
        self._node = node
        self._count = len(hosts)
        self._judge = Judge(hosts)
        self._beats = 0
        self._announced: set[int] = set()
        self._answered = True  # since the latest look
        self._looked_at, self._silent_s = time.monotonic(), 0.0
        self.state = NodeState()
        self.verdict: list[Failure] | None = None
        self.broken = ""

    def look(self) -> float:
        """Return the seconds for which the store has not answered. Called again and again."""
        now = time.monotonic()
        step, self._looked_at = min(now - self._looked_at, _STEP_S), now
        self._silent_s = 0.0 if self._answered else self._silent_s + step
        self._answered = False
        return self._silent_s

    def run(self) -> None:
        try:
            while self.verdict is None:
                self._exchange()
                self._answered = True
                time.sleep(POLL_INTERVAL_S if self.verdict is None else 0.0)
            self._store.set(f"left/{self._node}", "")
            if self._node == 0:
                self._store.wait([f"left/{node}" for node in range(self._count)], timedelta(seconds=LEAVE_S))
        except Exception as error:
            self.broken = f"{type(error).__name__}: {error}"

    def _exchange(self) -> None:
        self._beats += 1
        state = self.state
        self._announce({failure.rank for failure in state.finished})
        self._store.set(f"state/{self._node}", json.dumps([self._beats, dataclasses.asdict(state)]))
        if self._node == 0:
            keys = [f"state/{node}" for node in range(self._count)]
            reports = [json.loads(report) for report in self._store.multi_get(keys)]
            states = [NodeState.from_json(fields) for _, fields in reports]
            verdict = self._judge.decide(states, [beats for beats, _ in reports], time.monotonic())
            if verdict is not None:
                self._store.set("verdict", json.dumps([dataclasses.asdict(failure) for failure in verdict]))
                self.verdict = verdict
        elif self._store.check(["verdict"]):
            self.verdict = [Failure.from_json(one) for one in json.loads(self._store.get("verdict"))]

    def _announce(self, finished: set[int]) -> None:
        """Tell all ranks which of them have exited with status 0, so that the others stop waiting for these."""
        for rank in finished - self._announced:
            self._announced.add(rank)
            with contextlib.suppress(RuntimeError):
                self._rank_store.set(NUMBERED_EXIT.format(self._rank_store.add(EXIT_COUNT, 1)), str(rank))
