"""Rendezvous of a job's nodes at the store of its first node."""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from zerolite.launcher.job import NodeJob
from zerolite.utils.failure_record import EXIT_COUNT, NUMBERED_EXIT
from zerolite.utils.network import keep_store

CONNECT_TIMEOUT_S = 5.0
"""Seconds for which the first node is tried at a time."""

RETRY_S = 0.2

GRACE_S = 15.0
"""Seconds for which nodes that have met wait longer than those that cannot reach them, which know the reason."""


class NodeRendezvousError(RuntimeError):
    """The nodes of a job did not meet; the message names them and says what to do."""


class NodeRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, whose store listens on one address alone and outlives the ranks of all nodes."""

    def __init__(self, job: NodeJob) -> None:
        super().__init__(
            job.master_addr, job.master_port, job.node_rank, job.num_nodes, job.job_id, timeout=int(job.join_s)
        )
        self._job = job
        self._ranks_store: Any = None
        self._announced: set[int] = set()

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store and wait for all nodes. Raises NodeRendezvousError."""
        job = self._job
        self._ranks_store = open_store(job)
        store = PrefixStore("zerolite/nodes", self._ranks_store)
        self._await_nodes(store)
        info = RendezvousStoreInfo(job.master_addr, int(self._ranks_store.port))
        return RendezvousInfo(store, job.node_rank, job.num_nodes, info)

    def _await_nodes(self, store: PrefixStore) -> None:
        job = self._job
        keys = [f"came/{number}" for number in range(job.num_nodes)]
        wait_s = job.join_s + GRACE_S
        store.set(keys[job.node_rank], "")
        try:
            store.wait(keys, timedelta(seconds=wait_s))
        except RuntimeError as error:
            missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
            raise NodeRendezvousError(
                f"of {job.num_nodes} nodes, number {', '.join(missing)} did not come within {wait_s:.0f} s; see "
                "what these have printed"
            ) from error

    def announce(self, finished: Iterable[int]) -> None:
        """Tell all ranks which of them have exited with status 0, so that the others stop waiting for these."""
        for rank in set(finished) - self._announced:
            self._announced.add(rank)
            with contextlib.suppress(RuntimeError):
                self._ranks_store.set(NUMBERED_EXIT.format(self._ranks_store.add(EXIT_COUNT, 1)), str(rank))

    def leave(self) -> bool:
        """Return True if this node may leave after the success of its ranks: the first one leaves last."""
        if self._job.node_rank == 0:
            return int(self._ranks_store.add("zerolite/left", 0)) == self._job.num_nodes - 1
        self._ranks_store.add("zerolite/left", 1)
        return True


def open_store(job: NodeJob) -> TCPStore:
    """Host the store at a port of the first node, or connect to it from another one.

    Raises:
        NodeRendezvousError: the store cannot be hosted, or not be reached within the job's ``join_s``.
    """
    make = functools.partial(TCPStore, timeout=timedelta(seconds=job.join_s), wait_for_workers=False)
    address, port = job.master_addr, job.master_port
    if job.node_rank == 0:
        try:
            return keep_store(make, address, port, torch.__version__)
        except (RuntimeError, OSError) as error:
            raise NodeRendezvousError(
                f"the rendezvous store could not be started at {address}:{port}: {str(error).splitlines()[0]}. Choose "
                "another --master-port, and check that --master-addr is an address of the first host."
            ) from error
    deadline = time.monotonic() + job.join_s
    while True:
        try:
            socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
            return make(address, port, is_master=False)
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise NodeRendezvousError(
                    f"host {socket.gethostname()} cannot reach the first node's rendezvous store at {address}:{port} "
                    f"within {job.join_s:.0f} s ({getattr(error, 'strerror', None) or error}). Check the address "
                    "(--master-addr), and that no firewall closes the port (--master-port)."
                ) from error
        time.sleep(RETRY_S)
