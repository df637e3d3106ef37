"""Command lines of ssh, plans, addresses and what the checks make of the answers; nothing is started."""

from __future__ import annotations

import dataclasses
import io
import os
import shlex
import socket
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.helpers import wait_until
from zerolite.launcher import node, ssh
from zerolite.launcher.failures import Failure
from zerolite.launcher.job import NodeJob
from zerolite.launcher.options import LaunchRequest
from zerolite.launcher.plan import first_address, job_variables, make_plan, own_versions
from zerolite.launcher.ssh import NODE, SshPart, node_command
from zerolite.launcher.supervisor import LocalPart
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


def answered(name: str, devices: int, *problems: str, status: int | None = None, errors: bytes = b"") -> SshPart:
    """A part whose host has answered, or has not."""
    part = object.__new__(SshPart)
    part.name, part.status, part.errors = name, status, errors
    part.answer = None if status else {"problems": problems, "devices": devices}
    return part


def test_the_problems_of_all_hosts_are_told_at_once(hostfile: str) -> None:
    request = LaunchRequest(["t.py"], hostfile=hostfile)
    plan = make_plan(request)

    def told(*parts: SshPart) -> str:
        with pytest.raises(ssh.CannotStart) as caught:
            ssh.check_answers(request, plan, parts)
        return str(caught.value)

    names = [host.name for host in plan.hosts]
    first = answered(names[0], 2)
    ssh.check_answers(request, plan, [answered(name, 0) for name in names])
    refused = answered("host2", 0, status=255, errors=b"Hello\nssh: No route to host\n")
    text = told(first, refused, answered("host3", 0))
    assert "host2: cannot be reached by ssh (ssh: No route to host)" in text
    assert "host3: has 0 CUDA devices and 4 slots in the hostfile" in text, "the others have some"
    assert text.endswith("--exclude host2@host3")
    missing = answered("host2", 4, status=127, errors=b"exec: python: not found")
    assert "host2: cannot run " in told(first, missing, answered("host3", 4, "has a problem"))


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


def test_the_address_of_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "own_addresses", lambda: ["10.0.0.5", "10.1.0.5"])
    assert first_address("there", True) == "there"
    assert first_address("localhost", True) == "10.0.0.5" and first_address("127.0.1.1", False) == "127.0.1.1"


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


class Listening:
    """A node's end of a connection, of which the test holds the launcher's end."""

    def __init__(self) -> None:
        self.control, self.launcher = os.pipe()
        self.signals: list[int] = []
        part = object.__new__(LocalPart)
        part.failures = []
        self.connection = node.Connection(self.control, part, self.signals)

    def heard(self, sent: bytes) -> list[int]:
        os.write(self.launcher, sent)
        self.connection.pause()
        return self.signals


def test_signals_that_follow_the_launchers_hangup_are_heard() -> None:
    """Its SIGHUP is a signal as any other: a Ctrl-C after it, or the end of the connection, ends the ranks at once."""
    listening = Listening()
    assert listening.heard(bytes([1])) == [1]
    assert listening.heard(node.ALIVE + bytes([2])) == [1, 2]
    os.close(listening.launcher)
    listening.connection.pause()
    listening.connection.pause()
    assert listening.signals == [1, 2, 1]


def test_a_silent_launcher_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "SILENCE_S", 0.3)
    listening = Listening()
    for _ in range(20):
        assert listening.heard(node.ALIVE) == []
    said: list[list[int]] = []
    monkeypatch.setattr(node, "say", lambda sentence: said.append(list(listening.signals)))
    for _ in range(20):
        listening.connection.pause()
    assert listening.signals == [1] and said == [[1]], "the sentence may wait for ever for a full pipe"


def test_messages_come_through_whatever_ranks_write(capfd: pytest.CaptureFixture[str]) -> None:
    """A progress bar leaves the cursor within the line; a long message comes in pieces."""
    failure = Failure(host="host2", node_failure="." * 9999 + "\n")
    os.write(2, b"\r 45%")
    node.send_to_launcher(failures=[dataclasses.asdict(failure)])
    node.send_to_launcher(ended=True)
    written = capfd.readouterr().err.encode()
    assert written.count(node.MARK) > 3 and max(map(len, written.splitlines())) < 4096
    part = object.__new__(SshPart)
    part.status, part.answer, part._message, part._asked_to_end, part._ended_by_itself = None, {}, b"", False, False
    forged = b"".join(
        b"zerolite-node .%s\n" % text for text in (b"3", b"{}", b'"ended"', b'{"failures": [{}]}', b"[[]]")
    )
    part._forward(io.BytesIO(forged + written), shown := io.BytesIO())
    assert part.failures == [failure] and part._ended_by_itself and shown.getvalue() == b"\r 45%"
    assert part.answer == {}


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


def test_a_long_job_line_waits_for_no_host() -> None:
    part = SshPart("host2", ["sleep", "100"], "x" * 1_000_000)
    part.send_signal(2)
    wait_until(part.poll, timeout=60)
    assert part.status == 137


def test_a_progress_bar_comes_before_its_line_ends() -> None:
    read, write = os.pipe()
    part = object.__new__(SshPart)
    part.answer, part._asked_to_end = {}, False
    shown = io.BytesIO()
    thread = threading.Thread(target=part._forward, args=(open(read, "rb"), shown))
    thread.start()
    os.write(write, b"10%\r20%")
    try:
        wait_until(lambda: shown.getvalue() == b"10%\r", timeout=20)
    finally:
        os.close(write)
        thread.join()
    assert shown.getvalue() == b"10%\r20%"
