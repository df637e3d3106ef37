"""Processes that the user starts: torch.multiprocessing, with an address, a file, or nothing at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import free_port

SCRIPT = """
import sys, threading
import torch, torch.multiprocessing as mp
import zerolite

def work(rank, init_method, world_size):
    zerolite.init_distributed("gloo", init_method, rank=rank, world_size=world_size, timeout=60)
    zerolite.init_distributed()  # twice is harmless
    torch.manual_seed(rank)
    engine = zerolite.initialize(
        torch.nn.Linear(4, 4),
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}},
    )
    assert (engine.rank, engine.world_size) == (rank, world_size)
    engine.backward(engine(torch.full((2, 4), float(rank))).sum())
    engine.step()
    total = engine.module.weight.detach().clone()
    torch.distributed.all_reduce(total)
    assert torch.allclose(total, world_size * engine.module.weight)
    del engine
    zerolite.destroy()
    zerolite.destroy()
    assert not torch.distributed.is_initialized()
    open(f"done-{rank}", "w").close()

if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[1], 2), nprocs=2)
"""


def run(script: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return subprocess.run(
        [sys.executable, str(script), *args],
        cwd=script.parent,
        env={**kept, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.slow
def test_spawned_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = run(script, f"tcp://127.0.0.1:{free_port()}")
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]


@pytest.mark.fast("init_method='tcp://127.0.0.1:1'-needs rank and world_size")
@pytest.mark.parametrize(
    "call,words",
    [
        ("init_method='tcp://127.0.0.1:1'", "needs rank and world_size"),
        ("init_method='tcp://127.0.0.1:1', rank=2, world_size=2", "0 <= rank < world_size, got rank=2"),
        ("rank=0", "both rank and world_size or neither"),
        ("rank=0, world_size=2", "without an address; set MASTER_ADDR"),
    ],
)
def test_incomplete_arguments_are_a_sentence(tmp_path: Path, call: str, words: str) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(f"import zerolite\nzerolite.init_distributed({call})\n")
    result = run(script)
    assert result.returncode == 1 and "ValueError: init_distributed" in result.stderr and words in result.stderr


@pytest.mark.slow
def test_one_process_without_any_environment(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import torch, zerolite\n"
        "zerolite.init_distributed()\n"
        "assert torch.distributed.get_world_size() == 1\n"
        "zerolite.destroy()\n"
        "print('fine')\n"
    )
    result = run(script)
    assert (result.returncode, result.stdout) == (0, "fine\n"), result.stderr
