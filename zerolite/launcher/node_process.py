"""Processes of the nodes as the starting host sees them: command, output, signals, end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from zerolite.launcher.job import module_arguments
from zerolite.launcher.node import GO, MARK
from zerolite.launcher.options import LaunchRequest
from zerolite.launcher.plan import JobPlan

NODE = module_arguments("zerolite.launcher.node")

CONNECT_TIMEOUT_S = 10
KEEPALIVE_S, KEEPALIVES = 5, 4
"""A connection without an answer for KEEPALIVE_S x KEEPALIVES seconds is lost."""

SSH_OPTIONS = {
    "BatchMode": "yes",  # no question for a password, which would wait for ever
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ServerAliveInterval": str(KEEPALIVE_S),
    "ServerAliveCountMax": str(KEEPALIVES),
}

_terminal = threading.Lock()


def node_commands(request: LaunchRequest, job: JobPlan, environ: Mapping[str, str]) -> list[list[str]]:
    """Return the command of each node: this host's needs no ssh, and the others get `ssh` as their only argument.

    They start in this working directory, by the same Python, with this process's ``PYTHON*`` variables.
    `cd` and Python are joined by `;`, not `&&`: if the directory is missing, the node starts elsewhere and reports it.
    """
    settings = [f"{key}={value}" for key, value in sorted(environ.items()) if key.startswith("PYTHON")]
    words = [*(["env", *settings] if settings else []), sys.executable, *NODE, "ssh"]
    line = f"cd {shlex.quote(os.getcwd())}; exec {shlex.join(words)}"
    options = [word for key, value in SSH_OPTIONS.items() for word in ("-o", f"{key}={value}")]
    if request.ssh_port is not None:
        options += ["-p", str(request.ssh_port)]
    commands = [["ssh", *request.launcher_args, *options, host.login, line] for host in job.hosts]
    if job.local_node is not None:
        commands[job.local_node] = [sys.executable, *NODE]
    return commands


class NodeProcess:
    """Process on this host through which one node runs: a client of ssh, or the node itself if it runs on this host.

    Attributes:
        name: name of the host.
        status: exit status, 128 + n if signal n ended it; None while it runs.
        closed_here: this host has closed the input, and so ended the node.
        answer: report of the host before the start; None until it has come.
        errors: output on stderr until then.
    """

    def __init__(self, name: str, command: Sequence[str], job_line: str, is_local: bool = False) -> None:
        """Start the process.

        Args:
            name: name of the host.
            command: the command to start.
            job_line: first line for its standard input, through which it later gets signals.
            is_local: the node runs on this host without a connection, and writes to the terminal itself.
        """
        self.name = name
        self.status: int | None = None
        self.closed_here = False
        self.answer: dict[str, Any] | None = None
        self.errors = b""
        self._ended_by_itself = is_local
        output = None if is_local else subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
        self._forwarders = [
            threading.Thread(target=self._forward, args=(source, target.buffer), daemon=True)
            for source, target in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
            if source is not None
        ]
        for thread in self._forwarders:
            thread.start()
        self._write(job_line.encode() + b"\n")

    def poll(self) -> bool:
        """Return True if the process has ended, and set its status."""
        if self.status is None and self._process.poll() is not None:
            for thread in self._forwarders:
                thread.join(2)
            code = self._process.returncode
            self.status = code if code >= 0 else 128 - code
        return self.status is not None

    @property
    def lost(self) -> bool:
        """True if it has failed without a last line of the node: the connection or the node is lost."""
        return self.status not in (None, 0) and not self._ended_by_itself

    def start_ranks(self) -> None:
        """Tell the node to start its ranks."""
        self._write(GO)

    def forward_signal(self, number: signal.Signals) -> None:
        self._write(bytes([number]))

    def close_input(self) -> None:
        """End the node by closing its input."""
        if self.status is None:
            self.closed_here = True
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process on this host; the node then notices that its connection has closed."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, or its input is closed
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _forward(self, source: BinaryIO, target: BinaryIO) -> None:
        for line in iter(source.readline, b""):
            if line.startswith(MARK):
                message = json.loads(line[len(MARK) :])
                if "ended" in message:
                    self._ended_by_itself = True
                else:
                    self.answer = message
            elif self.answer is None:
                self.errors += line  # a greeting of the login shell, or the reason why no answer comes
            elif not (self.closed_here and line.startswith(b"zerolite: ")):  # reports of an end from here
                with _terminal, suppress(OSError, ValueError):
                    target.write(line)
                    target.flush()
        source.close()
