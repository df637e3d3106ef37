"""Command lines of the launchers, plans, addresses and what the checks make of the answers; nothing is started."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path

import pytest

from zerolite.launcher import remote
from zerolite.launcher.check import CheckSpec, Facts, Reach, candidate_addresses, node_index, own_versions
from zerolite.launcher.hosts import Host, HostsError
from zerolite.launcher.job import NodeJob, gloo_variables, run_module
from zerolite.launcher.options import LaunchRequest
from zerolite.launcher.plan import check_reachable, make_node_jobs, make_plan, own_part
from zerolite.launcher.preflight import Answer, clock_offset, find_problems
from zerolite.launcher.remote_commands import Route, exported_variables, make_commands, pack, unpack
from zerolite.utils import network
from zerolite.utils.listening import SECRET_VARIABLE

NAMES = ["host1", "host2", "host3"]
SPEC = CheckSpec("abc", NAMES, ["host1"], True, 29500, "/work dir", ["train.py"])


def make_route(launcher: str, **changes: object) -> Route:
    fields: dict[str, object] = {"here": 0, "cwd": "/work dir", "interpreter": "/opt/python"}
    return Route(launcher, NAMES, **{**fields, **changes})  # type: ignore[arg-type]


def test_ssh_runs_the_first_part_here_and_the_others_by_ssh() -> None:
    route = make_route("ssh", launcher_args=["-F", "my config"], ssh_port=2222)
    environ = {"PYTHONPATH": "/a b:/c", "PATH": "/bin", "NCCL_DEBUG": "INFO"}
    first, second, third = make_commands(route, "some.module", None, environ)
    assert list(first.argv) == ["/opt/python", *run_module("some.module")] and list(first.nodes) == [0]
    assert second.argv[:3] == ["ssh", "-F", "my config"] and "BatchMode=yes" in second.argv
    assert second.argv[-4:-1] == ["-p", "2222", "host2"] and third.argv[-2] == "host3"
    remote = second.argv[-1]
    assert (
        remote
        == f"cd '/work dir'; exec env 'PYTHONPATH=/a b:/c' /opt/python {shlex.join(run_module('some.module'))} ssh"
    )
    assert shlex.split(second.shell_line()) == list(second.argv)


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
    (command,) = make_commands(route, "some.module", "PAYLOAD", {})
    assert command.argv[: len(start)] == start and list(command.nodes) == [0, 1, 2]
    cwd = "/100%%" if launcher == "pdsh" else "/100%"
    assert command.argv[-1] == f"cd {cwd}; exec /opt/python {shlex.join(run_module('some.module'))} PAYLOAD {node}"
    assert any("host1:1,host2:1,host3:1" in word for word in command.argv) == (launcher == "openmpi")
    assert ("--nodelist=host1,host2,host3" in command.argv) == (launcher == "slurm")
    with pytest.raises(ValueError, match="cannot give each host"):
        make_commands(route, "some.module", None, {})


def test_what_is_packed_comes_back_without_characters_that_shells_know() -> None:
    value = {"jobs": ["{\"a\": '$x'}"], "hosts": NAMES}
    text = pack(value)
    assert unpack(text) == value and shlex.quote(text) == text.replace("=", "=") and "%" not in text


def test_variables_for_all_hosts() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "GLOO_X": "1",
        "TORCH_X": "2",
        "ZEROLITE_JOB_ID": "3",
        "HOME": "/root",
        "RANK": "0",
    }
    assert exported_variables(environ) == {"NCCL_DEBUG": "INFO", "GLOO_X": "1", "TORCH_X": "2"}


def test_a_process_learns_which_node_it_is() -> None:
    assert node_index("2", NAMES, {}) == 2
    assert node_index("host2", NAMES, {}) == 1
    assert node_index("SLURMD_NODENAME", NAMES, {"SLURMD_NODENAME": "host3"}) == 2
    assert node_index("OMPI_COMM_WORLD_RANK", NAMES, {"OMPI_COMM_WORLD_RANK": "1"}) == 1
    for told in ("3", "host9", "OMPI_COMM_WORLD_RANK"):
        with pytest.raises(ValueError, match=f"started on '{told}', which is none of the hosts: host1, host2, host3"):
            node_index(told, NAMES, {})


def test_addresses_of_the_first_host_to_try() -> None:
    environ = {"SSH_CONNECTION": "10.0.0.1 5000 10.0.0.2 22"}
    assert candidate_addresses(SPEC, environ) == ["host1", "10.0.0.1"]
    assert candidate_addresses(SPEC, {}) == ["host1"]
    given = CheckSpec("abc", NAMES, ["10.9.9.9"], False, 29500, "/", ["train.py"])
    assert candidate_addresses(given, environ) == ["10.9.9.9"]


def make_facts(host: str, **changes: object) -> Facts:
    fields: dict[str, object] = {"time": 1000.0, "versions": own_versions(), "at_work": True, "target_problem": None}
    return Facts(host=host, **{**fields, "devices": 0, **changes})  # type: ignore[arg-type]


def facts_with_devices(host: str, devices: int) -> Facts:
    return make_facts(host, devices=devices)


def find(hosts: list[Host], answers: list[Answer]) -> list[str]:
    return [f"{host}: {problem}" for host, problem in find_problems(make_route("ssh"), hosts, SPEC, answers)]


def make_answers(*facts: Facts | None) -> list[Answer]:
    answers = [Answer(one, Reach("host1", "eth0"), "did not answer", asked=999.0, answered=1002.0) for one in facts]
    answers[0].reach = Reach(interface="eth0")
    return answers


@pytest.mark.parametrize(
    ("launcher", "host", "complaint"),
    [
        ("openmpi", Host("a", 1, user="ann"), "logs in nowhere: leave out 'ann@'"),
        ("slurm", Host("a", 1, user="ann"), "logs in nowhere"),
        ("pdsh", Host("fd00::3", 1), "by an IPv6 address, which --launcher pdsh does not take"),
        ("openmpi", Host("fd00::3", 1), "which --launcher openmpi does not take"),
    ],
)
def test_launchers_that_cannot_name_a_host(launcher: str, host: Host, complaint: str) -> None:
    with pytest.raises(HostsError, match=complaint):
        check_reachable([host], launcher)
    check_reachable([host], "ssh")


def test_ssh_gets_the_user_and_the_checks_the_name() -> None:
    route = Route("ssh", ["host1", "ann@fd00::3"], here=0, cwd="/", interpreter="python")
    command = make_commands(route, "zerolite.launcher.node", None, {})[1]
    assert command.argv[0] == "ssh" and command.argv[-2] == "ann@fd00::3"


def test_hosts_that_fit_have_no_problems() -> None:
    hosts = [Host(name, 2) for name in NAMES]
    assert find(hosts, make_answers(*(make_facts(name) for name in NAMES))) == []
    assert find(hosts, make_answers(*(make_facts(name, devices=2) for name in NAMES))) == []


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        (None, "host2: did not answer"),
        (make_facts("host2", time=1100.0), "host2: has a clock 98 s ahead of this host's: expected at most 60 s"),
        (make_facts("host2", time=900.0), "host2: has a clock 99 s behind this host's"),
        (make_facts("host1"), "host2: calls itself 'host1', as host1 does"),
        (make_facts("host2", versions={**own_versions(), "torch": ""}), "host2: has no torch where torch"),
        (make_facts("host2", versions={**own_versions(), "python": "2.7"}), "host2: has python 2.7 where python 3."),
        (make_facts("host2", at_work=False, target_problem="x"), "host2: has no working directory '/work dir'"),
        (make_facts("host2", target_problem="there is no script"), "host2: cannot run the job: there is no script"),
    ],
)
def test_what_does_not_fit_is_named(second: Facts | None, complaint: str) -> None:
    hosts = [Host(name, 2) for name in NAMES]
    (problem,) = find(hosts, make_answers(make_facts("host1"), second, make_facts("host3")))
    assert problem.startswith(complaint)


def test_slots_without_devices_are_named() -> None:
    hosts = [Host("host1", 2), Host("host2", 3), Host("host3", 1, (3,))]
    found = find(hosts, make_answers(*map(facts_with_devices, NAMES, (2, 1, 3))))
    assert [problem.partition(":")[0] for problem in found] == ["host2", "host3"]
    assert "has 1 CUDA device and 3 slots in the hostfile" in found[0]
    assert "has 3 CUDA devices and 4 devices up to the last that is asked for" in found[1]
    found = find(hosts, make_answers(*map(facts_with_devices, NAMES, (2, 0, 4))))
    assert len(found) == 1 and found[0].startswith("host2: has 0 CUDA devices")


def test_a_host_that_does_not_reach_the_first_is_named_unless_that_one_is_to_blame() -> None:
    hosts = [Host(name, 1) for name in NAMES]
    answers = make_answers(*(make_facts(name) for name in NAMES))
    answers[2].reach = Reach(failed={"host1": "no answer", "10.0.0.1": "Connection refused"})
    (problem,) = find(hosts, answers)
    assert problem.startswith(
        "host3: cannot reach host1 at port 29500 (host1: no answer; 10.0.0.1: Connection refused)"
    )
    answers[0].facts = make_facts("host1", port_problem="Address already in use")
    (problem,) = find(hosts, answers)
    assert problem.startswith("host1: cannot listen at port 29500")


def test_a_clock_is_right_if_it_was_read_while_it_was_asked() -> None:
    assert clock_offset(1001.0, 1000.0, 1020.0) == 0.0
    assert clock_offset(1030.0, 1000.0, 1020.0) == 10.0
    assert clock_offset(995.0, 1000.0, 1020.0) == -5.0


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
    reaches = [Reach(None, "eth1"), Reach("node-one", "eth0"), Reach("10.0.0.1", "")]
    first, second, third = make_node_jobs(request, plan, reaches)
    assert (first.nproc, second.nproc, third.nproc) == (2, 1, 4) and second.devices == [0]
    assert (first.min_nodes, first.max_nodes, third.node_rank) == (2, 3, 2)
    assert (first.master_addr, second.master_addr, third.master_addr) == ("node-one", "node-one", "10.0.0.1")
    secret = first.env.pop(SECRET_VARIABLE)
    assert len(secret) == 32 and secret == second.env[SECRET_VARIABLE] == third.env[SECRET_VARIABLE]
    assert first.env == {"NCCL_X": "1", "K": "v", "GLOO_SOCKET_IFNAME": "eth1"}
    assert "GLOO_SOCKET_IFNAME" not in third.env
    assert first.job_id == third.job_id and first.watch_stdin
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert make_node_jobs(request, plan, reaches)[0].env["GLOO_SOCKET_IFNAME"] == "mine"


def test_several_nodes_need_a_hostfile() -> None:
    with pytest.raises(HostsError, match="--num-nodes asks for 2 hosts and nothing says which: give a --hostfile"):
        make_plan(LaunchRequest(["t.py"], num_nodes=(2, 2)))


def test_slurm_needs_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(HostsError, match="SLURM_JOB_NODELIST is not set"):
        make_plan(LaunchRequest(["t.py"], launcher="slurm"))


def test_a_node_with_a_command_of_its_own_finds_its_place(hostfile: str) -> None:
    part = own_part(LaunchRequest(["t.py"], hostfile=hostfile), 29500)
    assert (part.node_rank, part.nproc, part.max_nodes, part.master_port) == (0, 2, 3, 29500)
    part = own_part(LaunchRequest(["t.py"], hostfile=hostfile, node_rank=2, master_addr="a", master_port=5), 29500)
    assert (part.node_rank, part.nproc, part.master_addr, part.master_port) == (2, 4, "a", 5)
    with pytest.raises(HostsError, match="--node-rank is 3, and there are 3 hosts"):
        own_part(LaunchRequest(["t.py"], hostfile=hostfile, node_rank=3), 29500)
    with pytest.raises(HostsError, match="this host is none of host2, host3"):
        own_part(LaunchRequest(["t.py"], hostfile=hostfile, exclude=socket.gethostname()), 29500)


def test_a_dry_run_prints_what_would_run(hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    request = LaunchRequest(["t.py"], ["a b"], hostfile=hostfile, launcher_args=["-F", "x y"], dry_run=True)
    assert remote.run(request) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    route = make_plan(request).route
    assert commands == [list(command.argv) for command in make_commands(route, "zerolite.launcher.node", None)]
    jobs = [NodeJob.from_json(line.removeprefix("#   ")) for line in lines if line.startswith("#   ")]
    assert [(job.node_rank, job.nproc) for job in jobs] == [(0, 2), (1, 4), (2, 4)]
    assert all(job.script_args == ["a b"] for job in jobs)
    request = LaunchRequest(["t.py"], hostfile=hostfile, launcher="openmpi", dry_run=True)
    assert remote.run(request) == 0
    (command,) = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    packed = shlex.split(shlex.split(command)[-1])[-2]
    assert [NodeJob.from_json(job).nproc for job in unpack(packed)["jobs"]] == [2, 4, 4]


def test_a_host_that_cannot_be_used_is_an_exit_status_of_two(hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert remote.run(LaunchRequest(["t.py"], hostfile=hostfile, include="host7")) == 2
    assert "zerolite: --include 'host7' names the host 'host7'" in capsys.readouterr().err


def test_this_host() -> None:
    assert network.is_this_host("localhost") and network.is_this_host("127.0.1.1")
    assert network.is_this_host(socket.gethostname()) and not network.is_this_host("192.0.2.77")
    assert network.interface_of("127.0.0.1") is None and network.interface_of("::ffff:127.0.0.1") is None
    assert network.plain_address("::ffff:10.0.0.1") == "10.0.0.1"


def test_gloo_is_told_an_interface_only_where_it_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interface_addresses", lambda: iter([("lo", "127.0.0.1"), ("eth7", "10.0.0.5")]))
    monkeypatch.setattr(network, "address_towards", lambda name: "10.0.0.5" if name == "host1" else "127.0.1.1")
    job = NodeJob(["t.py"], job_id="abc", max_nodes=2, master_addr="host1")
    assert gloo_variables(job, {}) == {"GLOO_SOCKET_IFNAME": "eth7"}
    assert gloo_variables(job, {"GLOO_SOCKET_IFNAME": "x"}) == {}
    assert gloo_variables(NodeJob(["t.py"], job_id="abc", master_addr="host1"), {}) == {}
    first = NodeJob(["t.py"], job_id="abc", max_nodes=2, master_addr="localhost")
    assert gloo_variables(first, {}) == {"GLOO_SOCKET_IFNAME": "eth7"}
