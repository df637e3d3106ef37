"""Failures, heartbeats and successes that the nodes of a job share through the first node's store."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence

from torch.distributed import PrefixStore, TCPStore

from zerolite.launcher.failures import Failure

POLL_INTERVAL_S = 0.2
"""Seconds between two looks of a node at the store."""

HEARTBEAT_TIMEOUT_S = 20.0
"""A node without a heartbeat for so many seconds is lost."""

EXIT_BARRIER_S = 5.0
"""The first node hosts the store, so it waits up to so many seconds for the others before it exits."""

_JOIN_THREAD_S = 2.0


class FailureStore:
    """Failures of one attempt, shared by all nodes. A thread polls the store until :meth:`close`.

    Args:
        store: a connection to the first node's store for this object alone. A TCPStore serves one call at a time, so a
            call that blocks would block every other user.
        attempt: number of the attempt; nodes of different attempts do not see each other's posts.
        node: this node's number.
        hosts: the nodes' host names, by number.
        restart_requests: key of the store that counts the nodes that ask for a restart of all.

    Attributes:
        disconnected: the connection to the store is broken.
        all_succeeded: the ranks of all nodes have succeeded.
        nodes_waiting: number of nodes that ask for a restart of all.
    """

    def __init__(self, store: TCPStore, attempt: int, node: int, hosts: Sequence[str], restart_requests: str) -> None:
        self._root = store
        self._restart_requests = restart_requests
        self._store = PrefixStore(f"zerolite/failures_{attempt}", store)
        self._node = node
        self._hosts = list(hosts)
        self._last_seen = time.monotonic()
        self._posts: dict[int, list[Failure]] = {}
        self._read = 0
        self._heartbeats: dict[int, tuple[int, float]] = {}
        self.disconnected = False
        self.all_succeeded = False
        self.nodes_waiting = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="zerolite failure store", daemon=True)
        self._thread.start()

    @property
    def silence_s(self) -> float:
        """Seconds since the store's last answer; 0 once the thread has ended."""
        return time.monotonic() - self._last_seen if self._thread.is_alive() else 0.0

    @property
    def failures(self) -> list[Failure]:
        """Failures that the other nodes have posted so far."""
        return [failure for posted in list(self._posts.values()) for failure in posted]

    @property
    def lost_hosts(self) -> list[str]:
        """Hosts of the nodes without a heartbeat for :data:`HEARTBEAT_TIMEOUT_S`."""
        return [self._hosts[node] for node, posted in list(self._posts.items()) if any(f.node_failure for f in posted)]

    def post(self, failures: Sequence[Failure], node: int | None = None) -> None:
        """Post failures of ``node`` (default: this one) for the other nodes."""
        text = json.dumps([self._node if node is None else node, [failure.to_json() for failure in failures]])
        with contextlib.suppress(RuntimeError):
            self._store.set(f"post/{self._store.add('posts', 1)}", text)

    def note_success(self) -> None:
        """Post that this node's ranks have succeeded."""
        with contextlib.suppress(RuntimeError):
            self._store.add("succeeded", 1)

    def exit_barrier(self) -> None:
        """Post that this node's ranks have ended. The first node then waits for the others, but not for lost ones."""
        self.close()
        with contextlib.suppress(RuntimeError):
            self._store.add("left", 1)
            deadline = time.monotonic() + EXIT_BARRIER_S
            while self._node == 0 and time.monotonic() < deadline:
                if self._store.add("left", 0) + len(self.lost_hosts) >= len(self._hosts):
                    return
                time.sleep(POLL_INTERVAL_S / 4)

    def close(self) -> None:
        """End the thread.

        A request that returns while the interpreter shuts down would abort the process. So this waits for the request
        under way, but not longer than :data:`_JOIN_THREAD_S`: the store may never answer.
        """
        self._closed.set()
        self._thread.join(_JOIN_THREAD_S)

    def _poll(self) -> None:
        next_heartbeat = 0.0
        while not self._closed.wait(POLL_INTERVAL_S):
            try:
                if time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + 1.0
                    self._store.add(f"heartbeat/{self._node}", 1)
                    if self._node == 0:
                        self._find_lost_nodes()
                self._read_posts()
                self.all_succeeded = self._store.add("succeeded", 0) >= len(self._hosts)
                self.nodes_waiting = self._root.add(self._restart_requests, 0)
                self._last_seen = time.monotonic()
            except RuntimeError:
                self.disconnected = not self._closed.is_set()
                return

    def _read_posts(self) -> None:
        while self._read < self._store.add("posts", 0):
            self._read += 1
            node, posted = json.loads(self._store.get(f"post/{self._read}"))
            if node != self._node:
                self._posts[node] = [Failure.from_json(one) for one in posted]

    def _find_lost_nodes(self) -> None:
        now = time.monotonic()
        for node in range(1, len(self._hosts)):
            beats = self._store.add(f"heartbeat/{node}", 0)
            known, since = self._heartbeats.setdefault(node, (beats, now))
            if beats != known:
                self._heartbeats[node] = (beats, now)
            elif now - since > HEARTBEAT_TIMEOUT_S and node not in self._posts:
                sentence = (
                    f"host {self._hosts[node]} gave no sign of life for {HEARTBEAT_TIMEOUT_S:.0f} s: its agent has "
                    "ended, the machine is down, or the network to it is broken"
                )
                self._posts[node] = [
                    Failure(host=self._hosts[node], seen=time.time() - HEARTBEAT_TIMEOUT_S, node_failure=sentence)
                ]
                self.post(self._posts[node], node)
