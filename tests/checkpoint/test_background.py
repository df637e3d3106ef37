"""Asynchronous saves: training goes on at once, what is saved is the state at the call, failures come to light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.toolkit.pool import ROOT, Pools

CASES = "tests.checkpoint.cases.background"


def case(pools: Pools, function: str, directory: Path, world: int = 2, **kwargs: Any) -> None:
    pools(world).run(f"{CASES}:{function}", {"directory": str(directory / "checkpoints"), **kwargs})


def stages(*fast: int) -> Any:
    return pytest.mark.parametrize(
        "stage", [pytest.param(stage, marks=() if stage in fast else pytest.mark.slow) for stage in (0, 1, 2, 3)]
    )


@pytest.mark.fast("normed-3")
@stages(3)
@pytest.mark.parametrize(
    "name",
    [
        "mixture",
        "accumulation",
        "normed",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixture in fp16", "SGD", "RMSprop")),
    ],
)
def test_training_goes_on_at_once(pools: Pools, tmp_path: Path, stage: int, name: str) -> None:
    case(pools, "goes_on_at_once", tmp_path, stage=stage, name=name)


@pytest.mark.parametrize("name", ["NAdam", pytest.param("mixture", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_training_goes_on_at_once_elsewhere(pools: Pools, tmp_path: Path, world: int, name: str) -> None:
    case(pools, "goes_on_at_once", tmp_path, world, stage=1, name=name)


@pytest.mark.fast("refused_at_once-1")
@stages(1)
@pytest.mark.parametrize(
    "name", ["two_in_a_row", "loaded_at_once", "refused_at_once", "two_engines", "engine_that_is_gone"]
)
def test_calls_one_after_the_other(pools: Pools, tmp_path: Path, stage: int, name: str) -> None:
    case(pools, name, tmp_path, stage=stage)


@pytest.mark.fast("0-wait-3")
@stages(3)
@pytest.mark.parametrize(
    ("failing", "following"),
    [
        (0, "wait"),
        (1, "load"),
        pytest.param(1, "save", marks=pytest.mark.slow),
        pytest.param(0, "async", marks=pytest.mark.slow),
    ],
)
def test_the_next_call_says_what_has_failed(
    pools: Pools, tmp_path: Path, stage: int, failing: int, following: str
) -> None:
    case(pools, "failed", tmp_path, stage=stage, failing=failing, following=following)


@stages(3)
def test_ranks_that_have_finished_save_too(pools: Pools, tmp_path: Path, stage: int) -> None:
    case(pools, "while_joined", tmp_path, stage=stage)


PROGRAM = """
import sys, time, torch, zerolite
from zerolite.checkpoint import filesystem
from zerolite.checkpoint.errors import CheckpointError

directory, how = sys.argv[1:]

def slow(operation, path):
    time.sleep(0.05)
    if how == "fails" and operation == "rename":
        raise OSError(28, "No space left on device", str(path))

filesystem.before_operation = slow
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
engine = zerolite.initialize(torch.nn.Linear(3, 3), config)
engine.save_checkpoint(directory, async_save=True)
if how == "destroy":
    zerolite.destroy()
if how == "fails":
    try:
        zerolite.destroy()
    except CheckpointError as error:
        print("said", error)
"""


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["destroy", pytest.param("end of the program", marks=SLOW), pytest.param("fails", marks=SLOW)]
)
def test_the_end_waits(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "saved"), how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if how == "fails":
        assert "said" in done.stdout and "No space left" in done.stdout
        assert not (tmp_path / "saved" / "latest").exists()
    else:
        assert (tmp_path / "saved" / "latest").read_text().strip() == "global_step0"
        assert (tmp_path / "saved" / "global_step0" / "manifest.json").exists()
