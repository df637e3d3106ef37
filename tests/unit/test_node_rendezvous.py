"""The agents' rendezvous: who takes part in an attempt, in which order, and how a node comes later."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cli.helpers import free_port
from zerolite.launcher import node_rendezvous
from zerolite.launcher.job import NodeJob
from zerolite.launcher.node_rendezvous import NodeRendezvous, NodeRendezvousError


@pytest.fixture
def nodes() -> list[NodeJob]:
    job = NodeJob(["t.py"], job_id="abc", min_nodes=3, max_nodes=3, master_port=free_port(), join_s=10.0)
    return [dataclasses.replace(job, node_rank=number) for number in range(3)]


@pytest.fixture
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4)


RENDEZVOUS: list[NodeRendezvous] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    while RENDEZVOUS:
        RENDEZVOUS.pop().failure_store.close()


def come(job: NodeJob, name: str = "") -> NodeRendezvous:
    found = NodeRendezvous(job, name or f"host{job.node_rank}")
    found.next_rendezvous()
    RENDEZVOUS.append(found)
    return found


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_nodes_with_one_number(nodes: list[NodeJob], threads: ThreadPoolExecutor) -> None:
    store, _ = node_rendezvous.open_store(nodes[0])
    store.set("zerolite/attempt", "0")
    both = {threads.submit(come, nodes[1], name) for name in ("one", "other")}
    (refused,), (waiting,) = futures.wait(both, 30, futures.FIRST_COMPLETED)
    assert "two nodes were started as number 1: " in str(refused.exception())
    store.set("zerolite/attempt_0/host/0", "host0")
    store.set("zerolite/attempt_0/start", json.dumps([[0, 1], 0, store.port]))
    assert waiting.result(30).node == 1


def test_nodes_that_do_not_come(nodes: list[NodeJob]) -> None:
    words = r"of 3 nodes, number 1, 2 did not come within 0 s\. Start `zerolite` on"
    with pytest.raises(NodeRendezvousError, match=words):
        come(dataclasses.replace(nodes[0], join_s=0.3))


def test_an_elastic_job_takes_who_comes_later(
    nodes: list[NodeJob], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_rendezvous, "LAST_CALL_S", 1.0)
    jobs = [dataclasses.replace(job, min_nodes=2) for job in nodes]
    first, last = (future.result(30) for future in [threads.submit(come, job) for job in (jobs[0], jobs[2])])
    assert first.hosts == last.hosts == ["host0", "host2"] and last.node == 1
    late = threads.submit(come, jobs[1])
    wait_until(lambda: first.num_nodes_waiting() and last.num_nodes_waiting())
    for future in [threads.submit(one.next_rendezvous) for one in (first, last)]:
        future.result(30)
    found = late.result(30)
    assert first.hosts == ["host0", "host1", "host2"] and (found.node, found.attempt, found.restarts) == (1, 1, 0)


def test_the_first_node_is_not_reached(nodes: list[NodeJob]) -> None:
    job = dataclasses.replace(nodes[1], master_addr="127.0.0.1", other_addresses=["127.0.0.2"], join_s=0.5)
    words = r"cannot reach .*127\.0\.0\.1:\d+: Connection refused; 127\.0\.0\.2:"
    with pytest.raises(NodeRendezvousError, match=words):
        NodeRendezvous(job, "host1")
