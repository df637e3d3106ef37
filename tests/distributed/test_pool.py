"""The worker pool itself: a failure must be told in full, and never spoil the next case."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from tests.toolkit.pool import ROOT, CaseFailed, CaseTimeout, Pool, WorkerDied

CASES = "tests.distributed.cases.pool"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


def test_results_come_in_rank_order_and_workers_persist(pool: Pool) -> None:
    first = pool.run(f"{CASES}:sum_of_ranks", {"offset": 10})
    second = pool.run(f"{CASES}:sum_of_ranks", {"offset": 10})
    assert [result["rank"] for result in first] == [0, 1]
    assert all(torch.equal(result["total"], torch.tensor([21.0])) for result in first)
    assert [result["pid"] for result in first] == [result["pid"] for result in second] == pool.pids
    assert [result["threads"] for result in first] == [1, 1]


def assert_usable(pool: Pool) -> None:
    assert [result["rank"] for result in pool.run(f"{CASES}:sum_of_ranks", {"offset": 0})] == [0, 1]


def test_exceptions_of_all_ranks_are_raised(pool: Pool) -> None:
    with pytest.raises(CaseFailed) as caught:
        pool.run(f"{CASES}:raise_on", {"ranks": [0, 1]})
    assert "planned failure on rank 0" in str(caught.value)
    assert "planned failure on rank 1" in str(caught.value)
    assert str(caught.value).count("in raise_on") == 2
    assert_usable(pool)


@pytest.mark.slow
def test_a_failure_on_one_rank_does_not_wait_for_the_rest(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(CaseFailed) as caught:
        pool.run(f"{CASES}:raise_on_rank_0_while_others_wait", timeout=300)
    assert time.monotonic() - start < 60
    assert "planned failure on rank 0" in str(caught.value)
    assert "rank 1 had not answered" in str(caught.value)
    assert "in raise_on_rank_0_while_others_wait" in str(caught.value).partition("rank 1 had not answered")[2]
    assert_usable(pool)


@pytest.mark.slow
def test_a_timeout_shows_the_stack_of_the_stuck_worker(pool: Pool) -> None:
    pids = pool.run(f"{CASES}:sum_of_ranks", {"offset": 0})
    with pytest.raises(CaseTimeout) as caught:
        pool.run(f"{CASES}:wait_forever_on", {"rank": 1}, timeout=1)
    assert "rank 1 had not answered after 1 s" in str(caught.value)
    assert "a_wait_that_never_ends" in str(caught.value)
    for result in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(result["pid"], 0)
    assert_usable(pool)


@pytest.mark.fast("None-killed by SIGKILL")
@pytest.mark.parametrize(("exit_code", "reason"), [(None, "killed by SIGKILL"), (3, "exit code 3")])
def test_a_dead_worker_is_named(pool: Pool, exit_code: int | None, reason: str) -> None:
    with pytest.raises(WorkerDied) as caught:
        pool.run(f"{CASES}:die_on", {"rank": 1, "exit_code": exit_code})
    assert f"rank 1 died: {reason}" in str(caught.value)
    assert "last words" in str(caught.value)
    assert_usable(pool)


@pytest.mark.slow
def test_a_worker_that_died_between_cases_is_named(pool: Pool) -> None:
    assert_usable(pool)
    os.kill(pool.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 0 died: killed by SIGKILL"):
        pool.run(f"{CASES}:sum_of_ranks", {"offset": 0})
    assert_usable(pool)


def test_a_group_left_behind_is_an_error(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match="process groups besides the default one are still alive"):
        pool.run(f"{CASES}:leave_a_group")
    assert_usable(pool)


def test_a_collective_left_behind_is_an_error(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match="leave_a_collective_on_rank_0"):
        pool.run(f"{CASES}:leave_a_collective_on_rank_0", timeout=5)
    assert_usable(pool)


def test_a_result_that_cannot_be_pickled_is_an_error(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match="cannot be pickled"):
        pool.run(f"{CASES}:return_what_cannot_be_pickled")
    assert_usable(pool)


def test_globals_are_restored_between_cases(pool: Pool) -> None:
    pool.run(f"{CASES}:disturb_globals")
    for rank, state in enumerate(pool.run(f"{CASES}:read_globals")):
        name, grad_enabled, threads, dtype, torch_random, python_random = state
        assert (name, grad_enabled, threads, dtype) == (str(rank), True, 1, torch.float32)
        torch.manual_seed(0)
        assert torch_random == torch.rand(2).tolist()
        assert python_random == random.Random(0).random()


def test_a_case_is_cheap(pool: Pool) -> None:
    assert_usable(pool)
    start = time.monotonic()
    for _ in range(10):
        pool.run(f"{CASES}:sum_of_ranks", {"offset": 0})
    assert time.monotonic() - start < 3.0  # starting processes instead takes more than 5 s for a single case


ORPHAN_SCRIPT = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.toolkit.pool import Pool
if __name__ == "__main__":
    pool = Pool(2)
    pool.run("{CASES}:sum_of_ranks", {{"offset": 0}})
    print(*pool.pids, flush=True)
    pool.run("{CASES}:wait_forever_on", {{"rank": 1}}, timeout=600)
"""


@pytest.mark.slow
def test_killing_the_test_process_leaves_no_worker() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN_SCRIPT], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        # A pidfd becomes readable when its process ends, also when that process is no child any more.
        descriptors = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    try:
        for descriptor in descriptors:
            assert wait_readable(descriptor, 10.0), "a worker outlived the process that made its pool"
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for descriptor in descriptors:
            os.close(descriptor)


def wait_readable(descriptor: int, seconds: float) -> bool:
    import select

    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
