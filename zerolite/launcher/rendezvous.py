"""Rendezvous of a job's nodes at the first node's store, and the board of failures in that store."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from zerolite.launcher.failures import Failure
from zerolite.launcher.job import NodeJob
from zerolite.utils import network
from zerolite.utils.network import keep_store

CONNECT_TIMEOUT_S = 5.0
"""Seconds for which each address of the first node is tried, in turn."""

POLL_INTERVAL_S = 0.2
"""Seconds between two looks of a node at the store."""

SILENCE_S = 20.0
"""A node without a sign of life for so many seconds is lost."""

LEAVE_S = 5.0
"""The first node keeps the store, so it waits up to so many seconds for the others before it exits."""

REACHED_KEY = "zerolite/reached"
"""Key with the first node's numeric address at which another node has reached it."""


class NodeRendezvousError(RuntimeError):
    """The nodes of a job did not meet; the message names them and says what to do."""


class NodeRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous that names the nodes which do not come.

    It also listens on one address alone, and tries several addresses of the first node.

    Attributes:
        store: this node's connection to the store.
        rank_store: the same of the store that the ranks of the current attempt use.
        address: address of the first node, as this node reaches it.
        attempt: number of the current attempt, 0 for the first; the same on all nodes.
        board: what the nodes of the current attempt tell each other; None until they have come.
    """

    def __init__(self, job: NodeJob, host: str) -> None:
        super().__init__(
            job.master_addr, job.master_port, job.node_rank, job.num_nodes, job.job_id, timeout=int(job.join_s)
        )
        self._job = job
        self._host = host
        self.store: Any = None
        self.rank_store: Any = None
        self.address = job.master_addr
        self.attempt = -1
        self.board: FailureBoard | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes have come to the next attempt.

        Raises:
            NodeRendezvousError: a node has not come, or two have the same number.
        """
        if self.store is None:
            self.store, self.address = open_store(self._job)
            if self._job.node_rank == 0:
                self.store.set("zerolite/run_id", self.run_id)
            self.run_id = self.store.get("zerolite/run_id").decode()
            self.rank_store = self.store
        self.attempt += 1
        self.board = None
        store = PrefixStore(f"zerolite/attempt_{self.attempt}", self.store)
        hosts = self._await_nodes(store)
        if self.attempt:
            self.rank_store = self._open_empty_store(store)
        self.board = FailureBoard(store, self._job.node_rank, hosts)
        store_info = RendezvousStoreInfo(self.address, int(self.rank_store.port))
        return RendezvousInfo(store, self._job.node_rank, len(hosts), store_info)

    def _await_nodes(self, store: PrefixStore) -> list[str]:
        """Wait for all nodes; return the names of their hosts."""
        job = self._job
        keys = [f"host/{number}" for number in range(job.num_nodes)]
        if store.add(f"came/{job.node_rank}", 1) > 1:
            raise NodeRendezvousError(
                f"two nodes were started as number {job.node_rank}: {store.get(keys[job.node_rank]).decode()} and "
                f"{self._host}. Give each node a --node-rank of its own, 0 for the one at --master-addr."
            )
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
        """Host another store on the first node, or connect to it: torch would read the old ranks' keys in theirs."""
        make = store_maker(self._job)
        if self._job.node_rank:
            return make(self.address, int(store.get("port")), is_master=False)
        empty = keep_store(make, self.address, 0, torch.__version__)
        store.set("port", str(empty.port))
        return empty


