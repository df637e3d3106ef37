"""Entry point of another host's part of a job, started through ssh: check this host and run its part.

The job is the first line of the standard input. This host reports on stderr whether it can take part, and waits for
the byte `GO`. Then come signals, as bytes with their numbers, and signs of life.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from zerolite.launcher.failures import Failure
from zerolite.launcher.job import NodeJob, find_target_problem
from zerolite.launcher.plan import own_versions
from zerolite.launcher.resources import count_cuda_devices
from zerolite.launcher.supervisor import SIGNALS, WAIT_S, LocalPart, make_log_dir, record_signals, say, wait_for

MARK = b"zerolite-node "
"""Start of the lines on stderr that are for the launcher: whether this host can take part, why its part ends, and that
it has ended. If the connection ends without the last, it was lost. One more byte follows."""

MORE, LAST = b"+", b"."
"""The byte after MARK: another piece of the message follows, or none."""

_PIECE = 2048  # bytes

GO, ALIVE = b"g", b"\0"
"""What the launcher sends besides signals: that all hosts start, and signs of life."""

GO_S = 120.0
"""Seconds after which the launcher, which waits for less time for all hosts, must have gone."""

SILENCE_S = 20.0
"""Seconds without a sign of life after which the launcher, or the network to it, has gone."""


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
    """Write a message for the launcher; do nothing if it has gone.

    Each piece is a short line, which a pipe does not mix with what the ranks write.
    """
    text = json.dumps(content).encode()
    with suppress(OSError):
        sys.stderr.flush()
        while text:
            piece, text = text[:_PIECE], text[_PIECE:]
            os.write(2, MARK + (MORE if text else LAST) + piece + b"\n")


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
    if not select.select([control], [], [], GO_S)[0] or os.read(control, 1) != GO:
        return 2
    signals = record_signals()
    try:
        log_dir = make_log_dir(job)
        if log_dir is None:
            return 2
        part = LocalPart(job, log_dir)
        connection = Connection(control, part, signals)
        part.start()
        status = wait_for([part], signals, connection.pause, connection.tell)
        connection.tell(part.failures)
        part.finish(signals, status)
        return status
    finally:
        send_to_launcher(ended=True)


class Connection:
    """The connection to the launcher. Its end, or its silence, counts as SIGHUP.

    Args:
        control: file descriptor from which the launcher's signals and signs of life come.
        part: its failures are told to the launcher as soon as they are known.
        signals: the launcher's are appended to them.
    """

    def __init__(self, control: int, part: LocalPart, signals: list[int]) -> None:
        self._control, self._part, self._signals = control, part, signals
        self._silent_s = 0.0
        self._open, self._told = True, False

    def pause(self) -> None:
        """Wait a moment for signals."""
        self.tell(self._part.failures)
        if not self._open:
            time.sleep(WAIT_S)
            return
        self._silent_s += WAIT_S  # no clock, which goes on while this process is suspended
        numbers = b""
        if is_ready := bool(select.select([self._control], [], [], WAIT_S)[0]):
            self._silent_s = 0.0
            with suppress(OSError):
                numbers = os.read(self._control, 4096)
            self._signals.extend(number for number in numbers if number in SIGNALS)
        if self._silent_s > SILENCE_S or (is_ready and not numbers):
            self._open = False
            self._signals.append(signal.SIGHUP)  # before the sentence, for which the pipe may be too full
            how = "has closed" if is_ready else f"has been silent for {SILENCE_S:.0f} s"
            say(f"host {os.uname().nodename}: the connection to the launcher {how}; the ranks here are ended")

    def tell(self, failures: Sequence[Failure]) -> None:
        """Tell the launcher why this part ends, once."""
        if failures and not self._told:
            self._told = True
            send_to_launcher(failures=[dataclasses.asdict(failure) for failure in failures])
