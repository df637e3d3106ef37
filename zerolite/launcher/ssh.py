"""A job on several hosts: the other hosts' parts, reached by ssh, the checks of all hosts, and the start."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from zerolite.launcher.failures import Failure, exit_status
from zerolite.launcher.job import module_arguments
from zerolite.launcher.node import ALIVE, GO, LAST, MARK, check, find_device_problems
from zerolite.launcher.options import LaunchRequest
from zerolite.launcher.plan import JobPlan
from zerolite.launcher.processes import exit_code
from zerolite.launcher.supervisor import WAIT_S, LocalPart, Part, make_log_dir, record_signals, say, wait_for

NODE = module_arguments("zerolite.launcher.node")

CHECK_S = 45.0
"""Seconds within which a host must report that it can take part."""

SSH_OPTIONS = {
    "BatchMode": "yes",  # no question for a password, which would wait for ever
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",  # the connection is lost after 20 s: three requests, and none was answered
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",  # a connection of its own: a shared one has its first user's options, and is a process
    "ControlPath": "none",  # that goes on after the job
}

PYTHON_VARIABLES = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "PYTHONNOUSERSITE", "PYTHONUSERBASE", "PYTHONOPTIMIZE"),
    *("PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONWARNINGS", "PYTHONFAULTHANDLER"),
)
"""Variables of the interpreter. No others stand on a command line, which all users of a host can read."""

ALIVE_S = 1.0
"""Seconds between two signs of life, without which the hosts end their parts."""

_terminal = threading.Lock()


class CannotStart(Exception):
    """Some hosts cannot take part; the message names them and says what to do."""


def node_command(request: LaunchRequest, host: str, environ: Mapping[str, str]) -> list[str]:
    """Return the command that starts the part of another host.

    It starts in this working directory, by the same Python, with its variables: :data:`PYTHON_VARIABLES`.
    `cd` and Python are joined by `;`, not `&&`: if the directory is missing, the part starts elsewhere and reports it.
    """
    settings = [f"{key}={value}" for key, value in sorted(environ.items()) if key in PYTHON_VARIABLES]
    words = [*(["env", *settings] if settings else []), sys.executable, *NODE]
    options = [word for key, value in SSH_OPTIONS.items() for word in ("-o", f"{key}={value}")]
    if request.ssh_port is not None:
        options += ["-p", str(request.ssh_port)]
    line = f"cd {shlex.quote(os.getcwd())}; exec {shlex.join(words)}"
    return ["ssh", *request.launcher_args, *options, host, line]


class SshPart(Part):
    """The part of another host: a client of ssh, whose input carries the job, a byte to start, signals, signs of life.

    Attributes:
        answer: report of the host before the start; None until it has come.
        errors: output on stderr until then.
    """

    def __init__(self, name: str, command: Sequence[str], job_line: str) -> None:
        """Start the client of ssh.

        Args:
            name: name of the host.
            command: the command to start.
            job_line: the part, as the first line of its input.
        """
        super().__init__(name)
        self.answer: dict[str, Any] | None = None
        self.errors = b""
        self._message = b""  # pieces of a message that has not come whole
        self._ended_by_itself = self._asked_to_end = self._signalled = False
        self._alive_at = float("inf")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self.pid = self._process.pid
        self._forwarders = [
            threading.Thread(target=self._forward, args=(source, target.buffer), daemon=True)
            for source, target in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        ]
        for thread in self._forwarders:
            thread.start()
        # The pipe may take less than the whole line as long as the host does not read.
        self._giver = threading.Thread(target=self._write, args=(job_line.encode() + b"\n",), daemon=True)
        self._giver.start()

    def poll(self) -> bool:
        if self.status is None and (code := exit_code(self.pid)) is not None:
            self._process.returncode = code
            for thread in self._forwarders:
                thread.join(2)
            self.status = code if code >= 0 else 128 - code
            if self.status and not self._asked_to_end:
                self._explain(self.status)
        elif (now := time.monotonic()) > self._alive_at:
            self._alive_at = now + ALIVE_S
            self._write(ALIVE)
        return self.status is not None

    def _explain(self, status: int) -> None:
        """Add a failure if the connection was lost, or if the part has ended without a reason."""
        if not self._ended_by_itself:
            how, exitcode = f"the connection to {self.name} is lost (ssh ended with status {status})", 1
        elif not self._signalled and exit_status(self.failures) == 0:
            how, exitcode = f"the part of host {self.name} ended with status {status}", status
        else:
            return
        sentence = f"{how}; the job ends on all hosts"
        self.failures.append(Failure(host=self.name, exitcode=exitcode, seen=time.time(), node_failure=sentence))

    def start(self) -> None:
        """Tell the host to start its ranks."""
        self._write(GO)
        self._alive_at = time.monotonic()

    def send_signal(self, number: int) -> None:
        self._signalled = True
        if self._giver.is_alive():  # the host has not read what its part is
            self.kill()
        else:
            self._write(bytes([number]))

    def end(self) -> None:
        """Close the input of the part, upon which it ends."""
        self._asked_to_end = True
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the client of ssh; the host then notices that its connection has closed."""
        self._asked_to_end = True
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, or its input is closed
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _forward(self, source: Any, target: BinaryIO) -> None:
        rest = b""  # a line without an end so far
        while data := source.read1(1 << 16):
            lines = (rest + data).splitlines(keepends=True)  # a progress bar ends its lines by a carriage return
            rest = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
            self._forward_lines(lines, target)
        self._forward_lines([rest], target)
        source.close()

    def _forward_lines(self, lines: Sequence[bytes], target: BinaryIO) -> None:
        for line in lines:
            # Rank 0 may have left its cursor in the middle of the line, as progress bars do.
            line, mark, piece = line.partition(MARK)
            if mark:
                self._read_piece(piece)
            if self.answer is None:
                self.errors += line  # a greeting of the login shell, or the reason why no answer comes
            elif line and not (self._asked_to_end and line.startswith(b"zerolite: ")):  # reports of an end from here
                with _terminal, suppress(OSError, ValueError):
                    target.write(line)
                    target.flush()

    def _read_piece(self, piece: bytes) -> None:
        self._message += piece[1:].rstrip(b"\n")
        if not piece.startswith(LAST):
            return
        text, self._message = self._message, b""
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # the ranks wrote it, or into it
            message = dict(json.loads(text))
            if "ended" in message:
                self._ended_by_itself = True
            elif "problems" in message:
                self.answer = message
            elif self.status is None:  # otherwise the connection was lost before
                self.failures = [Failure.from_json(fields) for fields in message["failures"]]


