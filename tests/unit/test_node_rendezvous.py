"""The nodes' rendezvous: all come, in the order of their numbers, or a sentence names who does not."""

from __future__ import annotations

import dataclasses
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cli.helpers import free_port
from zerolite.launcher.job import NodeJob
from zerolite.launcher.rendezvous import NodeRendezvous, NodeRendezvousError


@pytest.fixture
def nodes() -> list[NodeJob]:
    job = NodeJob(["t.py"], job_id="abc", num_nodes=3, master_port=free_port(), join_s=10.0)
    return [dataclasses.replace(job, node_rank=number) for number in range(3)]


@pytest.fixture
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4)


def come(job: NodeJob, name: str = "") -> NodeRendezvous:
    found = NodeRendezvous(job, name or f"host{job.node_rank}")
    found.next_rendezvous()
    return found


def test_two_nodes_with_one_number(nodes: list[NodeJob], threads: ThreadPoolExecutor) -> None:
    first = threads.submit(come, nodes[0])
    both = {threads.submit(come, nodes[1], name) for name in ("one", "other")}
    (refused,), (waiting,) = futures.wait(both, 30, futures.FIRST_COMPLETED)
    assert "two nodes were started as number 1: " in str(refused.exception())
    come(nodes[2])
    assert first.result(30).board.hosts == waiting.result(30).board.hosts
    assert first.result(30).get_run_id() == waiting.result(30).get_run_id() == "abc"


def test_nodes_that_do_not_come(nodes: list[NodeJob]) -> None:
    words = r"of 3 nodes, number 1, 2 did not come within 0 s\. Start `zerolite` on"
    with pytest.raises(NodeRendezvousError, match=words):
        come(dataclasses.replace(nodes[0], join_s=0.3))


def test_the_first_node_is_not_reached(nodes: list[NodeJob]) -> None:
    job = dataclasses.replace(nodes[1], master_addr="127.0.0.1", other_addresses=["127.0.0.2"], join_s=0.5)
    words = r"cannot reach .*127\.0\.0\.1:\d+: Connection refused; 127\.0\.0\.2:"
    with pytest.raises(NodeRendezvousError, match=words):
        come(job)
