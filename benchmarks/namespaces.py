"""Namespaces of Linux as hosts of this machine: if they can be made, and their first processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

SEARCH_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
ENVIRONMENT = {**os.environ, "PATH": SEARCH_PATH}


def why_not(tools: Sequence[str], packages: str, flags: Sequence[str], trial: Sequence[str]) -> str | None:
    """Say why there can be no hosts in namespaces here, or return None.

    Args:
        tools: commands that are needed.
        packages: those that have them.
        flags: of ``unshare``.
        trial: command that must succeed in such namespaces.
    """
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "hosts in network namespaces need root on Linux"
    if missing := [tool for tool in tools if shutil.which(tool, path=SEARCH_PATH) is None]:
        return f"hosts in network namespaces need {', '.join(missing)} (packages {packages})"
    done = subprocess.run(["unshare", *flags, *trial], capture_output=True, text=True, env=ENVIRONMENT)
    return f"namespaces cannot be made here: {done.stderr.strip()}" if done.returncode else None


def start(stack: ExitStack, command: Sequence[str]) -> int:
    """Start a process that prints "ready" and ends at the end of its input, which ``stack`` closes. Return its id."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT)
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None

    def end() -> None:
        stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        stdout.close()

    stack.callback(end)
    if stdout.readline() != b"ready\n":
        raise RuntimeError(f"a process did not come up: {' '.join(command)}")
    return process.pid