class FailureBoard:
    """Failures, successes and signs of life of one attempt's nodes, in the store.

    A request waits for ever if the first node's host is cut off. So only the agent's main thread makes requests, and
    another one watches :attr:`silence_s`.

    Attributes:
        hosts: host names by number of the node.
        failures: failures that other nodes have posted.
        disconnected: the connection to the store is broken.
        all_succeeded: the ranks of all nodes have succeeded.
    """

    def __init__(self, store: PrefixStore, node: int, hosts: Sequence[str]) -> None:
        self._store = store
        self._node = node
        self.hosts = list(hosts)
        self.failures: list[Failure] = []
        self.disconnected = False
        self.all_succeeded = False
        self._succeeded = False
        self._posts_read = 0
        self._asked_at: float | None = None
        self._next_poll = 0.0
        self._beats: dict[int, tuple[int, float]] = {}
        self._lost: set[int] = set()

    @property
    def silence_s(self) -> float:
        """Seconds for which the store has not answered a request of :meth:`poll`."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def post(self, failures: Sequence[Failure], node: int | None = None) -> None:
        """Post failures of ``node`` (default: this one) for the other nodes."""
        text = json.dumps([self._node if node is None else node, [failure.to_json() for failure in failures]])
        with contextlib.suppress(RuntimeError):
            self._store.set(f"post/{self._store.add('posts', 1)}", text)

    def poll(self, at_once: bool = False) -> None:
        """Give a sign of life, and read what the other nodes have posted: now, or when the interval is over."""
        now = time.monotonic()
        if self.disconnected or (now < self._next_poll and not at_once):
            return
        self._next_poll, self._asked_at = now + POLL_INTERVAL_S, now
        try:
            self._store.add(f"beats/{self._node}", 1)
            while self._posts_read < self._store.add("posts", 0):
                self._posts_read += 1
                node, posted = json.loads(self._store.get(f"post/{self._posts_read}"))
                if node != self._node:
                    self.failures += map(Failure.from_json, posted)
            self.all_succeeded = self._store.add("succeeded", 0) >= len(self.hosts)
            if self._node == 0:
                self._find_lost_nodes(now)
        except RuntimeError:
            self.disconnect()
        self._asked_at = None

    def disconnect(self) -> None:
        """Take the connection to the store for broken, so that nothing is read or posted any more."""
        self.disconnected = True

    def note_success(self) -> None:
        """Post that this node's ranks have succeeded."""
        if not self._succeeded:
            self._succeeded = True
            with contextlib.suppress(RuntimeError):
                self._store.add("succeeded", 1)
            self.poll(at_once=True)

    def leave(self) -> None:
        """Leave the job. The first node, which keeps the store, waits for the others and then knows their failures."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._node}", "")
            if self._node == 0:
                with contextlib.suppress(RuntimeError):  # a node is lost
                    self._store.wait([f"left/{node}" for node in range(len(self.hosts))], timedelta(seconds=LEAVE_S))
                self.poll(at_once=True)

    def _find_lost_nodes(self, now: float) -> None:
        for node, host in enumerate(self.hosts):
            beats = self._store.add(f"beats/{node}", 0)
            known, since = self._beats.setdefault(node, (beats, now))
            if beats != known:
                self._beats[node] = (beats, now)
            elif now - since > SILENCE_S and node not in self._lost:
                self._lost.add(node)
                sentence = (
                    f"host {host} gave no sign of life for {SILENCE_S:.0f} s: its agent has ended, the machine is "
                    "down, or the network to it is broken"
                )
                self.post([Failure(host=host, seen=time.time() - SILENCE_S, node_failure=sentence)], node)


def store_maker(job: NodeJob) -> Callable[..., TCPStore]:
    return functools.partial(TCPStore, timeout=timedelta(seconds=job.join_s), wait_for_workers=False)


def open_store(job: NodeJob) -> tuple[Any, str]:
    """Host the job's store on the first node, or connect to it from another one.

    Returns:
        The store, and the first node's address.

    Raises:
        NodeRendezvousError: the store cannot be hosted or reached.
    """
    make = store_maker(job)
    if job.node_rank:
        address, reached = find_first_node(job)
        store = make(address, job.master_port, is_master=False)
        store.set(REACHED_KEY, reached)
        return store, address
    address = next(filter(network.resolve, (job.master_addr, *job.other_addresses)), job.master_addr)
    try:
        return keep_store(make, address, job.master_port, torch.__version__), address
    except (RuntimeError, OSError) as error:
        raise NodeRendezvousError(
            f"the rendezvous store could not be started at {_endpoint(address, job.master_port)}: "
            f"{str(error).splitlines()[0]}. Choose another --master-port, and check that --master-addr is an address "
            "of this machine."
        ) from error


def find_first_node(job: NodeJob) -> tuple[str, str]:
    """Find an address at which the first node's store can be reached.

    Returns:
        The address as given, and in numbers.

    Raises:
        NodeRendezvousError: no address works within the job's ``join_s``.
    """
    deadline = time.monotonic() + job.join_s
    while True:
        tried = []
        for address in (job.master_addr, *job.other_addresses):
            try:
                with socket.create_connection((address, job.master_port), timeout=CONNECT_TIMEOUT_S) as connection:
                    return address, str(connection.getpeername()[0])
            except (OSError, UnicodeError) as error:
                tried.append(f"{_endpoint(address, job.master_port)}: {getattr(error, 'strerror', None) or error}")
        if time.monotonic() > deadline:
            raise NodeRendezvousError(
                f"host {socket.gethostname()} cannot reach the first node's rendezvous store within {job.join_s:.0f} "
                f"s ({'; '.join(tried)}). Check that the first node's command runs, the address (--master-addr) and "
                "port (--master-port), and that no firewall closes the port."
            )
        time.sleep(POLL_INTERVAL_S)


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
