"""A rank that ends, or ends its process groups, while the gathers of its last update are in flight: the other rank gets
its part, and whoever still reads weights finds them whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import ROOT, free_port, job_environment

pytestmark = pytest.mark.slow

SCRIPT = """
import atexit, multiprocessing, os, sys, threading, time
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group
import zerolite
from zerolite.zero.param_gatherer import ParamGatherer

rank = int(os.environ["RANK"])

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(4)))

def train(overlap):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    zero = {"stage": 2, "overlap_comm": overlap, "reduce_bucket_size": 400000}
    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero}
    made = model()
    engine = zerolite.initialize(made, settings)
    torch.manual_seed(rank)
    for i in range(2):
        engine.backward(engine(torch.randn(2, 600)).square().mean())
        if i == 1 and rank == 0 and overlap:
            update_slowly()
        engine.step()
    return engine, made

def update_slowly():
    gather = ParamGatherer.gather_bucket
    def late(*args, **kwargs):
        time.sleep(0.3)
        return gather(*args, **kwargs)
    ParamGatherer.gather_bucket = late

def values(made):
    return [p.detach().clone() for p in made.parameters()]

def check():
    assert all(torch.equal(one, two) for one, two in zip(values(made), expected, strict=True))
    print("whole", flush=True)

def read_past_functions():
    torch.tensor(made[0].weight)
    check()

def read_in_a_worker():
    loader = torch.utils.data.DataLoader(Weights(), num_workers=1, batch_size=None, multiprocessing_context="fork")
    assert torch.equal(next(iter(loader)), expected[0])
    check()

class Weights(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return made[0].weight.detach().clone()

def train_in_a_process():
    global engine, made, expected
    expected = values(train(False)[1])
    engine, made = train(True)
    flying = any(type(p) is not torch.nn.Parameter for p in made.parameters())
    assert flying or rank == 0, "nothing is in flight"  # what rank 0 needs may have come while it updated

"""

# What rank 1 does after the last step. Rank 0, whose update takes longer, reads its weights then.
ENDS = {
    "the script's end": "pass",
    "sys.exit": "sys.exit(0)",
    "an exception": "raise ValueError('bad data')",
    "destroy": "zerolite.destroy(); check()",
    "torch's destroy": "dist.destroy_process_group(); check()",
    "torch's destroy, imported before": "destroy_process_group(); check()",
    "no engine": "del engine; check()",
    "neither engine nor groups": "dist.destroy_process_group(); del engine; check()",
    "a handler at exit": "atexit.register(check)",
    "a handler at exit that reads past functions": "atexit.register(read_past_functions)",
    "a daemon thread in a wait": "threading.Thread(target=check, daemon=True).start()",
    "a thread in a wait": "threading.Thread(target=check).start()",
    "a worker of a loader": "read_in_a_worker()",
    "a process of multiprocessing": "",
}
OTHERS_SAY = ("daemon", "sys.exit", "exception", "script", "multiprocessing")


def script_of(end: str) -> str:
    if not ENDS[end]:  # both ranks are processes that multiprocessing has forked, which run no handlers at exit
        return f"""{SCRIPT}
def run():
    train_in_a_process()
    if rank == 0:
        check()
process = multiprocessing.get_context("fork").Process(target=run)
process.start()
process.join()
sys.exit(process.exitcode)
"""
    return f"{SCRIPT}\ntrain_in_a_process()\nif rank == 1:\n    {ENDS[end]}\nelse:\n    check()\n"


def drive(directory: str, ends: Sequence[str] = ()) -> None:
    """Run every end: two processes each, which are forked because imports take longer than the rest."""
    import zerolite.engine.initialize  # noqa: F401

    for number, end in enumerate(ENDS):
        if ends and end not in ends:
            continue
        port = str(free_port())
        children = [fork_rank(rank, port, end, Path(directory, f"{number}.{rank}")) for rank in range(2)]
        timer = threading.Timer(240, lambda pids=children: [os.kill(pid, signal.SIGKILL) for pid in pids])
        timer.start()
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        timer.cancel()
        timer.join()
        for rank, status in enumerate(statuses):
            Path(directory, f"{number}.{rank}.status").write_text(str(status))


def fork_rank(rank: int, port: str, end: str, output: Path) -> int:
    """Return the id of a process that runs the script and ends as Python ends."""
    if pid := os.fork():
        return pid
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    main: Any = sys.modules["__main__"]
    exec(compile(script_of(end), "script", "exec"), main.__dict__)
    sys.exit(0)


@pytest.fixture(scope="module", params=["0", "1"], ids=["messages", "shared memory"])
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("ends")
    environ = job_environment(ZEROLITE_SHARED_MEMORY=request.param, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    command = f"from tests.distributed.test_ends_in_flight import drive; drive({str(directory)!r})"
    subprocess.run([sys.executable, "-u", "-c", command], env=environ, check=True)
    return directory


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_ends_after_its_last_step_fails_no_other(end: str, ended: Path) -> None:
    number = list(ENDS).index(end)
    said = [(ended / f"{number}.{rank}").read_text() for rank in range(2)]
    statuses = [int((ended / f"{number}.{rank}.status").read_text()) for rank in range(2)]
    assert statuses == [0, int(end == "an exception")], said
    assert "whole" in said[0] and ("whole" in said[1] or any(name in end for name in OTHERS_SAY)), said
    errors = ["Exception ignored", "in flight"] + ["Error:"] * (end != "an exception")
    assert not any(error in text for text in said for error in errors), said
