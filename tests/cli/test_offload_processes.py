"""Offload in processes of its own that are killed in the middle of a step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.helpers import ROOT, limited_memory, run, run_command

pytestmark = pytest.mark.slow

KILLED = """\
import os, signal, sys, torch, zerolite
from zerolite.ops.async_io import AsyncIO
mode, directory = sys.argv[1:]
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(61, 301), torch.nn.GELU(), torch.nn.Linear(301, 61))
tier = {"device": "nvme", "nvme_path": os.path.join(directory, "disk")}
zero = {"stage": 3, "reduce_bucket_size": 5000, "sub_group_size": 5000, "offload_optimizer": tier}
zero |= {"offload_param": {**tier, "max_in_cpu": 0}, "stage3_param_persistence_threshold": 0}
engine = zerolite.initialize(model, {
    "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": zero,
})
saved = os.path.join(directory, "saved")
if mode == "resume":
    assert engine.load_checkpoint(saved)[0], "nothing was saved"
    assert engine.global_steps == 4
begun = 0
original = AsyncIO._begin
def begin(self, *args):
    global begun
    begun += 1
    request_of_disk = original(self, *args)
    if mode == "kill" and engine.rank == 1 and engine.global_steps == 5 and begun == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return request_of_disk
AsyncIO._begin = begin
while engine.global_steps < 8:
    begun = 0
    torch.manual_seed(100 * engine.global_steps + engine.rank)
    engine.backward(engine(torch.randn(2, 61)).float().square().mean())
    engine.step()
    if mode != "resume" and engine.global_steps == 4:
        engine.save_checkpoint(saved)
parameters = list(model.parameters())
values = [*zerolite.get_full_master(parameters), *zerolite.get_full_optimizer_state(parameters, "exp_avg_sq")]
if engine.rank == 0:
    torch.save(values, os.path.join(directory, f"{mode}.pt"))
"""


def test_killed_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Nothing is left on the disk, and the run goes on from its checkpoint to the same bits."""
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    for directory in ("whole", "broken"):
        (tmp_path / directory / "disk").mkdir(parents=True)

    def train(mode: str, directory: str) -> subprocess.CompletedProcess[str]:
        return run_command("--nproc", "2", script, mode, tmp_path / directory, cwd=tmp_path, PYTHONPATH=str(ROOT))

    whole = train("whole", "whole")
    assert whole.returncode == 0, whole.stderr
    killed = train("kill", "broken")
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr or "signal 9" in killed.stderr, killed.stderr
    assert not (tmp_path / "broken" / "kill.pt").exists()
    assert os.listdir(tmp_path / "broken" / "disk") == []
    resumed = train("resume", "broken")
    assert resumed.returncode == 0, resumed.stderr
    assert os.listdir(tmp_path / "broken" / "disk") == []
    wanted, got = torch.load(tmp_path / "whole" / "whole.pt"), torch.load(tmp_path / "broken" / "resume.pt")
    assert len(wanted) == 8
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


LARGE = """\
import contextlib, os, sys, torch, zerolite
torch.set_num_threads(2)
what, directory, layers, procs = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
width = 1024
tier = {"device": "nvme", "nvme_path": directory}
zero = {"stage": 2, "reduce_bucket_size": width * width, "sub_group_size": width * width, "overlap_comm": True}
if what == "everything":
    zero |= {"stage": 3, "offload_optimizer": {**tier, "buffer_count": 2}}
    zero |= {"offload_param": {**tier, "max_in_cpu": 0, "buffer_count": 2, "buffer_size": width * width}}
    zero |= {"stage3_max_live_parameters": 4 * width * width, "stage3_prefetch_bucket_size": width * width}
config = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": zero,
}

def train(layers, zero, width):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with zerolite.zero.Init(config_dict_or_path=config) if zero["stage"] == 3 else contextlib.nullcontext():
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    torch.set_default_dtype(torch.float32)
    engine = zerolite.initialize(model, {**config, "zero_optimization": zero})
    for step in range(3):
        engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().square().mean())
        if step == 1:
            report = engine.memory_report()
        engine.step()
    return engine, report

train(2, {"stage": 2}, 8)  # what Python and the libraries take is there before anything is limited
with open(procs, "w") as file:
    file.write(str(os.getpid()))
engine, report = train(layers, zero, width)
print("states", sum(sum(place.values()) for place in (report.items, report.disk)), "disk", sum(report.disk.values()))
engine.save_checkpoint(os.path.join(directory, "saved"))
print("finished")
"""

LAYERS = 40
STATES = LAYERS * 1024 * 1024 * 16  # bytes: weights and gradients in bf16, masters and two moments in fp32


@pytest.mark.parametrize(("what", "times"), [("nothing", 4), ("everything", 8)])
def test_states_of_several_times_the_memory(tmp_path: Path, what: str, times: int) -> None:
    """Without offload the kernel ends the process."""
    script = tmp_path / "train.py"
    script.write_text(LARGE)
    with limited_memory(STATES // times) as procs:
        # The C library keeps what is freed in pieces below this size: what is measured here is the engine.
        more = {"PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = run(sys.executable, script, what, tmp_path, str(LAYERS), procs, timeout=600, **more)
    if what == "nothing":
        assert done.returncode == -signal.SIGKILL, (done.returncode, done.stderr)
        assert "states" not in done.stdout
        return
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert done.stdout.splitlines()[-1] == "finished"
    held, on_disk = (int(word) for word in done.stdout.split()[1:4:2])
    assert held >= STATES and on_disk >= STATES
