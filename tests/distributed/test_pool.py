"""The worker pool itself: a failure must be told in full, and never spoil the next case."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.toolkit.pool import CaseFailed, CaseTimeout, Pool, WorkerDied

kept: list[object] = []


def sum_of_ranks(offset: int) -> dict[str, object]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return {"total": total, "rank": dist.get_rank(), "pid": os.getpid(), "threads": torch.get_num_threads()}


def raise_on(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        raise ValueError(f"planned failure on rank {dist.get_rank()}")


def raise_on_rank_0_while_others_wait() -> None:
    if dist.get_rank() == 0:
        raise ValueError("planned failure on rank 0")
    dist.barrier()


def wait_forever_on(rank: int) -> None:
    if dist.get_rank() == rank:
        a_wait_that_never_ends()


def a_wait_that_never_ends() -> None:
    threading.Event().wait()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_a_group() -> None:
    kept.append(dist.new_group([0, 1]))


def leave_a_collective_on_rank_0() -> None:
    if dist.get_rank() == 0:
        kept.append(dist.all_reduce(torch.zeros(5), async_op=True))


# ---------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


def test_results_come_in_rank_order_and_workers_persist(pool: Pool) -> None:
    first = pool.run(sum_of_ranks, {"offset": 10})
    second = pool.run(sum_of_ranks, {"offset": 10})
    assert [result["rank"] for result in first] == [0, 1]
    assert all(torch.equal(result["total"], torch.tensor([21.0])) for result in first)
    assert [result["pid"] for result in first] == [result["pid"] for result in second] == pool.pids
    assert [result["threads"] for result in first] == [1, 1]


# What is called, with what, for how long; the error, and what it says.
FAILURES: list[Any] = [
    (raise_on, {"ranks": [0, 1]}, 5, CaseFailed, ["failure on rank 0", "failure on rank 1", "in raise_on"]),
    (die_on, {"rank": 1}, 5, WorkerDied, ["rank 1 died: killed by SIGKILL", "last words"]),
    pytest.param(
        *(leave_a_group, {}, 5, CaseFailed, ["process groups besides the default one are still alive"]),
        marks=pytest.mark.slow,
    ),
    (leave_a_collective_on_rank_0, {}, 5, CaseFailed, ["leave_a_collective_on_rank_0"]),
    pytest.param(threading.Lock, {}, 5, CaseFailed, ["cannot be pickled"], marks=pytest.mark.slow),
    pytest.param(
        *(raise_on_rank_0_while_others_wait, {}, 300, CaseFailed),
        ["failure on rank 0", "rank 1 had not answered after the first failure", "in raise_on_rank_0_while"],
        marks=pytest.mark.slow,
    ),
    pytest.param(
        *(wait_forever_on, {"rank": 1}, 1, CaseTimeout),
        ["rank 1 had not answered after 1 s", "a_wait_that_never_ends"],
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("function", "arguments", "timeout", "error", "words"), FAILURES)
def test_a_failure_is_told_and_the_next_case_runs(
    pool: Pool, function: Any, arguments: dict[str, Any], timeout: float, error: type[Exception], words: list[str]
) -> None:
    """The next case runs at once, with other workers."""
    pool.run(sum_of_ranks, {"offset": 0})
    pids, start = pool.pids, time.monotonic()
    with pytest.raises(error) as caught:
        pool.run(function, arguments, timeout)
    assert time.monotonic() - start < 60
    assert all(word in str(caught.value) for word in words)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert [result["rank"] for result in pool.run(sum_of_ranks, {"offset": 0})] == [0, 1]
