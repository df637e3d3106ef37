"""Ranks that wait for each other in vain are told why, and ended."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerolite
from tests.toolkit.configs import ADAMW, PARTITIONED, config
from tests.toolkit.pool import Pools, WorkerDied
from zerolite.comm import flight_recorder
from zerolite.diagnostics import watchdog
from zerolite.diagnostics.position import WATCHDOG
from zerolite.diagnostics.watchdog import EXIT_STATUS
from zerolite.utils import failure_record

FOR_EVER = 1000.0
ODD = 1  # the rank that parts from the others
AT = 2  # in this step, from 0


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 6)
        self.odd = False

    def forward(self, x: Tensor) -> Tensor:
        if self.odd:
            return nn.functional.pad(self.second(x), (0, 2))
        return self.first(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.experts = Experts()
        self.head = nn.Linear(8, 1)
        self.sleep_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        time.sleep(self.sleep_s)
        return self.head(self.experts(x))


def part(
    how: str, stage: int, timeout_s: float, directory: str, shared_memory: bool = True, caught: bool = False
) -> dict[str, Any]:
    """Train; rank 1 does something else than the others in its third step, as ``how`` says. caught: ranks go on after
    they have raised that they differ, and rank 1 sleeps."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = str(int(shared_memory))
    rank = int(torch.distributed.get_rank())
    os.environ[failure_record.VARIABLE] = str(Path(directory) / f"record.{rank}.json")
    if how == "exited":
        watchdog._EXITED_S = 1.0
    torch.manual_seed(0)
    model = Model()
    settings = config(stage, zero=PARTITIONED["moving"] if stage == 3 else None, optimizer=ADAMW)
    engine = zerolite.initialize(model, {**settings, "desync_timeout_s": timeout_s})
    odd = rank == ODD
    raised = ""
    for step in range(4):
        doing = how if odd and step == AT else ""
        model.sleep_s = FOR_EVER if doing == "sleep in forward" else 0.0
        model.experts.odd = doing == "branch"
        if how == "slow" and odd:
            time.sleep(0.6 * timeout_s)
        if doing == "sleep":
            time.sleep(FOR_EVER)
        elif (
            doing == "exited"
        ):  # as the launcher says it; a process that stands still breaks no connection, as with NCCL
            store = torch.distributed.distributed_c10d._get_default_store()
            while isinstance(store, torch.distributed.PrefixStore):
                store = store.underlying_store
            store.set(failure_record.NUMBERED_EXIT.format(store.add(failure_record.EXIT_COUNT, 1)), str(rank))
            os.kill(os.getpid(), signal.SIGSTOP)
        elif doing == "stop":
            time.sleep(0.5)  # until it has said in which step it is
            os.kill(os.getpid(), signal.SIGSTOP)
        elif doing == "fewer":
            _wait_outside()
        elif doing == "save":
            engine.save_checkpoint(directory)
        try:
            if doing == "metric":
                engine.reduce(1.0)
            loss = engine(torch.randn(2, 8)).square().mean()
            engine.backward(loss)
            if doing == "gradient":
                torch.sort(model.inner.weight.grad)  # type: ignore[call-overload]
            if doing == "skip the step":
                continue
            engine.step()
        except flight_recorder.Mismatch as error:
            raised = str(error)
            if not caught:
                break
            if odd:
                time.sleep(FOR_EVER)
            zerolite.comm.HostGroup(engine.parts.comm, "after").gather("hello")
    found = {"steps": engine.global_steps, "raised": raised, "rank": rank}
    del engine
    return found


def _wait_outside() -> None:
    time.sleep(FOR_EVER)


def beats(stage: int, steps: int) -> dict[str, Any]:
    """Return how often the watchdog writes to its store and what the main thread does there."""
    settings = config(stage, zero=PARTITIONED["moving"] if stage == 3 else None)
    engine = zerolite.initialize(Model(), {**settings, "desync_timeout_s": 1.0})
    assert watchdog._current is not None
    dog = watchdog._current
    calls: list[tuple[str, str, str]] = []
    real = dog._store

    class Counting:
        alone = False

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                calls.append((name, str(args[0]), threading.current_thread().name))
                return getattr(real, name)(*args)

            return call

    dog._store = Counting()  # type: ignore[assignment]
    try:
        for _ in range(steps):
            engine.backward(engine(torch.randn(2, 8)).square().mean())
            engine.step()
            time.sleep(0.15)
        time.sleep(0.3)
    finally:
        dog._store = real
    del engine
    threads = [thread for thread in threading.enumerate() if thread.name == WATCHDOG]
    return {"calls": calls, "threads": len(threads)}


