"""Ranks that wait for each other in vain are told why, and ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerolite
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.pool import Pools, WorkerDied
from tests.toolkit.ranks import on_ranks
from zerolite.comm import flight_recorder
from zerolite.diagnostics import watchdog
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
    model.head.bias.requires_grad_(how != "unfreeze")
    evaluated = zerolite.initialize(Model(), {"train_batch_size": 6}) if how == "sleep" else None
    engine = zerolite.initialize(model, at(stage, optimizer=ADAMW, desync_timeout_s=timeout_s))
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
        elif doing == "exited":
            # As the launcher says it. A process that stands still breaks no connection, as with NCCL.
            store = torch.distributed.distributed_c10d._get_default_store()
            while isinstance(store, torch.distributed.PrefixStore):
                store = store.underlying_store
            store.set(failure_record.NUMBERED_EXIT.format(store.add(failure_record.EXIT_COUNT, 1)), str(rank))
            os.kill(os.getpid(), signal.SIGSTOP)
        elif doing == "stop":
            time.sleep(0.5)  # until it has said in which step it is
            os.kill(os.getpid(), signal.SIGSTOP)
        elif doing == "fail in the update":
            engine._parts.optimizer.method.update = mock.Mock(side_effect=ValueError("of this rank alone"))
        elif doing == "unfreeze":
            model.head.bias.requires_grad_(True)
        elif doing.startswith("save") or (how == "save again" and step == 0):
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
            with contextlib.suppress(ValueError):
                engine.step()
        except flight_recorder.Mismatch as error:
            raised = str(error)
            if not caught:
                break
            if odd:
                time.sleep(FOR_EVER)
            zerolite.comm.HostGroup(engine._parts.topology.data, "after").gather("hello")
    found = {"steps": engine.global_steps, "raised": raised, "rank": rank}
    del engine, evaluated
    return found


TIMEOUT_S = 3.0

# How rank 1 parts from the others, at which stage, and what the message says then.
PARTINGS: dict[str, tuple[int, list[str]]] = {
    "sleep": (2, ["rank 1 is outside of the engine", "in part", "docs/uneven-data.md", "waits for no rank"]),
    "sleep in forward": (3, ["rank 1 is slow or stuck in the forward", "in forward", "desync_timeout_s"]),
    "save": (2, ["rank 1 called engine.save_checkpoint(), and the other", "on all ranks"]),
    "save again": (
        2,
        ["rank 1 called engine.save_checkpoint()", "the other ranks in engine.save_checkpoint"],
    ),
    "branch": (3, ["'experts.first'", "'experts.second'", "leaf_modules", "number 4 in this step"]),
    "stop": (1, ["rank 1: no answer, last seen in step", "rank 1 died", "native code"]),
    "gradient": (1, ["rank 1 called an operation on p.grad, and the other", "on all ranks"]),
    "unfreeze": (
        3,
        ["rank 1 began to train parameter 'head.bias' in step 3, and ranks 0 and 2 did not", "on all ranks"],
    ),
    "fail in the update": (2, ["rank 1 raised ValueError in its update, and rank 0 did not"]),
    "metric": (0, ["rank 1 called engine.reduce(), and the other", "for metrics"]),
}


def run_until_ended(pools: Pools, world_size: int, directory: Path, case: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the pool's message about the end, and each rank's failure record."""
    with pytest.raises(WorkerDied) as died:
        pools(world_size).run(part, {**case, "directory": str(directory)})
    records = [failure_record.read(str(directory / f"record.{rank}.json")) for rank in range(world_size)]
    return str(died.value), [record.message if record is not None else "" for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("how", PARTINGS)
def test_every_rank_ends_with_the_same_diagnosis(pools: Pools, tmp_path: Path, how: str) -> None:
    stage, sentences = PARTINGS[how]
    world_size = 2 + stage % 2
    # Shared memory would find these out by itself.
    by_messages = how in ("branch", "metric", "gradient", "fail in the update")
    case = {"how": how, "stage": stage, "timeout_s": TIMEOUT_S, "shared_memory": not by_messages}
    said, messages = run_until_ended(pools, world_size, tmp_path, case)
    answered = [rank for rank in range(world_size) if not (how == "stop" and rank == ODD)]
    for rank in answered:
        assert f"rank {rank} died: exit code {EXIT_STATUS}" in said
    message = messages[0]
    assert all(messages[rank] == message for rank in answered)
    for sentence in [f"longer than desync_timeout_s ({TIMEOUT_S:g} s)", *sentences]:
        assert sentence in message, message
    for rank in answered:
        assert re.search(rf"ranks? ([0-9, -]|and)*\b{rank}\b", message)
    assert "Stack of rank" in message and "test_watchdog.py" in message
    assert f"step {AT + 1}, in" in message, message


@pytest.mark.slow
def test_a_rank_that_has_exited_is_not_waited_for(pools: Pools, tmp_path: Path) -> None:
    """Long before the timeout."""
    case = {"how": "exited", "stage": 2, "timeout_s": 10.0}
    said, messages = run_until_ended(pools, 2, tmp_path, case)
    assert f"rank 0 died: exit code {EXIT_STATUS}" in said
    assert "of which rank 1 exited with status 0, so the job is ended" in messages[0]
    assert "rank 1: exited with status 0" in messages[0] and "os._exit" in messages[0]


@pytest.mark.slow
@on_ranks(2)
def test_slow_ranks_below_the_timeout_are_left_alone(tmp_path: Path) -> None:
    found = part("slow", 3, 1.0, str(tmp_path))
    assert found["steps"] == 4 and not found["raised"]
    assert not list(tmp_path.glob("record*"))


@on_ranks(2)
def test_ranks_may_wait_for_ever_where_the_config_says_so(tmp_path: Path) -> None:
    assert part("slow", 1, 0, str(tmp_path))["steps"] == 4


@on_ranks(2)
def test_ranks_that_find_out_by_themselves_raise_it(tmp_path: Path) -> None:
    """Shared memory compares what is launched. The workers live on, and the next question is a new one."""
    said = part("metric", 2, 30.0, str(tmp_path))["raised"]
    assert f"rank {torch.distributed.get_rank()}: the ranks launched different collectives" in said
    assert "rank 0: reduce_scatter for gradients" in said and "rank 1: all_gather for metrics" in said
    assert "engine.reduce()" in said
    said = part("unfreeze", 2, 30.0, str(tmp_path))["raised"]
    assert "rank 1: all_reduce for the comparison of parameters that begin to train" in said
    assert "Likely cause: rank 1 began to train parameter 'head.bias' in step 3, and rank 0 did not." in said
    said = part("skip the step", 2, 30.0, str(tmp_path))["raised"]
    assert re.search("all_reduce of .* for 'stats'|reduce_scatter of .* for 'gradients'", said)
    assert "reduce_scatter for gradients" in said and "engine.step()" in said
    said = part("branch", 3, 30.0, str(tmp_path))["raised"]
    assert "number 4 in this step: rank 0: 'experts.first' entered; rank 1: 'experts.second'" in said
    assert not list(tmp_path.glob("record*"))


@pytest.mark.slow
def test_ranks_that_go_on_after_they_have_raised_it_are_ended_too(pools: Pools, tmp_path: Path) -> None:
    """There is one question until the next initialize, and no rank waits for ever after it."""
    _, messages = run_until_ended(pools, 2, tmp_path, {"how": "metric", "stage": 2, "timeout_s": 1.5, "caught": True})
    assert "longer than desync_timeout_s (1.5 s), so the job is ended. Before that:" in messages[0]
    assert "rank 1: all_gather for metrics" in messages[0]
