"""Rendezvous of a job's nodes over one store, which the first node's agent hosts."""

from __future__ import annotations

import functools
import json
import socket
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from zerolite.launcher.failure_store import FailureStore
from zerolite.launcher.job import NodeJob
from zerolite.utils import network
from zerolite.utils.listening import keep_store

LAST_CALL_S = 10
"""Once the fewest nodes have come, an elastic job waits so many seconds for more."""

CONNECT_TIMEOUT_S = 5.0
"""Seconds for which each address of the first node is tried, in turn."""

_POLL_INTERVAL_S = 0.1

FIRST_NODE_ADDRESS_KEY = "zerolite/reached"
"""Key with the first node's numeric address at which another node has reached it."""

_RESTART_REQUESTS_KEY = "zerolite/again/{}"
"""Key that counts the nodes that ask for a restart after an attempt: they have failed, or came too late for it."""


class NodeRendezvousError(RuntimeError):
    """The nodes of a job did not meet; the message names them and says what to do."""


class NodeRendezvous(RendezvousHandler):
    """Rendezvous of the agents before each attempt. The first node decides which nodes take part.

    All nodes take part, or in an elastic job those that come in time. A node that comes later asks the others to start
    again with it.

    Attributes:
        store: this agent's connection to the rendezvous store.
        address: address of the first node, as this node reaches it.
        rank_store: connection to the store that the ranks of the current attempt use.
        attempt: number of the current attempt, 0 for the first; the same on all nodes.
        restarts: number of attempts that followed a failure.
        node: this node's number in the current attempt.
        hosts: host names of the current attempt's nodes, by number.
        failure_store: failures of the current attempt; None if the job has one node.
    """

    def __init__(self, job: NodeJob, host: str) -> None:
        self._job = job
        self._host = host
        self.store, self.address = open_store(job)
        self.rank_store = self.store
        self._run_id: str = self.store.get("zerolite/run_id").decode()
        self.attempt = -1
        self.restarts = 0
        self._job_node = job.node_rank
        self.node = self._job_node
        self.hosts: list[str] = []
        self.failure_store: FailureStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks use a store that the first node's agent hosts, so that it outlives them."""
        return True

    def get_backend(self) -> str:
        return "zerolite"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the nodes of the next attempt are there.

        Raises:
            NodeRendezvousError: nodes have not come; the message names them.
        """
        if self.failure_store is not None:
            self.failure_store.close()
            self.failure_store = None
        self.attempt += 1
        if self.attempt == 0 and self._job_node:
            self._find_current_attempt()
        while True:
            store = PrefixStore(f"zerolite/attempt_{self.attempt}", self.store)
            nodes, self.restarts, port = self._join_attempt(store)
            if self._job_node in nodes:
                break
            self._request_restart()
        self.node = nodes.index(self._job_node)
        self.hosts = [store.get(f"host/{number}").decode() for number in nodes]
        if self.attempt and self._job_node:
            self.rank_store = connect_to_store(self.address, port)
        if len(nodes) > 1:
            own = connect_to_store(self.address, int(self.store.port))
            self.failure_store = FailureStore(
                own, self.attempt, self.node, self.hosts, _RESTART_REQUESTS_KEY.format(self.attempt)
            )
        return RendezvousInfo(store, self.node, len(nodes), RendezvousStoreInfo(self.address, port))

    def _find_current_attempt(self) -> None:
        """Find the attempt that begins next: this node may have come later than the others."""
        self.attempt = int(self.store.get("zerolite/attempt"))
        if not self.store.check([f"zerolite/attempt_{self.attempt}/start"]):
            return
        if not self._job.is_elastic:
            raise NodeRendezvousError(
                f"the job has begun already: another node was started as number {self._job_node}. Give each node a "
                "--node-rank of its own, 0 for the one at --master-addr."
            )
        self._request_restart()

    def _request_restart(self) -> None:
        """Ask the others, whose attempt runs without this node, to start again with it."""
        self.store.add(_RESTART_REQUESTS_KEY.format(self.attempt), 1)
        self.attempt += 1

    def _join_attempt(self, store: PrefixStore) -> tuple[list[int], int, int]:
        """Join an attempt and wait for its start.

        Returns:
            Numbers of the nodes that take part, number of attempts that have failed before, port of the ranks' store.
        """
        if store.add(f"came/{self._job_node}", 1) > 1:
            other = store.get(f"host/{self._job_node}").decode()
            raise NodeRendezvousError(
                f"two nodes were started as number {self._job_node}: {other} and {self._host}. Give each node a "
                "--node-rank of its own, 0 for the one at --master-addr."
            )
        store.set(f"host/{self._job_node}", self._host)
        store.add("count", 1)
        if self._job_node == 0:
            nodes = self._choose_nodes(store)
            # A store that ranks have used has their old keys, so restarted ranks get an empty one.
            if self.attempt:
                self.rank_store = _host_store(self._job, self.address, 0)
            restarts = self.store.add("zerolite/restarts", 0)
            store.set("start", json.dumps([nodes, restarts, int(self.rank_store.port)]))
        while not store.check(["start"]):
            time.sleep(_POLL_INTERVAL_S)
        nodes, restarts, port = json.loads(store.get("start"))
        return nodes, restarts, port

    def _choose_nodes(self, store: PrefixStore) -> list[int]:
        """Wait for the other nodes and return the numbers of those that have come. Called on the first node."""
        job = self._job
        self.store.set("zerolite/attempt", str(self.attempt))
        began = time.monotonic()
        last_call = float("inf")
        while (count := store.add("count", 0)) < job.max_nodes and time.monotonic() < last_call:
            if count >= job.min_nodes:
                last_call = min(last_call, time.monotonic() + LAST_CALL_S)
            elif time.monotonic() - began > job.join_s:
                # Names from the attempt before this one, where all nodes were in it.
                before = dict(enumerate(self.hosts))
                missing = [
                    f"{number} ({before[number]})" if number in before else str(number)
                    for number in range(job.max_nodes)
                    if not store.check([f"host/{number}"])
                ]
                raise NodeRendezvousError(
                    f"of {job.min_nodes} nodes, number {', '.join(missing)} did not come within {job.join_s:.0f} s. "
                    "Start `zerolite` on every node with the same --num-nodes, --master-addr and --master-port."
                )
            time.sleep(_POLL_INTERVAL_S)
        return [number for number in range(job.max_nodes) if store.check([f"host/{number}"])]

    def note_failure(self, why: str) -> None:
        """Note why the current attempt fails. It counts as one failure, however many nodes note one."""
        if self.store.add(f"zerolite/failed_in/{self.attempt}", 1) == 1:
            self.store.set(f"zerolite/why/{self.attempt}", why)
            self.store.add("zerolite/restarts", 1)
        self.store.add(_RESTART_REQUESTS_KEY.format(self.attempt), 1)

    def last_failure(self) -> str:
        """Return the reason for which the attempt before this one failed; "" if it did not fail."""
        key = f"zerolite/why/{self.attempt - 1}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that ask for a restart. The elastic agent restarts the ranks if it is above 0."""
        return 0 if self.failure_store is None else self.failure_store.nodes_waiting

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: when the job ends its store ends too, so that no node can come later."""

    def shutdown(self) -> bool:
        return True


def open_store(job: NodeJob) -> tuple[Any, str]:
    """Host the job's store on the first node, or connect to it from another one.

    Returns:
        The store, and the first node's address.

    Raises:
        NodeRendezvousError: the store cannot be hosted or reached.
    """
    if job.node_rank:
        address, found = find_first_node(job)
        store = connect_to_store(address, job.master_port, job.join_s)
        store.set(FIRST_NODE_ADDRESS_KEY, found)
        return store, address
    address = next(filter(network.resolve, (job.master_addr, *job.other_addresses)), job.master_addr)
    try:
        store = _host_store(job, address, job.master_port)
    except (RuntimeError, OSError) as error:
        raise NodeRendezvousError(
            f"the rendezvous store could not be started at {_endpoint(address, job.master_port)}: "
            f"{str(error).splitlines()[0]}. Choose another --master-port, and check that --master-addr is an address "
            "of this machine."
        ) from error
    store.set("zerolite/run_id", job.job_id)
    return store, address


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
                f"host {host_name()} cannot reach the first node's rendezvous store within {job.join_s:.0f} s "
                f"({'; '.join(tried)}). Check that the first node's command runs, the address (--master-addr) and port "
                "(--master-port), and that no firewall closes the port."
            )
        time.sleep(_POLL_INTERVAL_S)


def connect_to_store(address: str, port: int, timeout_s: float = 10.0) -> TCPStore:
    """Connect to a store of the first node. Raises RuntimeError if it does not answer."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def _host_store(job: NodeJob, address: str, port: int) -> TCPStore:
    make = functools.partial(TCPStore, timeout=timedelta(seconds=job.join_s), wait_for_workers=False)
    return keep_store(make, address, port, torch.__version__)


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def host_name() -> str:
    """Return the name of this host in messages."""
    return socket.gethostname()
