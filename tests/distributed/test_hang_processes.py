"""Hangs, ends and signals of whole processes, which workers of a pool cannot live through."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.helpers import ROOT, free_port, job_environment
from zerolite.diagnostics.watchdog import EXIT_STATUS

pytestmark = pytest.mark.slow

BEGIN = """
import os, signal, sys, threading, time, weakref
import torch
import zerolite

rank = int(os.environ["RANK"])

def make(timeout_s):
    torch.manual_seed(0)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": {"stage": 2}}
    return zerolite.initialize(torch.nn.Linear(8, 8), {**settings, "desync_timeout_s": timeout_s})

def step(engine):
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
"""


@contextmanager
def ranks(directory: Path, script: str, **variables: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two of them, without a launcher, so that rank 0 holds the store. Output is in ``directory/RANK``."""
    path, port = directory / "train.py", str(free_port())
    path.write_text(BEGIN + script)
    processes = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        environ = job_environment(**place, **variables, MASTER_PORT=port, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        with (directory / str(rank)).open("wb") as output:
            command = [sys.executable, "-u", str(path)]
            processes.append(subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()  # a stopped one too
            process.wait()


def run(directory: Path, script: str, **variables: str) -> list[tuple[int, str]]:
    """Each rank's exit status and output."""
    with ranks(directory, script, **variables) as processes:
        statuses = [process.wait(timeout=120) for process in processes]
    return [(status, (directory / str(rank)).read_text()) for rank, status in enumerate(statuses)]


def test_a_store_that_stands_still_keeps_nobody_from_ending(tmp_path: Path) -> None:
    script = """
from zerolite.comm import store
store.SILENT_S = 5.0
engine = make(2.0)
for i in range(1000):
    step(engine)
    if rank == 0 and i == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
"""
    with ranks(tmp_path, script) as processes:
        assert processes[1].wait(timeout=120) == EXIT_STATUS
        assert processes[0].poll() is None
    assert "the store of the rendezvous does not answer" in (tmp_path / "1").read_text()


def test_destroy_in_a_finally_does_not_hide_the_exception(tmp_path: Path) -> None:
    script = """
try:
    engine = make(30.0)
    for i in range(4):
        step(engine)
        if rank == 1 and i == 2:
            raise ValueError("bad data")
finally:
    zerolite.destroy()
"""
    (status, said), _ = run(tmp_path, script)
    assert status == 1 and "rank 1 ended with ValueError: bad data after step 3" in said
    assert "uneven batches" not in said


def test_a_timeout_of_the_process_group_is_a_hang_and_no_lost_process(tmp_path: Path) -> None:
    script = """
zerolite.init_distributed(timeout=4.0)
engine = make(60.0)
for i in range(4):
    if rank == 1 and i == 2:
        time.sleep(100)
    step(engine)
"""
    (_, said), (status, _) = run(tmp_path, script)
    assert status == EXIT_STATUS and "CollectiveFailed" in said and "rank 1 is outside of the engine" in said


@pytest.mark.parametrize("call", ["make(2.0)", "engine.reduce(1)"])
def test_waits_outside_of_steps_are_seen(tmp_path: Path, call: str) -> None:
    first = "engine = make(2.0)\nstep(engine)" if "engine" in call else "zerolite.init_distributed()"
    script = f"""
{first}
if rank == 1:
    time.sleep(100)
{call}
"""
    with ranks(tmp_path, script) as processes:
        assert processes[0].wait(timeout=60) == EXIT_STATUS
    said = (tmp_path / "0").read_text()
    assert "rank 1 is outside of the engine" in said or "rank 1 has not come to zerolite.initialize yet" in said


@pytest.mark.parametrize("shared_memory", ["0", "1"])
def test_a_debug_run_has_torch_compare_collectives(tmp_path: Path, shared_memory: str) -> None:
    script = """
engine = make(30.0)
for i in range(3):
    step(engine)
engine.save_checkpoint("checkpoints")
print("trained", flush=True)
torch.distributed.all_reduce(torch.ones(2 + rank))
"""
    debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "ZEROLITE_SHARED_MEMORY": shared_memory}
    for status, said in run(tmp_path, script.replace("checkpoints", str(tmp_path / "checkpoints")), **debug):
        assert status == 1 and "trained" in said and "Detected mismatch between collectives on ranks" in said
