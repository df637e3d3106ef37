"""Command lines of the launchers, plans, addresses and what the checks make of the answers; nothing is started."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
from pathlib import Path

import pytest

from zerolite.launcher import node_main, remote
from zerolite.launcher.hosts import Host, HostsError
from zerolite.launcher.job import NodeJob, module_arguments
from zerolite.launcher.options import LaunchRequest
from zerolite.launcher.plan import check_reachable, first_addresses, make_node_jobs, make_plan, own_node_job
from zerolite.launcher.remote_commands import (
    NODE_MODULE,
    Route,
    exported_variables,
    ssh_commands,
    tool_command,
    unpack,
)
from zerolite.utils import network
from zerolite.utils.listening import SECRET_VARIABLE

NAMES = ["host1", "host2", "host3"]


def make_route(launcher: str, **changes: object) -> Route:
    fields: dict[str, object] = {"here": 0, "cwd": "/work dir", "interpreter": "/opt/python"}
    return Route(launcher, NAMES, **{**fields, **changes})  # type: ignore[arg-type]


def test_ssh_runs_the_first_part_here_and_the_others_by_ssh() -> None:
    route = make_route("ssh", launcher_args=["-F", "my config"], ssh_port=2222)
    environ = {"PYTHONPATH": "/a b:/c", "PATH": "/bin", "NCCL_DEBUG": "INFO"}
    first, second, third = ssh_commands(route, environ)
    assert list(first.argv) == ["/opt/python", *module_arguments(NODE_MODULE)]
    assert second.argv[:3] == ["ssh", "-F", "my config"] and "BatchMode=yes" in second.argv
    assert second.argv[-4:-1] == ["-p", "2222", "host2"] and third.argv[-2] == "host3"
    start = f"/opt/python {shlex.join(module_arguments(NODE_MODULE))} ssh"
    assert second.argv[-1] == f"cd '/work dir'; exec env 'PYTHONPATH=/a b:/c' {start}"
    assert shlex.split(second.shell_line()) == list(second.argv)
    route = Route("ssh", ["host1", "ann@fd00::3"], here=0, cwd="/", interpreter="python")
    command = ssh_commands(route, {})[1]
    assert command.argv[0] == "ssh" and command.argv[-2] == "ann@fd00::3", "ssh gets the user"


@pytest.mark.parametrize(
    ("launcher", "start", "node"),
    [
        ("pdsh", ["pdsh", "-R", "ssh", "-S", "-N", "-f", "1024", "-x", "y", "-w", "host1,host2,host3"], "%h"),
        ("openmpi", ["mpirun", "-x", "y", "-n", "3", "--map-by", "ppr:1:node"], "OMPI_COMM_WORLD_RANK"),
        ("slurm", ["srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"], "SLURMD_NODENAME"),
    ],
)
def test_one_command_for_all_hosts(launcher: str, start: list[str], node: str) -> None:
    route = make_route(launcher, launcher_args=["-x", "y"], cwd="/100%")
    command = tool_command(route, "PAYLOAD", {})
    assert command.argv[: len(start)] == start
    cwd = "/100%%" if launcher == "pdsh" else "/100%"
    assert command.argv[-1] == f"cd {cwd}; exec /opt/python {shlex.join(module_arguments(NODE_MODULE))} PAYLOAD {node}"
    assert any("host1:1,host2:1,host3:1" in word for word in command.argv) == (launcher == "openmpi")
    assert ("--nodelist=host1,host2,host3" in command.argv) == (launcher == "slurm")


def test_launchers_that_cannot_name_a_host() -> None:
    anns, ipv6 = Host("a", 1, user="ann"), Host("fd00::3", 1)
    for launcher in ("openmpi", "slurm"):
        with pytest.raises(HostsError, match="logs in nowhere: leave out 'ann@'"):
            check_reachable([anns], launcher)
    for launcher in ("pdsh", "openmpi"):
        with pytest.raises(HostsError, match=f"by an IPv6 address, which --launcher {launcher} does not take"):
            check_reachable([ipv6], launcher)
    check_reachable([anns, ipv6], "ssh")


def test_a_host_says_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    job = NodeJob(["t.py"], job_id="abc", nproc=3, cwd=str(tmp_path), versions=node_main.own_versions())
    assert node_main.find_problems(job) == []
    other = dataclasses.replace(job, versions={**job.versions, "torch": "1.0"}, cwd="/nowhere")
    torch, directory = node_main.find_problems(other)
    assert "started with torch 1.0" in torch and "has no working directory '/nowhere'" in directory
    assert "there is no script 'x.py'" in node_main.find_problems(dataclasses.replace(job, target=["x.py"]))[0]
    few = dataclasses.replace(job, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "has 2 CUDA devices and 3 slots in the hostfile" in node_main.find_problems(few)[0]
    last = dataclasses.replace(few, nproc=1, devices=[3])
    assert "has 2 CUDA devices and 4 devices up to the last" in node_main.find_problems(last)[0]


class Answered:
    """A part whose host has answered, or has not."""

    def __init__(self, name: str, devices: int, *problems: str, status: int | None = None, errors: bytes = b"") -> None:
        self.name, self.status, self.errors = name, status, errors
        self.answer = None if status else {"problems": problems, "devices": devices}


def test_the_problems_of_all_hosts_are_told_at_once(hostfile: str) -> None:
    request = LaunchRequest(["t.py"], hostfile=hostfile)
    plan = make_plan(request)
    plan = dataclasses.replace(plan, route=dataclasses.replace(plan.route, here=None))
    nodes = make_node_jobs(request, plan)
    names = [host.name for host in plan.hosts]

    def told(*parts: Answered) -> str:
        with pytest.raises(remote.CannotStart) as caught:
            remote.check_answers(plan, nodes, {part.name: part for part in parts})  # type: ignore[misc]
        return str(caught.value)

    first = Answered(names[0], 2)
    remote.check_answers(plan, nodes, {n: Answered(n, 0) for n in names})  # type: ignore[misc]
    refused = Answered("host2", 0, status=255, errors=b"Hello\nssh: No route to host\n")
    text = told(first, refused, Answered("host3", 0))
    assert "host2: cannot be reached by ssh (ssh: No route to host)" in text
    assert "host3: has 0 CUDA devices and 4 slots in the hostfile" in text, "the others have some"
    assert text.endswith("--exclude host2@host3")
    missing = Answered("host2", 4, status=127, errors=b"exec: python: not found")
    assert "host2: cannot run " in told(first, missing, Answered("host3", 4, "has a problem"))


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text(f"{socket.gethostname()} slots=2\nhost2 slots=4\nhost3 slots=4\n")
    return str(path)


def test_each_node_gets_its_part(hostfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in exported_variables(os.environ):  # make's TORCH_PIN is one
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_X", "1")
    request = LaunchRequest(["t.py"], ["a"], hostfile=hostfile, exclude="host2:1-3", num_nodes=(2, 8), env={"K": "v"})
    plan = make_plan(request)
    assert plan.route.here == 0 and plan.min_nodes == 2 and plan.port in network.PORTS
    first, second, third = make_node_jobs(request, plan)
    assert (first.nproc, second.nproc, third.nproc) == (2, 1, 4) and second.devices == [0]
    assert (first.min_nodes, first.max_nodes, third.node_rank) == (2, 3, 2)
    assert {part.master_addr for part in (first, second, third)} == {socket.gethostname()}
    secret = first.env[SECRET_VARIABLE]
    assert len(secret) == 32 and secret == second.env[SECRET_VARIABLE] == third.env[SECRET_VARIABLE]
    assert first.env == {"NCCL_X": "1", "K": "v", SECRET_VARIABLE: secret}
    assert first.job_id == third.job_id and first.watch_stdin


def test_addresses_of_the_first_host_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "own_addresses", lambda: ["10.0.0.5", "10.1.0.5"])
    monkeypatch.setattr(network, "resolve", lambda name: {"here": ["127.0.1.1"], "there": ["10.0.0.9"]}.get(name, []))
    assert first_addresses(None, "here", True) == ["here", "10.0.0.5", "10.1.0.5"], "as Debian names a machine"
    assert first_addresses(None, "there", True) == ["there", "10.0.0.9"]
    assert first_addresses(None, "localhost", True) == ["10.0.0.5", "10.1.0.5"]
    assert first_addresses(None, "alias", False) == ["alias"]
    assert first_addresses("10.9.9.9", "here", True) == ["10.9.9.9"]


def test_several_nodes_need_a_hostfile_or_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostsError, match="--num-nodes asks for 2 hosts and nothing says which: give a --hostfile"):
        make_plan(LaunchRequest(["t.py"], num_nodes=(2, 2)))
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(HostsError, match="SLURM_JOB_NODELIST is not set"):
        make_plan(LaunchRequest(["t.py"], launcher="slurm"))


def test_a_node_with_a_command_of_its_own_finds_its_place(hostfile: str) -> None:
    part = own_node_job(LaunchRequest(["t.py"], hostfile=hostfile), 29500)
    assert (part.node_rank, part.nproc, part.max_nodes, part.master_port) == (0, 2, 3, 29500)
    part = own_node_job(LaunchRequest(["t.py"], hostfile=hostfile, node_rank=2, master_addr="a", master_port=5), 29500)
    assert (part.node_rank, part.nproc, part.master_addr, part.master_port) == (2, 4, "a", 5)
    with pytest.raises(HostsError, match="--node-rank is 3, and there are 3 hosts"):
        own_node_job(LaunchRequest(["t.py"], hostfile=hostfile, node_rank=3), 29500)
    with pytest.raises(HostsError, match="this host is none of host2, host3"):
        own_node_job(LaunchRequest(["t.py"], hostfile=hostfile, exclude=socket.gethostname()), 29500)


def test_a_dry_run_prints_what_would_run(hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    request = LaunchRequest(["t.py"], ["a b"], hostfile=hostfile, launcher_args=["-F", "x y"], dry_run=True)
    assert remote.run(request) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    route = make_plan(request).route
    assert commands == [list(command.argv) for command in ssh_commands(route)]
    jobs = [NodeJob.from_json(line.removeprefix("#   ")) for line in lines if line.startswith("#   ")]
    assert [(job.node_rank, job.nproc) for job in jobs] == [(0, 2), (1, 4), (2, 4)]
    assert all(job.script_args == ["a b"] for job in jobs)
    request = LaunchRequest(["t.py"], hostfile=hostfile, launcher="openmpi", dry_run=True)
    assert remote.run(request) == 0
    (command,) = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    packed = shlex.split(shlex.split(command)[-1])[-2]
    assert [NodeJob.from_json(job).nproc for job in unpack(packed)["jobs"]] == [2, 4, 4]
    assert remote.run(LaunchRequest(["t.py"], hostfile=hostfile, include="host7")) == 2
    assert "zerolite: --include 'host7' names the host 'host7'" in capsys.readouterr().err
