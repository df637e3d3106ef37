"""Command lines of ssh, plans, addresses and what the checks make of the answers; nothing is started."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import wait_until
from zerolite.launcher import node, ssh
from zerolite.launcher.job import NodeJob
from zerolite.launcher.options import LaunchRequest
from zerolite.launcher.plan import job_variables, make_plan, own_versions
from zerolite.launcher.ssh import NODE, SshPart, node_command
from zerolite.utils import network
from zerolite.utils.network import SECRET_VARIABLE


def test_another_host_is_reached_by_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = LaunchRequest(["t.py"], launcher_args=["-F", "my config"], ssh_port=2222)
    command = node_command(request, "worker-2", {"PYTHONPATH": "/a b:/c", "PYTHON_KEYRING_TOKEN": "x", "NCCL_X": "1"})
    assert command[:3] == ["ssh", "-F", "my config"] and "BatchMode=yes" in command
    assert {"ControlMaster=no", "ControlPath=none"} <= set(command), "a shared connection outlives its job, or ends it"
    assert command[-4:-1] == ["-p", "2222", "worker-2"]
    start = f"{sys.executable} {shlex.join(NODE)}"
    assert command[-1] == f"cd {tmp_path}; exec env 'PYTHONPATH=/a b:/c' {start}"


def test_a_host_says_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    job = NodeJob(["t.py"], job_id="abc", nproc=3, cwd=str(tmp_path), versions=own_versions())
    assert node.find_problems(job) == []
    other = dataclasses.replace(job, versions={**job.versions, "torch": "1.0"}, cwd="/nowhere")
    torch, directory = node.find_problems(other)
    assert "started with torch 1.0" in torch and "has no working directory '/nowhere'" in directory
    assert "there is no script 'x.py'" in node.find_problems(dataclasses.replace(job, target=["x.py"]))[0]
    few = dataclasses.replace(job, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "has 2 CUDA devices and 3 slots in the hostfile" in node.check(few)["problems"][0]
    last = dataclasses.replace(few, nproc=1, devices=[3])
    assert "has 2 CUDA devices and 4 devices up to the last" in node.check(last)["problems"][0]


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text(f"{socket.gethostname()} slots=2\nhost2 slots=4\nhost3 slots=4\n")
    return str(path)


def test_each_node_gets_its_part(hostfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in job_variables(LaunchRequest([]), os.environ):  # make's TORCH_PIN is one
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_X", "1")
    request = LaunchRequest(["t.py"], ["a"], hostfile=hostfile, exclude="host2:1-3", env={"K": "v"})
    plan = make_plan(request)
    first, second, third = plan.nodes
    assert plan.local_node == 0 and first.master_port in network.PORTS and first.master_port == third.master_port
    assert (first.nproc, second.nproc, third.nproc) == (2, 1, 4) and second.devices == [0]
    assert (first.num_nodes, third.node_rank) == (3, 2)
    assert {part.master_addr for part in (first, second, third)} == {socket.gethostname()}
    secret = first.env[SECRET_VARIABLE]
    assert len(secret) == 32 and secret == second.env[SECRET_VARIABLE] == third.env[SECRET_VARIABLE]
    assert first.env == {"NCCL_X": "1", "K": "v", SECRET_VARIABLE: secret}
    assert first.job_id == third.job_id


def test_a_dry_run_prints_what_would_run(hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    request = LaunchRequest(["t.py"], ["a b"], hostfile=hostfile, launcher_args=["-F", "x y"], dry_run=True)
    plan = make_plan(request)
    assert ssh.run(request, plan) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    assert commands == [node_command(request, name, os.environ) for name in ("host2", "host3")]
    jobs = [NodeJob.from_json(line.removeprefix("#   ")) for line in lines if line.startswith("#   ")]
    assert [(job.node_rank, job.nproc) for job in jobs] == [(0, 2), (1, 4), (2, 4)]
    assert all(job.script_args == ["a b"] and SECRET_VARIABLE not in job.env for job in jobs)


# -------------------------------------------------------------------- the connection from the launcher


def ended(script: str, job_line: str = "") -> SshPart:
    """A part whose client of ssh has ended."""
    part = SshPart("host2", ["sh", "-c", script], job_line)
    wait_until(part.poll, timeout=60)
    return part


def test_a_part_that_ends_without_a_reason_is_told() -> None:
    """Its host shuts down, say, or its directory for the output cannot be made."""
    silent = """printf 'zerolite-node .{"ended": true}\\n' >&2; exit 143"""
    (failure,) = ended(silent).failures
    assert failure.node_failure == "the part of host host2 ended with status 143; the job ends on all hosts"
    assert failure.exitcode == 143
    (failure,) = ended("exit 255").failures
    assert "the connection to host2 is lost (ssh ended with status 255)" in failure.node_failure
    part = SshPart("host2", ["sh", "-c", f"head -c 5; {silent}"], "1234")
    part._giver.join()
    part.send_signal(2)
    wait_until(part.poll, timeout=60)
    assert part.failures == [] and part.status == 143, "the signal is the reason"
