"""Processes of the nodes as the starting host sees them: output, signals, end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any, BinaryIO

from zerolite.launcher.job import module_arguments
from zerolite.launcher.node_main import GO, MARK
from zerolite.launcher.remote_commands import Invocation

BYTE_OF_SIGNAL = {signal.SIGINT: b"\x03", signal.SIGTERM: b"\x14", signal.SIGHUP: b"\x01"}

_terminal = threading.Lock()


class NodeProcess:
    """Process on this host through which one node runs, or all nodes with mpirun, srun or pdsh.

    Attributes:
        name: name of the host, or of the tool.
        status: exit status, 128 + n if signal n ended it; None while it runs.
        closed_here: this host has closed the input, and so ended the node.
        answer: report of the host before the start; None until it has come.
        errors: output on stderr until then.
    """

    def __init__(self, name: str, command: Invocation, first_line: str | None, here: bool = False) -> None:
        """Start the process.

        Args:
            name: name of the host, or of the tool.
            command: the command to start.
            first_line: first line for its standard input, through which it later gets signals; None for a tool, which
                takes no input.
            here: the node runs on this host without a connection, and writes to the terminal itself.
        """
        self.name = name
        self.status: int | None = None
        self.closed_here = False
        self.answer: dict[str, Any] | None = None
        self.errors = b""
        self._ended_by_itself = here or first_line is None
        self._takes_input = first_line is not None
        # mpirun, srun and pdsh do not notice when this process ends.
        guard = [] if self._takes_input else [sys.executable, *module_arguments("zerolite.launcher.process_guard")]
        self._process = subprocess.Popen(
            [*guard, *command.argv],
            stdin=subprocess.PIPE,
            stdout=None if here else subprocess.PIPE,
            stderr=None if here else subprocess.PIPE,
            env={**os.environ, **command.env},
            start_new_session=True,
        )
        self._forwarders: list[threading.Thread] = []
        for source, target in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)):
            if source is not None:
                thread = threading.Thread(target=self._forward, args=(source, target.buffer), daemon=True)
                thread.start()
                self._forwarders.append(thread)
        if first_line is not None:
            self._write(first_line.encode() + b"\n")

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
        """Pass a signal to the node. mpirun, srun and pdsh cannot pass it on, so they are ended."""
        if self._takes_input and self.status is None:
            self._write(BYTE_OF_SIGNAL[number])
        else:
            self.close_input()

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
            elif self._takes_input and self.answer is None:
                self.errors += line  # a greeting of the login shell, or the reason why no answer comes
            elif not (self.closed_here and line.startswith(b"zerolite: ")):  # reports of an end from here
                with _terminal, suppress(OSError, ValueError):
                    target.write(line)
                    target.flush()
        source.close()
