"""Entry point of a node: check this host and run its part of a job.

- Without arguments, on the host of the launcher: the job is the first line of the standard input.
- With `ssh`: the same, but this host first reports on stderr whether it can take part, and waits for the byte `GO`.
- With `PAYLOAD NODE`, by mpirun, srun or pdsh: the payload has all jobs. The part starts at once, and ends when its
  output has no reader any more.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

from zerolite.launcher.job import NodeJob, find_target_problem, read_line
from zerolite.launcher.remote_commands import unpack
from zerolite.utils.resources import count_cuda_devices
from zerolite.version import __version__

MARK = b"zerolite-node "
"""Start of the lines on stderr that are for the launcher: whether this host can take part, and that its part has ended.
If the connection ends without the second, it was lost."""

GO = b"g"


def own_versions() -> dict[str, str]:
    """Return the versions that must be the same on all hosts, without importing torch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {"python": ".".join(platform.python_version_tuple()[:2]), "zerolite": __version__, "torch": torch}


def count_devices(job: NodeJob) -> int:
    """Return the number of CUDA devices that the ranks of this host may see."""
    return count_cuda_devices({**os.environ, **job.env})


def check(job: NodeJob) -> dict[str, Any]:
    """Return the problems of this host and its number of CUDA devices, for the launcher before the start."""
    return {"problems": find_problems(job), "devices": count_devices(job)}


def find_problems(job: NodeJob) -> list[str]:
    """Return a sentence for each reason why this host cannot run its part: expected, found, and what to do."""
    problems = []
    for what, found in own_versions().items():
        expected = job.versions.get(what, found)
        if found != expected:
            problems.append(
                f"has {f'{what} {found}' if found else f'no {what}'}, and the job was started with {what} {expected}: "
                f"install the same version for {sys.executable!r}"
            )
    if job.cwd is not None and not is_here(job.cwd):
        problems.append(f"has no working directory {job.cwd!r}: start where all hosts have the same one, or share it")
    elif (problem := find_target_problem(job.target, job.python)) is not None:
        problems.append(f"cannot run the job: {problem}; copy or share what is to run")
    if devices := count_devices(job):
        problems += find_device_problems(job, devices)
    return problems


def find_device_problems(job: NodeJob, found: int) -> list[str]:
    """Return a sentence if a host has fewer CUDA devices than its part needs."""
    needed = job.nproc if job.devices is None else max(job.devices) + 1
    if found >= needed:
        return []
    asked = "slots in the hostfile" if job.devices is None else "devices up to the last that is asked for"
    return [
        f"has {found} CUDA device{'s' if found != 1 else ''} and {needed} {asked}: correct the hostfile or the filter "
        f"(CUDA_VISIBLE_DEVICES counts, where it is set)"
    ]


def is_here(directory: str) -> bool:
    """Return True if ``directory`` is the working directory."""
    try:
        return os.path.samefile(directory, ".")
    except OSError:
        return False


def node_index(node: str, hosts: Sequence[str], environ: Mapping[str, str]) -> int:
    """Return the index of the host that a process is on.

    Args:
        node: the host's index or name, or a variable of ``environ`` that holds either.
        hosts: names of all hosts.

    Raises:
        ValueError: the process is on none of the hosts.
    """
    value = environ.get(node, node)
    if value in hosts:
        return list(hosts).index(value)
    if value.isdecimal() and int(value) < len(hosts):
        return int(value)
    raise ValueError(f"this process was started on {value!r}, which is none of the hosts: {', '.join(hosts)}")


def read_job(argv: Sequence[str], environ: Mapping[str, str]) -> NodeJob:
    """Return this node's part. Raises ValueError, TypeError or KeyError if this version does not understand it."""
    if len(argv) < 2:
        return NodeJob.from_json(read_line(0))
    content = unpack(argv[0])
    return NodeJob.from_json(content["jobs"][node_index(argv[1], content["hosts"], environ)])


def send_to_launcher(**content: Any) -> None:
    """Write a line for the launcher; do nothing if it has gone."""
    with suppress(OSError):
        sys.stderr.flush()
        os.write(2, MARK + json.dumps(content).encode() + b"\n")


def end_with_reader() -> None:
    """Wait until the reader of the standard output has gone, then end this node's part. Runs in a thread."""
    poll = select.poll()
    poll.register(1, 0)
    while not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll()):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(argv: Sequence[str]) -> int:
    """Run this node's part and return its exit status, 2 if this host cannot take part."""
    from zerolite.launcher.supervisor import run_node, say

    by_ssh, by_tool = list(argv) == ["ssh"], len(argv) == 2
    try:
        job = read_job(argv, os.environ)
    except (ValueError, TypeError, KeyError) as error:
        say(f"this node's part of the job cannot be read ({error}): install the same version of zerolite on all hosts")
        return 2
    if by_ssh:
        send_to_launcher(**check(job))
        if os.read(0, 1) != GO:
            return 2
    if by_tool:
        problems = find_problems(job)
        for problem in problems:
            say(f"host {os.uname().nodename} {problem}")
        if problems:
            return 2
        threading.Thread(target=end_with_reader, daemon=True).start()
    try:
        return run_node(job)
    finally:
        if by_ssh:
            send_to_launcher(ended=True)