def signalled() -> str:
    """Return the output of SIGUSR1 while the main thread waits for another rank."""
    rank = int(torch.distributed.get_rank())
    engine = zerolite.initialize(Model(), config(2))
    assert watchdog._current is not None
    dog = watchdog._current
    if not dog._signalled:  # the pool listens to that signal itself: write what the handler would
        real, read, written = sys.stderr, *os.pipe()
        sys.stderr = os.fdopen(written, "w", buffering=1)
        try:
            if rank == 0:
                timer = threading.Timer(0.3, lambda: os.write(dog._woken, b"Current thread: a stack"))
                timer.start()
            else:
                time.sleep(1.0)
            engine.backward(engine(torch.randn(2, 8)).square().mean())
            engine.step()
            time.sleep(0.3)
        finally:
            sys.stderr.close()
            sys.stderr = real
        with os.fdopen(read) as file:
            said = file.read()
    del engine
    return said


def lost(stage: int, last_words: str) -> str:
    """Return the error of a collective when another process has gone, which rank 1 pretends."""
    rank = int(torch.distributed.get_rank())
    engine = zerolite.initialize(Model(), config(stage))
    assert watchdog._current is not None
    dog = watchdog._current
    said = ""
    if rank == ODD:
        dog._say_ended(last_words)
    torch.distributed.barrier()
    if rank != ODD:
        error = dog.explain(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:17320"))
        said = str(error)
        assert dog.explain(RuntimeError("shape mismatch")) is None
    torch.distributed.barrier()
    if rank == ODD:
        dog._store.add("endings", -1)
    torch.distributed.barrier()
    del engine
    return said


# -------------------------------------------------------------------- the tests


TIMEOUT_S = 1.5

slow = pytest.mark.slow

# How rank 1 parts from the others, at which stages, and what the message says then.
PARTINGS: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "sleep": ((0, 1, 2, 3), ["rank 1 is outside of the engine", "in part", "engine.join()", "waits for no rank"]),
    "fewer": ((0, 3), ["rank 1 is outside of the engine", "in _wait_outside", "engine.join()"]),
    "sleep in forward": ((0, 1, 2, 3), ["rank 1 is slow or stuck in the forward", "in forward", "desync_timeout_s"]),
    "save": ((0, 1, 2, 3), ["rank 1 called engine.save_checkpoint(), and the other", "on all ranks"]),
    "branch": ((3,), ["'experts.first'", "'experts.second'", "leaf_modules", "number 4 in this step"]),
    "stop": ((1, 3), ["rank 1: no answer, last seen in step", "rank 1 died", "native code"]),
    "gradient": ((1, 3), ["rank 1 called an operation on p.grad, and the other", "on all ranks"]),
    "metric": ((1, 3), ["rank 1 called engine.reduce(), and the other", "for metrics"]),
}
FAST = {("sleep", 2), ("branch", 3)}


def partings() -> list[Any]:
    found = []
    for how, (stages, _) in PARTINGS.items():
        for stage in stages:
            for world_size in (2, 3):
                marks = [] if (how, stage) in FAST and world_size == 2 else [slow]
                found.append(pytest.param(how, stage, world_size, marks=marks, id=f"{how}-{stage}-{world_size}"))
    return found


