"""Rendezvous of a job's nodes over one store, hosted by the first node's agent."""

from __future__ import annotations

import functools
import io
import json
import pickle
import socket
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from zerolite.launcher.job import NodeJob
from zerolite.utils.listening import keep_store

JOIN_S = 300
"""Seconds in which all nodes must have come."""

LAST_CALL_S = 10
"""Seconds for which an elastic job waits for further nodes when the fewest are there."""

_UNNUMBERED = 1 << 30


class MeetingError(RuntimeError):
    """The nodes of a job did not come together; the message says which, and what to do."""


class _StateReader(pickle.Unpickler):
    """Unpickler of the state of torch's rendezvous, which torch keeps in the store by pickle, and of nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STATE_CLASSES:
            return super().find_class(module, name)
        raise MeetingError(
            f"the rendezvous store holds something that no agent has written there: its state names '{module}.{name}'. "
            "Another program writes to the store: let only the hosts of the job reach its port (--master-port)."
        )


_STATE_CLASSES = {
    (dynamic_rendezvous.__name__, "_RendezvousState"),
    (dynamic_rendezvous.__name__, "_NodeDesc"),
    *(("datetime", name) for name in ("datetime", "timedelta", "timezone")),
}


class _CheckedBackend(C10dRendezvousBackend):
    """Hands on a state to be unpickled only if it holds what a state may hold: the store takes what anybody writes."""

    def get_state(self) -> Any:
        return self._checked(super().get_state())

    def set_state(self, state: bytes, token: Any = None) -> Any:
        return self._checked(super().set_state(state, token))

    def _checked(self, found: Any) -> Any:
        if found is not None:
            _StateReader(io.BytesIO(found[0])).load()
        return found


class Meeting(RendezvousHandler):
    """The rendezvous of the agents: of a fixed set of nodes, or torch's dynamic one where nodes may come and go.

    A node's number in the job follows its `node_rank`; where that is None, the order of torch's rendezvous.

    Attributes:
        store: this agent's connection to the store.
        rank_store: the same to the store of the current attempt's ranks.
        attempt: number of this start of the ranks, 0 for the first; the same on all nodes.
        restarts: how many of them followed a failure.
        node: this node's number in the current attempt.
        hosts: the host names of the current attempt's nodes, by number.
    """

    def __init__(self, job: NodeJob, host: str) -> None:
        self._job = job
        self._host = host
        self.store = connect(job)
        self.rank_store = self.store
        self._run_id: str = self.store.get("zerolite/run_id").decode()
        self.attempt = -1
        self.restarts = 0
        self.node = job.node_rank or 0
        self.hosts: list[str] = []
        self._dynamic = self._make_dynamic() if is_dynamic(job) else None

    def _make_dynamic(self) -> DynamicRendezvousHandler:
        backend = _CheckedBackend(self.store, self._run_id)
        timeout = RendezvousTimeout(join=timedelta(seconds=JOIN_S), last_call=timedelta(seconds=LAST_CALL_S))
        job = self._job
        handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            self._run_id, self.store, backend, job.min_nodes, job.max_nodes, timeout=timeout
        )
        return handler

    @property
    def port(self) -> int:
        """The store's TCP port."""
        return int(self.store.port)

    @property
    def use_agent_store(self) -> bool:
        """The ranks use a store of the first node's agent."""
        return True

    def get_backend(self) -> str:
        return "zerolite"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the nodes of the next attempt are there. Raises MeetingError naming those that do not come."""
        if self._dynamic is None:
            place, nodes = self._job.node_rank or 0, self._job.max_nodes
            self.attempt += 1
            round_store = PrefixStore(f"zerolite/round_{self.attempt}", self.store)
        else:
            info = self._join()
            place, nodes, round_store = info.rank, info.world_size, PrefixStore("zerolite", info.store)
        self._introduce(round_store, place, nodes)
        address = RendezvousStoreInfo(self._job.master_addr, self._agree_on_port(round_store))
        return RendezvousInfo(round_store, self.node, nodes, address)

    def _join(self) -> RendezvousInfo:
        assert self._dynamic is not None
        try:
            return self._dynamic.next_rendezvous()
        except RendezvousTimeoutError as error:
            raise MeetingError(
                f"fewer than {self._job.min_nodes} nodes came within {JOIN_S} s, the fewest that --num-nodes allows"
            ) from error

    def _introduce(self, store: PrefixStore, place: int, nodes: int) -> None:
        """Learn who the nodes are, and agree on their order and on the number of the attempt."""
        number = _UNNUMBERED if self._job.node_rank is None else self._job.node_rank
        if store.add(f"came/{place}", 1) > 1:
            other = json.loads(store.get(f"node/{place}"))[1]
            raise MeetingError(
                f"two nodes were started as number {place}: {other} and {self._host}. Give each node a --node-rank of "
                "its own, 0 for the one at --master-addr."
            )
        store.set(f"node/{place}", json.dumps([number, self._host]))
        self._wait_for_all(store, nodes)
        found = [json.loads(store.get(f"node/{other}")) for other in range(nodes)]
        order = sorted(range(nodes), key=lambda other: (found[other][0], other))
        self.node = order.index(place)
        self.hosts = [found[other][1] for other in order]
        if self._dynamic is not None:
            if place == 0:
                numbers = [self.store.add("zerolite/attempts", 1) - 1, self.store.add("zerolite/restarts", 0)]
                store.set("attempt", json.dumps(numbers))
            self.attempt, self.restarts = json.loads(store.get("attempt"))

    def _agree_on_port(self, store: PrefixStore) -> int:
        """The port of the ranks' store, which the first node hosts. When they start again they need an empty one."""
        if hosts_store(self._job):
            if self.attempt:
                self.rank_store = _keep_store(self._job, 0)
            store.set("port", str(self.rank_store.port))
        elif self.attempt:
            port = int(store.get("port"))
            self.rank_store = TCPStore(self._job.master_addr, port, is_master=False, wait_for_workers=False)
        return int(store.get("port"))

    def _wait_for_all(self, store: PrefixStore, nodes: int) -> None:
        deadline = time.monotonic() + JOIN_S
        while not store.check([f"node/{other}" for other in range(nodes)]):
            if time.monotonic() > deadline:
                missing = [str(other) for other in range(nodes) if not store.check([f"node/{other}"])]
                raise MeetingError(
                    f"of {nodes} nodes, number {', '.join(missing)} did not come within {JOIN_S} s. Start `zerolite` "
                    "on every node with the same --num-nodes, --master-addr and --master-port."
                )
            time.sleep(0.1)

    def note_failure(self, why: str) -> None:
        """Say why the current attempt ends; counted once, whichever nodes say it."""
        if self.store.add(f"zerolite/failed_in/{self.attempt}", 1) == 1:
            self.store.set(f"zerolite/why/{self.attempt}", why)
            self.restarts = self.store.add("zerolite/restarts", 1)

    def why_last_failed(self) -> str:
        """Why the attempt before this one ended; "" if no failure ended it."""
        key = f"zerolite/why/{self.attempt - 1}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def is_closed(self) -> bool:
        return self._dynamic is not None and bool(self._dynamic.is_closed())

    def set_closed(self) -> None:
        if self._dynamic is not None:
            self._dynamic.set_closed()

    def num_nodes_waiting(self) -> int:
        """Nodes that want to come in, in a job that allows them."""
        return 0 if self._dynamic is None else int(self._dynamic.num_nodes_waiting())

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True if self._dynamic is None else bool(self._dynamic.shutdown())


