"""Jobs on several hosts: how they end, whatever fails, and how they go on with fewer hosts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time

import pytest

from tests.cli.helpers import COMMAND
from tests.cli.sites import END_S, MakeSite, find_process, needs_hosts, read_losses

pytestmark = needs_hosts

ELASTIC = """\
import os, time
import torch, zerolite
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
          "train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}
engine = zerolite.initialize(model, config)
if os.path.exists("checkpoints/latest"):
    engine.load_checkpoint("checkpoints")
if rank == 0:
    print("started with", world, "ranks at step", engine.global_steps, flush=True)
for step in range(engine.global_steps, 8):
    batch = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    total = torch.zeros(())
    for micro in batch[rank * 12 // world : (rank + 1) * 12 // world].split(engine.train_micro_batch_size_per_gpu):
        loss = engine(micro).pow(2).mean()
        engine.backward(loss)
        engine.step()
        total += loss.detach() / engine.gradient_accumulation_steps
    torch.distributed.all_reduce(total)
    if rank == 0:
        print("loss", total.item() / world, flush=True)
    engine.save_checkpoint("checkpoints")
    if step == 3 and world == 3:
        open(f"arrived.{rank}", "w").close()
        time.sleep(3)
"""


@pytest.mark.slow
def test_a_rank_that_crashes_on_another_host_ends_all(make_site: MakeSite) -> None:
    """In time, also children that ignore SIGTERM; the last lines name the rank, the host and the cause."""
    site = make_site(1, 1, 1)
    job = site.start_waiting(3, site.argv())
    site.write("crash", "")
    start = time.monotonic()
    assert job.wait() == 1, job.errors
    site.assert_idle(start + END_S - time.monotonic())
    assert re.search(r"zerolite: rank 1 of 3 on host host2 \(process \d+\) failed", job.errors), job.errors
    assert "ValueError: rank one has had enough" in job.errors and 'wait.py", line' in job.errors


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "ssh"])
def test_nothing_outlives_the_launcher_or_a_connection(make_site: MakeSite, victim: str) -> None:
    site = make_site(1, 1, 1)
    job = site.start_waiting(3, site.argv())
    start = time.monotonic()
    if victim == "launcher":
        job.signal(signal.SIGKILL)
    else:
        os.kill(find_process(site.hosts[0], "ssh -F"), signal.SIGKILL)
    status = job.wait()
    site.assert_idle(start + END_S - time.monotonic())
    if victim == "launcher":
        assert status in (-9, 137), (status, job.errors)
    else:
        assert status == 1, (status, job.errors)
        assert re.search(r"the connection to host[23] is lost .*; the job ends on all hosts", job.errors), job.errors


@pytest.mark.slow
def test_ctrl_c(make_site: MakeSite) -> None:
    """Once: every rank may finish; twice: the end comes at once."""
    site = make_site(1, 1)
    job = site.start_waiting(2, site.argv(), "9")
    job.signal(signal.SIGINT)
    assert job.wait() == 130, job.errors
    site.assert_idle(END_S)
    for rank in range(2):
        assert (site.directory / f"interrupted.{rank}").exists(), (rank, job.output, job.errors)
    job = site.start_waiting(2, site.argv(), "300")
    job.signal(signal.SIGINT)
    time.sleep(2)
    job.signal(signal.SIGINT)
    assert job.wait(20) == 130, job.errors
    site.assert_idle(END_S)


@pytest.mark.slow
def test_a_host_is_unplugged(make_site: MakeSite) -> None:
    """The job ends with the host's name, and the host, left alone, ends its part too."""
    site = make_site(1, 1, 1)
    job = site.start_waiting(3, site.argv())
    site.network.set_link(1, up=False)
    status = job.wait(60)
    assert status == 1, job.errors
    assert "host2" in job.errors, job.errors
    site.assert_idle(END_S, "host1", "host3")
    site.assert_idle(60)


@pytest.mark.slow
def test_an_elastic_job_goes_on_with_one_host_fewer(make_site: MakeSite) -> None:
    """From the checkpoint, with the same global batch: the losses are those of one process."""
    site = make_site(1, 1, 1)
    site.write("train.py", ELASTIC)
    alone = site.start(*COMMAND, "--nproc", "1", "train.py")
    assert alone.wait() == 0, alone.errors
    shutil.rmtree(site.directory / "checkpoints")
    job = site.start(*site.argv("--num-nodes", "2:3", "--max-restarts", "1", "train.py"))
    site.wait_for("arrived.0", "arrived.1", "arrived.2")
    site.network.set_link(2, up=False)
    assert job.wait() == 0, job.errors
    assert re.findall(r"started with .*", job.output) == [
        "started with 3 ranks at step 0",
        "started with 2 ranks at step 4",
    ]
    assert read_losses(job.output) == pytest.approx(read_losses(alone.output), rel=1e-5)
    assert "the connection to host3 is lost" in job.errors and "goes on with 2 of 3 hosts" in job.errors
    site.assert_idle(40)