def run_until_ended(pools: Pools, world_size: int, directory: Path, case: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the pool's message about the end, and each rank's failure record."""
    with pytest.raises(WorkerDied) as died:
        pools(world_size).run(part, {**case, "directory": str(directory)})
    records = [failure_record.read(str(directory / f"record.{rank}.json")) for rank in range(world_size)]
    return str(died.value), [record.message if record is not None else "" for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("how, stage, world_size", partings())
def test_every_rank_ends_with_the_same_diagnosis(
    pools: Pools, tmp_path: Path, how: str, stage: int, world_size: int
) -> None:
    by_messages = how in ("branch", "metric", "gradient")  # shared memory would find these out by itself
    case = {"how": how, "stage": stage, "timeout_s": TIMEOUT_S, "shared_memory": not by_messages}
    said, messages = run_until_ended(pools, world_size, tmp_path, case)
    answered = [rank for rank in range(world_size) if not (how == "stop" and rank == ODD)]
    for rank in answered:
        assert f"rank {rank} died: exit code {EXIT_STATUS}" in said
    message = messages[0]
    assert all(messages[rank] == message for rank in answered)
    for sentence in ["longer than desync_timeout_s (1.5 s)", *PARTINGS[how][1]]:
        assert sentence in message, message
    for rank in answered:
        assert re.search(rf"ranks? ([0-9, -]|and)*\b{rank}\b", message)
    assert "Stack of rank" in message and "cases/watchdog.py" in message
    assert f"step {AT + 1}, in" in message


@slow
def test_a_rank_that_has_exited_is_not_waited_for(pools: Pools, tmp_path: Path) -> None:
    """Long before the timeout."""
    case = {"how": "exited", "stage": 2, "timeout_s": 20.0}
    said, messages = run_until_ended(pools, 2, tmp_path, case)
    assert f"rank 0 died: exit code {EXIT_STATUS}" in said
    assert "of which rank 1 exited with status 0, so the job is ended" in messages[0]
    assert "rank 1: exited with status 0" in messages[0] and "os._exit" in messages[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, world_size",
    [(0, 2), pytest.param(1, 3, marks=slow), pytest.param(2, 2, marks=slow), pytest.param(3, 2, marks=slow)],
)
def test_slow_ranks_below_the_timeout_are_left_alone(pools: Pools, tmp_path: Path, stage: int, world_size: int) -> None:
    case = {"how": "slow", "stage": stage, "timeout_s": 1.0, "directory": str(tmp_path)}
    for result in pools(world_size).run(part, case):
        assert result["steps"] == 4 and not result["raised"]
    assert not list(tmp_path.glob("record*"))


def test_ranks_may_wait_for_ever_where_the_config_says_so(pools: Pools, tmp_path: Path) -> None:
    case = {"how": "slow", "stage": 1, "timeout_s": 0, "directory": str(tmp_path)}
    assert [result["steps"] for result in pools(2).run(part, case)] == [4, 4]


def test_ranks_that_find_out_by_themselves_raise_it(pools: Pools, tmp_path: Path) -> None:
    """Shared memory compares what is launched. The workers live on, and the next question is a new one."""
    case = {"how": "metric", "stage": 2, "timeout_s": 30.0, "directory": str(tmp_path)}
    for result in pools(2).run(part, case):
        message = result["raised"]
        assert f"rank {result['rank']}: the ranks launched different collectives" in message
        assert "rank 0: reduce_scatter for gradients" in message and "rank 1: all_gather for metrics" in message
        assert "engine.reduce()" in message
    case = {"how": "skip the step", "stage": 2, "timeout_s": 30.0, "directory": str(tmp_path)}
    for result in pools(2).run(part, case):
        assert re.search("all_reduce of .* for 'stats'|reduce_scatter of .* for 'gradients'", result["raised"])
        assert "reduce_scatter for gradients" in result["raised"] and "engine.step()" in result["raised"]
    case = {"how": "branch", "stage": 3, "timeout_s": 30.0, "directory": str(tmp_path)}
    for result in pools(2).run(part, case):
        assert "number 4 in this step: rank 0: 'experts.first' entered; rank 1: 'experts.second'" in result["raised"]
    assert not list(tmp_path.glob("record*"))


@slow
def test_ranks_that_go_on_after_they_have_raised_it_are_ended_too(pools: Pools, tmp_path: Path) -> None:
    """There is one question until the next initialize, and no rank waits for ever after it."""
    _, messages = run_until_ended(pools, 2, tmp_path, {"how": "metric", "stage": 2, "timeout_s": 1.5, "caught": True})
    assert "longer than desync_timeout_s (1.5 s), so the job is ended. Before that:" in messages[0]
    assert "rank 1: all_gather for metrics" in messages[0]


def test_a_step_costs_one_small_write_beside_the_main_thread(pools: Pools) -> None:
    for result in pools(2).run(beats, {"stage": 1, "steps": 5}):
        calls = result["calls"]
        written = [key for name, key, _ in calls if name == "set"]
        assert 1 <= len(written) <= 6 and all(key.startswith("beat/") for key in written)
        assert {name for name, _, _ in calls} == {"set", "has"}  # and one look for questions, per period
        assert {thread for _, _, thread in calls} == {"zerolite watchdog"} and result["threads"] == 1


@pytest.mark.slow
def test_sigusr1_prints_the_position_of_a_rank_that_waits(pools: Pools) -> None:
    said = pools(2).run(signalled)[0]
    assert re.search(
        r"zerolite: SIGUSR1: rank 0 stands in step 1, in engine\.backward\(\)( of engine [0-9]+)?, at ", said
    )
    assert "waits for" in said and "a stack" in said


@pytest.mark.parametrize(
    "last_words, expected",
    [
        ("normally", ["rank 1 ended normally after step 0", "Uneven batches?", "engine.join()"]),
        ("with ValueError: bad data", ["rank 1 ended with ValueError: bad data", "Its process died"]),
    ],
)
def test_a_lost_connection_is_explained(pools: Pools, last_words: str, expected: list[str]) -> None:
    said = pools(2).run(lost, {"stage": 2, "last_words": last_words})[0]
    for sentence in ["rank 0 has lost another rank", "Connection closed by peer", *expected]:
        assert sentence in said, said
