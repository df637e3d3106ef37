"""Jobs whose ranks part, started by the `zerolite` command: they end soon, and say why once."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.helpers import COMMAND, run
from zerolite.diagnostics.watchdog import EXIT_STATUS

pytestmark = pytest.mark.slow

SCRIPT = """\
import os, sys, time, torch, zerolite
how, stage, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rank = int(os.environ["RANK"])
odd = rank == 1
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

def fail(*args):
    if how.startswith("kill"):
        os.kill(os.getpid(), 9)
    raise ValueError("a bad sample")

if how == "raise at import" and odd:
    fail()
if how == "exit early" and odd:
    sys.exit(0)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": stage},
    "desync_timeout_s": timeout_s,
}
if how == "late" and odd:
    time.sleep(1000)
zerolite.init_distributed()
engine = zerolite.initialize(model, config)
for step in range(5 + (how == "more" and odd)):
    if how == "sleep" and odd and step == 2:
        print("going to sleep", flush=True)
        time.sleep(1000)
    if how == "os._exit" and odd and step == 2:
        os._exit(0)
    place = how.partition(" in ")[2] if odd and step == 2 else ""
    if place == "forward":
        model[1].register_forward_pre_hook(fail)
    loss = engine(torch.randn(2, 8)).square().mean()
    if place == "backward":
        loss.register_hook(fail)
    engine.backward(loss)
    engine.step()
    if how.endswith("in save") and step == 2:
        if odd:
            from zerolite.checkpoint import saving
            saving.write_checkpoint = fail
        engine.save_checkpoint("checkpoints")
    if how == "wait":
        time.sleep(0.5)
print("done", rank, flush=True)
zerolite.destroy()
"""


def start(
    directory: Path, how: str, stage: int, timeout_s: float = 2.0
) -> tuple[subprocess.CompletedProcess[str], float]:
    script = directory / "train.py"
    script.write_text(SCRIPT)
    began = time.monotonic()
    finished = run(*COMMAND, "--nproc", "2", script, how, str(stage), str(timeout_s), cwd=directory)
    return finished, time.monotonic() - began


def test_a_rank_that_sleeps_ends_the_job_with_the_diagnosis(tmp_path: Path) -> None:
    finished, _ = start(tmp_path, "sleep", 3)
    said = finished.stderr
    assert finished.returncode == EXIT_STATUS, said
    assert "rank 1 is outside of the engine, at " in said and "train.py:" in said and "docs/uneven-data.md" in said
    assert said.count("Likely cause:") == 1, "the message is there once"
    assert "zerolite/launcher" not in said.partition("Likely cause:")[2].partition("zerolite: rank")[0]
    assert f"exit status {EXIT_STATUS}" in said


def test_a_rank_with_one_batch_more_is_told(tmp_path: Path) -> None:
    finished, seconds = start(tmp_path, "more", 1, 60.0)
    assert finished.returncode == 1
    assert "rank 0 ended normally after step 5. Likely cause: uneven batches" in finished.stderr
    assert "PeerLost" in finished.stderr and seconds < 45


@pytest.mark.parametrize("how", ["exit early", "os._exit"])
def test_a_rank_that_exits_with_status_0_is_told_at_once(tmp_path: Path, how: str) -> None:
    finished, _ = start(tmp_path, how, 2, 600.0)
    assert finished.returncode == 1, finished.stderr
    if how == "exit early":
        assert "init_distributed: rank 1 of 2 exited with status 0 before this call" in finished.stderr
    else:
        assert "PeerLost: rank 0 has lost another rank, in step 3" in finished.stderr
        assert "rank 1 exited with status 0. Likely cause: rank 1 exited with status 0 without" in finished.stderr
        assert "os._exit" in finished.stderr and "before that, rank 1 of 2 on host" in finished.stderr


@pytest.mark.parametrize(
    ("how", "stage"), [("raise at import", 0), ("raise in forward", 3), ("kill in backward", 3), ("raise in save", 2)]
)
def test_the_first_failure_is_shown_and_not_its_consequence(tmp_path: Path, how: str, stage: int) -> None:
    finished, seconds = start(tmp_path, how, stage, 60.0)
    last = finished.stderr.rpartition("zerolite: rank 1 of 2")[2]
    if how.startswith("kill"):
        assert finished.returncode == 128 + signal.SIGKILL and "SIGKILL" in last, finished.stderr
    else:
        assert finished.returncode == 1 and "ValueError: a bad sample" in last, finished.stderr
    assert seconds < 45 and not (tmp_path / "checkpoints" / "latest").exists()
