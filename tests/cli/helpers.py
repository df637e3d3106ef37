"""Runs the real `zerolite` command of this checkout."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "bin" / "zerolite")]
TIMEOUT_S = 240

# Each rank writes what it was started with to report.RANK.json beside the script.
REPORT_SCRIPT = """\
import json, os, socket, sys
from pathlib import Path
report = {**os.environ, "argv": sys.argv[1:], "cwd": os.getcwd(), "main": __name__, "pid": os.getpid()}
report["host"] = socket.gethostname()
Path(__file__).with_name(f"report.{os.environ['RANK']}.json").write_text(json.dumps(report))
print("this is rank", os.environ["RANK"], flush=True)
"""


def job_environment(**changes: str | None) -> dict[str, str]:
    """The environment without what a surrounding launcher or job may have set; `None` removes a variable."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    prefixes = ("TORCHELASTIC_", "SLURM_", "CUDA_VISIBLE_", "OMPI_", "PMI", "MPI_", "HYDI_")
    environ = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith(prefixes)}
    for name, value in changes.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    return environ


def run(
    *command: str | Path, cwd: Path | None = None, given: str = "", timeout: float = TIMEOUT_S, **changes: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. given: on its standard input; changes: to the environment."""
    argv, env = [*map(str, command)], job_environment(**changes)
    return subprocess.run(argv, cwd=cwd, env=env, input=given, capture_output=True, text=True, timeout=timeout)


def output_of(*command: str | Path, **options: Any) -> str:
    """Run a command that must succeed, and return its standard output. options: of :func:`run`."""
    done = run(*command, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def run_command(*arguments: str | Path, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `zerolite ARGUMENTS` to its end. options: of :func:`run`."""
    return run(*COMMAND, *arguments, cwd=cwd, **options)


def start(*command: str | Path, cwd: Path | None = None, **changes: str | None) -> subprocess.Popen[str]:
    """Start a command whose output comes through pipes. changes: to the environment."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*map(str, command)], cwd=cwd, env=job_environment(**changes), text=True, **pipes)


def start_command(*arguments: str | Path, through: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
    """Start `zerolite ARGUMENTS`, by the command ``through`` if given. options: of :func:`start`."""
    return start(*through, *COMMAND, *arguments, **options)


def wait_until(
    condition: Callable[[], Any], process: subprocess.Popen[str] | None = None, timeout: float = TIMEOUT_S
) -> None:
    """Wait for a condition; fail after ``timeout`` seconds, and at once if the process has ended."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until_none(left: Callable[[], Any], timeout: float) -> None:
    """Wait until nothing is left; fail after ``timeout`` seconds with what is."""
    deadline = time.monotonic() + timeout
    while found := left():
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def read_reports(directory: Path) -> list[dict[str, Any]]:
    """Return what the ranks wrote, in their order."""
    count = len(list(directory.glob("report.*.json")))
    return [json.loads((directory / f"report.{rank}.json").read_text()) for rank in range(count)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def find_processes(token: str, pids: bool = False) -> list[str]:
    """The commands, or the numbers, of all processes that have this text in their environment, zombies left out."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                if token.encode() in (place / "environ").read_bytes() and ") Z " not in (place / "stat").read_text():
                    command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append(place.name if pids else command)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


@contextmanager
def limited_memory(nbytes: int) -> Iterator[Path]:
    """A control group whose processes may use so much memory together, without swap: the file that lists them. Skips
    where none can be made, which needs root and the memory controller."""
    top, limits = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    if not top.is_dir():
        top, limits = top.parent, ("memory.max", "memory.swap.max")
    group = top / f"zerolite-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limits[0]).write_text(str(nbytes))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a memory limit can be made: {error}")
    with suppress(OSError):  # without swap there may be no such file
        (group / limits[1]).write_text("0" if limits[1] == "memory.swap.max" else str(nbytes))
    try:
        yield group / "cgroup.procs"
    finally:
        deadline = time.monotonic() + 10
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        group.rmdir()
