"""Requests with which many ranks, and the nodes of a job, wait for each other at one store."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.cli.helpers import free_port
from zerolite.comm import store
from zerolite.comm.rendezvous import first_barrier
from zerolite.launcher.job import NodeJob
from zerolite.launcher.rendezvous import NodeRendezvous, NodeRendezvousError


class SilentStore(dist.Store):
    """A store whose host is cut off before the others come."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()  # a request that came back while the interpreter ends would abort the process

    def add(self, key: str, amount: int) -> int:
        return amount

    def set(self, key: str, value: Any) -> None:
        pass

    def compare_set(self, key: str, expected: Any, value: Any) -> Any:
        return value

    def check(self, keys: list[str]) -> bool:
        self.over.wait(60.0)
        return False


def test_a_store_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SILENT_S", 0.2)
    silent, began = SilentStore(), time.monotonic()
    with pytest.raises(RuntimeError, match="init_distributed: rank 0 .*store of the rendezvous has not answered"):
        first_barrier(silent, 0, 2, 60.0)
    assert time.monotonic() - began < 4.0
    silent.over.set()
    for thread in threading.enumerate():
        if thread.name == "zerolite store":
            thread.join(10.0)


# -------------------------------------------------------------------- nodes


@pytest.fixture
def nodes() -> list[NodeJob]:
    job = NodeJob(["t.py"], job_id="abc", num_nodes=3, master_port=free_port(), join_s=10.0)
    return [dataclasses.replace(job, node_rank=number) for number in range(3)]


def join(job: NodeJob) -> NodeRendezvous:
    rendezvous = NodeRendezvous(job)
    rendezvous.next_rendezvous()
    return rendezvous


def test_nodes_that_do_not_join(nodes: list[NodeJob], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerolite.launcher.rendezvous.GRACE_S", 0.0)
    with pytest.raises(NodeRendezvousError, match=r"of 3 nodes, number 1, 2 did not come within 0 s; see what"):
        join(dataclasses.replace(nodes[0], join_s=0.3))


def test_the_first_node_is_not_reached(nodes: list[NodeJob]) -> None:
    job = dataclasses.replace(nodes[1], join_s=0.5)
    words = r"cannot reach the first .* at 127\.0\.0\.1:\d+ within 0 s \(Connection refused\)"
    with pytest.raises(NodeRendezvousError, match=words):
        join(job)