def run(request: LaunchRequest, job: JobPlan) -> int:
    """Run a job on several hosts and return its exit status, 2 if it cannot be started."""
    commands = [node_command(request, host.name, os.environ) for host in job.hosts]
    if request.dry_run:
        print_commands(job, commands)
        return 0
    signals = record_signals()
    ssh_clients: set[int] = set()
    local: LocalPart | None = None
    parts: list[LocalPart | SshPart] = []
    status = 2
    if job.local_node is not None:
        log_dir = make_log_dir(job.nodes[job.local_node])
        if log_dir is None:
            return 2
        local = LocalPart(job.nodes[job.local_node], log_dir, ssh_clients)
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z would stop the signs of life
    try:
        for i, command in enumerate(commands):
            if local is not None and i == job.local_node:
                parts.append(local)
            else:
                parts.append(start_ssh(job.hosts[i].name, command, job.nodes[i].to_json()))
                ssh_clients.add(parts[-1].pid)
        await_answers([part for part in parts if isinstance(part, SshPart)], signals)
        if not signals:
            check_answers(request, job, parts)
            for part in parts:
                part.start()
        status = wait_for(parts, signals)
    except CannotStart as error:
        say(str(error))
    finally:
        for part in parts if local is None or local in parts else [*parts, local]:
            if part.status is None:
                part.kill()
        if local is not None:
            local.finish(signals, status)
    return status


def start_ssh(name: str, command: Sequence[str], job_line: str) -> SshPart:
    """Start the part of another host. Raises CannotStart if there is no ssh."""
    try:
        return SshPart(name, command, job_line)
    except OSError as error:
        raise CannotStart(
            f"nothing was started: 'ssh' cannot be run ({error.strerror}): install it, or start each host by a command "
            "of its own: `torchrun --nnodes`"
        ) from None


def await_answers(parts: Sequence[SshPart], signals: Sequence[int]) -> None:
    """Wait until all hosts have reported or failed to, a signal comes, or the time is over."""
    deadline = time.monotonic() + CHECK_S
    while any(part.answer is None and not part.poll() for part in parts) and not signals:
        if time.monotonic() > deadline:
            return
        time.sleep(WAIT_S)


def check_answers(request: LaunchRequest, job: JobPlan, parts: Sequence[LocalPart | SshPart]) -> None:
    """Raise CannotStart with the problems of all hosts, if any."""
    answers = [part.answer if isinstance(part, SshPart) else check(job.nodes[i]) for i, part in enumerate(parts)]
    devices_found = any(answer["devices"] for answer in answers if answer is not None)
    problems: dict[str, list[str]] = {}
    for host, node, part, answer in zip(job.hosts, job.nodes, parts, answers, strict=True):
        if answer is None:
            assert isinstance(part, SshPart)
            of_host = [describe_no_answer(request, part)]
        else:
            of_host = list(answer["problems"])
            if devices_found and not answer["devices"]:  # a host without devices is wrong only if others have some
                of_host += find_device_problems(node, 0)
        if of_host:
            problems[host.name] = of_host
    if not problems:
        return
    lines = ["nothing was started, since not all hosts can take part:"]
    lines += [f"  {name}: {problem}" for name, of_host in problems.items() for problem in of_host]
    if job.hosts[0].name not in problems:
        lines.append(f"put that right, or leave out what cannot take part: --exclude {'@'.join(problems)}")
    raise CannotStart("\nzerolite: ".join(lines))


def describe_no_answer(request: LaunchRequest, part: SshPart) -> str:
    """Say why a host has not answered."""
    if part.status is None:
        return f"has not answered within {CHECK_S:.0f} s: check that it is up, and what its login shell does"
    errors = part.errors.decode(errors="replace").strip()
    last = errors.splitlines()[-1] if errors else "no message"
    if part.status == 255:
        by_hand = shlex.join(["ssh", *request.launcher_args, part.name])
        return (
            f"cannot be reached by ssh ({last}): check its name and the network, and that {by_hand!r} works without a "
            "password"
        )
    if "No module named 'zerolite" in errors or "No module named zerolite" in errors:
        return f"has no zerolite for {sys.executable!r}: install it there as here, or share the directory it is in"
    if part.status in (126, 127):
        return (
            f"cannot run {sys.executable!r}, the Python of this job ({last}): install the same environment at the same "
            "path, or share it"
        )
    return f"has not reported; ssh ended with status {part.status} ({last})"


def print_commands(job: JobPlan, commands: Sequence[Sequence[str]]) -> None:
    """Print the commands and the hosts on which they would run, and run nothing."""
    for i, command in enumerate(commands):
        if i == job.local_node:
            print(f"# {job.hosts[i].name}, this host, runs its part without ssh:\n#   {job.nodes[i].to_json()}")
        else:
            print(f"# {job.hosts[i].name}; to its standard input this line, then 'g':\n#   {job.nodes[i].to_json()}")
            print(shlex.join(command))
