"""A plain `python train.py` finds its place under torchrun, srun, mpirun, torch.multiprocessing and alone, with
processes for real."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import zerolite
from tests.cli import helpers
from tests.cli.helpers import TIMEOUT_S, free_port

TRAIN = """
import os, sys
import torch, zerolite

def train(*address, **place):
    zerolite.init_distributed(*address, **place)
    zerolite.init_distributed()  # twice is harmless
    torch.manual_seed(torch.distributed.get_rank())
    engine = zerolite.initialize(
        torch.nn.Linear(4, 4),
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}},
    )
    engine.backward(engine(torch.full((2, 4), float(engine.rank))).sum())
    engine.step()
    total = engine.module.weight.detach().clone()
    torch.distributed.all_reduce(total)
    assert torch.allclose(total, engine.world_size * engine.module.weight)
    place = engine.rank, engine.world_size, engine.local_rank, os.environ.get("MASTER_PORT", "none")
    os.write(1, f"\\nplace {' '.join(map(str, place))}\\n".encode())  # at once: ranks write to the same pipe
    del engine
    zerolite.destroy()
    zerolite.destroy()
    assert not torch.distributed.is_initialized()

def spawned(rank, address):
    train("gloo", address, rank=rank, world_size=2, timeout=60)

if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.multiprocessing.spawn(spawned, args=(sys.argv[1],), nprocs=2)
    else:
        train()
"""

# Open MPI refuses to run as root, and to start more processes than there are cores, unless it is told otherwise.
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (openmpi-bin)")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def start(command: Sequence[str | Path], **changes: str) -> subprocess.Popen[str]:
    return helpers.start(*command, **{"OMP_NUM_THREADS": "1", **changes})


def finish(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """The outputs, once all have succeeded; whatever happens, none is left running."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return [output for output, _ in outputs]


def places(*outputs: str) -> list[tuple[int, int, int, str]]:
    """(rank, world size, local rank, port) of every rank that has trained, in rank order."""
    found = re.findall(r"^place (\d+) (\d+) (\d+) (\w+)$", "\n".join(outputs), re.MULTILINE)
    return sorted((int(rank), int(size), int(local), port) for rank, size, local, port in found)


def numbers(*outputs: str) -> list[tuple[int, int, int]]:
    return [place[:3] for place in places(*outputs)]


@needs_mpirun
def test_ranks_of_mpirun_find_their_place(script: Path) -> None:
    (output,) = finish([start(["mpirun", "-n", "2", sys.executable, script], **ALLOWED)])
    assert numbers(output) == [(0, 2, 0), (1, 2, 1)]


@pytest.mark.slow
def test_spawned_processes_find_their_place(script: Path) -> None:
    (output,) = finish([start([sys.executable, script, f"tcp://127.0.0.1:{free_port()}"])])
    assert [place[:2] for place in places(output)] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"init_method": "tcp://127.0.0.1:1"}, "needs rank and world_size"),
        ({"init_method": "tcp://127.0.0.1:1", "rank": 2, "world_size": 2}, "0 <= rank < world_size, got rank=2"),
        ({"rank": 0}, "both rank and world_size or neither"),
        ({"rank": 0, "world_size": 2}, "without an address; set MASTER_ADDR"),
    ],
)
def test_incomplete_arguments_are_a_sentence(
    arguments: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zerolite.destroy()  # what tests before this one may have left
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=f"init_distributed.*{words}"):
        zerolite.init_distributed(**arguments)
