"""Entry point of another host's part of a job, started through ssh: check this host and run its part.

The job is the first line of the standard input, which then carries signals, as bytes with their numbers. This host
first reports on stderr whether it can take part, and waits for the byte `GO`.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from zerolite.launcher.job import NodeJob, find_target_problem
from zerolite.launcher.plan import own_versions
from zerolite.launcher.resources import count_cuda_devices
from zerolite.launcher.supervisor import SIGNALS, WAIT_S, record_signals, run_node, say

MARK = b"zerolite-node "
"""Start of the lines on stderr that are for the launcher: whether this host can take part, and that its part has ended.
If the connection ends without the second, it was lost."""

GO = b"g"


def check(job: NodeJob) -> dict[str, Any]:
    """Return the problems of this host and its number of CUDA devices, for the launcher before the start."""
    devices = count_cuda_devices({**os.environ, **job.env})
    problems = find_problems(job)
    return {"problems": problems + (find_device_problems(job, devices) if devices else []), "devices": devices}


def find_problems(job: NodeJob) -> list[str]:
    """Return a sentence for each reason why this host cannot run its part: expected, found, and what to do."""
    problems = []
    for what, version in own_versions().items():
        expected = job.versions.get(what, version)
        if version != expected:
            problems.append(
                f"has {f'{what} {version}' if version else f'no {what}'}, and the job was started with {what} "
                f"{expected}: install the same version for {sys.executable!r}"
            )
    if job.cwd is not None and not is_here(job.cwd):
        problems.append(f"has no working directory {job.cwd!r}: start where all hosts have the same one, or share it")
    elif (problem := find_target_problem(job.target, job.python)) is not None:
        problems.append(f"cannot run the job: {problem}; copy or share what is to run")
    return problems


def find_device_problems(job: NodeJob, device_count: int) -> list[str]:
    """Return a sentence if a host has fewer CUDA devices than its part needs."""
    needed = job.nproc if job.devices is None else max(job.devices) + 1
    if device_count >= needed:
        return []
    asked = "slots in the hostfile" if job.devices is None else "devices up to the last that is asked for"
    return [
        f"has {device_count} CUDA device{'s' if device_count != 1 else ''} and {needed} {asked}: correct the "
        "hostfile or the filter (CUDA_VISIBLE_DEVICES counts, where it is set)"
    ]


def is_here(directory: str) -> bool:
    """Return True if ``directory`` is the working directory."""
    try:
        return os.path.samefile(directory, ".")
    except OSError:
        return False


def send_to_launcher(**content: Any) -> None:
    """Write a line for the launcher; do nothing if it has gone."""
    with suppress(OSError):
        sys.stderr.flush()
        os.write(2, MARK + json.dumps(content).encode() + b"\n")


def main(argv: Sequence[str]) -> int:
    """Run this node's part and return its exit status, 2 if this host cannot take part."""
    control = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # for the ranks
    with open(control, "rb", buffering=0, closefd=False) as given:
        try:
            job = NodeJob.from_json(given.readline().decode())
        except (ValueError, TypeError) as error:
            say(f"this part of the job cannot be read ({error}): install the same version of zerolite on all hosts")
            return 2
    send_to_launcher(**check(job))
    if os.read(control, 1) != GO:
        return 2
    signals = record_signals()
    try:
        return run_node(job, signals, functools.partial(wait_for_signals, control, signals))
    finally:
        send_to_launcher(ended=True)


def wait_for_signals(control: int, signals: list[int]) -> None:
    """Wait a moment for signals. The end of the connection counts as SIGHUP.

    Args:
        control: file descriptor from which they come.
        signals: they are appended to it.
    """
    if signals[-1:] == [signal.SIGHUP]:
        time.sleep(WAIT_S)
    elif select.select([control], [], [], WAIT_S)[0]:
        numbers = b""
        with suppress(OSError):
            numbers = os.read(control, 4096)
        signals.extend(number for number in numbers if number in SIGNALS)
        if not numbers:
            say(f"host {os.uname().nodename}: the connection to the launcher has closed; the ranks here are ended")
            signals.append(signal.SIGHUP)