def connect(job: NodeJob) -> TCPStore:
    """The job's store, which the first node hosts. Raises MeetingError if it cannot be made or reached."""
    hosts = hosts_store(job)
    host = f"[{job.master_addr}]" if ":" in job.master_addr else job.master_addr
    address = f"{host}:{job.master_port}"
    try:
        timeout = timedelta(seconds=JOIN_S)
        if hosts:
            store = _keep_store(job, job.master_port, timeout)
            store.set("zerolite/run_id", job.job_id)
        else:
            store = TCPStore(job.master_addr, job.master_port, timeout=timeout, wait_for_workers=False)
            store.get("zerolite/run_id")
    except (RuntimeError, OSError) as error:
        problem = str(error).splitlines()[0]
        if hosts:
            raise MeetingError(
                f"the rendezvous store could not be started at {address}: {problem}. Choose another --master-port, and "
                "check that --master-addr is an address of this machine."
            ) from error
        raise MeetingError(
            f"the rendezvous store of the first node did not answer at {address} within {JOIN_S} s: {problem}. Check "
            "that the first node's command runs, the address and port, and that no firewall closes the port."
        ) from error
    return store


def _keep_store(job: NodeJob, port: int, timeout: timedelta = timedelta(seconds=JOIN_S)) -> TCPStore:
    make = functools.partial(TCPStore, timeout=timeout, wait_for_workers=False)
    if job.several_addresses:
        return make(job.master_addr, port, is_master=True)
    return keep_store(make, job.master_addr, port, torch.__version__)


def hosts_store(job: NodeJob) -> bool:
    """True if this node is the first, whose agent hosts the store."""
    return job.max_nodes == 1 or job.node_rank == 0


def is_dynamic(job: NodeJob) -> bool:
    """True if the set of nodes may change from attempt to attempt, or several nodes start again together."""
    return job.max_nodes > 1 and (job.min_nodes < job.max_nodes or job.max_restarts > 0)


def host_name() -> str:
    """Return the name of this node in messages."""
    return socket.gethostname()
