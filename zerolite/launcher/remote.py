"""Start, course and end of a job on several hosts, seen from the host where it is started."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence

from zerolite.launcher.node import check, find_device_problems
from zerolite.launcher.node_process import NodeProcess, node_commands
from zerolite.launcher.options import LaunchRequest
from zerolite.launcher.plan import JobPlan
from zerolite.launcher.supervisor import INTERRUPT_GRACE_S, say

CHECK_S = 45.0
"""Seconds within which a host must report that it can take part."""

POLL_INTERVAL_S = 0.05

OWN_END_S = 7.0
"""After a failure nodes end by themselves; after so many seconds they are ended."""

LOST_END_S = 1.0
"""The same after a lost connection, which the other nodes do not notice so soon."""

CLOSED_END_S = 8.0
"""A node that still runs so many seconds after its input was closed is killed."""


class CannotStart(Exception):
    """Some hosts cannot take part; the message names them and says what to do."""


def record_signals() -> list[signal.Signals]:
    """Collect the signals of this process for the nodes. Returns the list to which handlers append them."""
    received: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, lambda number, _: received.append(signal.Signals(number)))
    return received


def run(request: LaunchRequest, job: JobPlan) -> int:
    """Run a job on several hosts and return its exit status, 2 if it cannot be started."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the kernel forgets how nodes have ended
    commands = node_commands(request, job, os.environ)
    if request.dry_run:
        print_commands(job, commands)
        return 0
    signals = record_signals()
    processes: list[NodeProcess] = []
    try:
        start_nodes(request, job, commands, processes, signals)
        return wait_for_nodes(processes, signals)
    except CannotStart as error:
        say(str(error))
        return 2
    finally:
        for process in processes:
            process.kill()


def start_nodes(
    request: LaunchRequest,
    job: JobPlan,
    commands: Sequence[Sequence[str]],
    processes: list[NodeProcess],
    signals: list[signal.Signals],
) -> None:
    """Start all nodes as soon as all other hosts have reported that they can take part.

    Args:
        request: the command line.
        job: the job on its hosts.
        commands: the nodes' commands.
        processes: gets every process that is started, so that the caller can end them after an error.
        signals: signals that have come; they end the start.

    Raises:
        CannotStart: a host cannot take part.
    """
    names = [host.name for host in job.hosts]
    for i, command in enumerate(commands):
        if i != job.local_node:
            try:
                processes.append(NodeProcess(names[i], command, job.nodes[i].to_json()))
            except OSError as error:
                raise CannotStart(
                    f"nothing was started: 'ssh' cannot be run ({error.strerror}): install it, or start each node by a "
                    "command of its own, with --no-ssh"
                ) from None
    deadline = time.monotonic() + CHECK_S
    while any(process.answer is None and not process.poll() for process in processes) and not signals:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_INTERVAL_S)
    if signals:
        for process in processes:
            process.close_input()
        return
    check_answers(request, job, {process.name: process for process in processes})
    for process in processes:
        process.start_ranks()
    if job.local_node is not None:
        local_process = NodeProcess(
            names[job.local_node], commands[job.local_node], job.nodes[job.local_node].to_json(), is_local=True
        )
        processes.insert(job.local_node, local_process)


def check_answers(request: LaunchRequest, job: JobPlan, processes: dict[str, NodeProcess]) -> None:
    """Raise CannotStart with the problems of all hosts, if any."""
    answers = {
        host.name: check(job.nodes[i]) if i == job.local_node else processes[host.name].answer
        for i, host in enumerate(job.hosts)
    }
    devices_found = any(answer["devices"] for answer in answers.values() if answer is not None)
    problems: dict[str, list[str]] = {}
    for host, node in zip(job.hosts, job.nodes, strict=True):
        answer = answers[host.name]
        if answer is None:
            problems[host.name] = [describe_no_answer(request, processes[host.name], host.login)]
            continue
        problems[host.name] = list(answer["problems"])
        if devices_found and not answer["devices"]:  # a host without devices is wrong only if others have some
            problems[host.name] += find_device_problems(node, 0)
    bad = [name for name, of_host in problems.items() if of_host]
    if not bad:
        return
    lines = ["nothing was started, since not all hosts can take part:"]
    lines += [f"  {name}: {problem}" for name in bad for problem in problems[name]]
    if job.hosts[0].name not in bad:
        lines.append(f"put that right, or leave out what cannot take part: --exclude {'@'.join(bad)}")
    raise CannotStart("\nzerolite: ".join(lines))


def describe_no_answer(request: LaunchRequest, process: NodeProcess, login: str) -> str:
    """Say why a host has not answered."""
    if process.status is None:
        return f"has not answered within {CHECK_S:.0f} s: check that it is up, and what its login shell does"
    errors = process.errors.decode(errors="replace").strip()
    last = errors.splitlines()[-1] if errors else "no message"
    if process.status == 255:
        by_hand = shlex.join(["ssh", *request.launcher_args, login])
        return (
            f"cannot be reached by ssh ({last}): check its name and the network, and that {by_hand!r} works without a "
            "password"
        )
    if "No module named 'zerolite" in errors or "No module named zerolite" in errors:
        return f"has no zerolite for {sys.executable!r}: install it there as here, or share the directory it is in"
    if process.status in (126, 127):
        return (
            f"cannot run {sys.executable!r}, the Python of this job ({last}): install the same environment at the same "
            "path, or share it"
        )
    return f"has not reported; ssh ended with status {process.status} ({last})"


def wait_for_nodes(processes: Sequence[NodeProcess], signals: list[signal.Signals]) -> int:
    """Wait for all nodes, end all if one fails, and return the job's exit status.

    Nodes first get time to end by themselves. Then their input is closed, and at last their processes are killed.
    """
    passed = 0
    end_at = kill_at = float("inf")
    known: set[str] = set()
    while sum(process.poll() for process in processes) < len(processes):  # all() would not poll every one
        now = time.monotonic()
        for number in signals[passed:]:
            passed += 1
            for process in processes:
                process.forward_signal(number)
            gently = number is signal.SIGINT and passed == 1
            end_at = min(end_at, now + OWN_END_S + (INTERRUPT_GRACE_S if gently else 0.0))
        for process in processes:
            if process.status and process.name not in known and not signals:
                known.add(process.name)
                end_at = min(end_at, now + (LOST_END_S if process.lost else OWN_END_S))
                if process.lost:
                    say(
                        f"the connection to {process.name} is lost (ssh ended with status {process.status}); the job "
                        "ends on all hosts"
                    )
        if now >= end_at:
            end_at, kill_at = float("inf"), min(kill_at, now + CLOSED_END_S)
            for process in processes:
                process.close_input()
        if now >= kill_at:
            for process in processes:
                process.kill()
        time.sleep(POLL_INTERVAL_S)
    if signals:
        return 128 + signals[0]
    # That of the first node that failed by itself, else 1 for any other failure.
    statuses = [
        process.status for process in processes if process.status and not process.lost and not process.closed_here
    ]
    return statuses[0] if statuses else int(any(process.status for process in processes))


def print_commands(job: JobPlan, commands: Sequence[Sequence[str]]) -> None:
    """Print the commands and the hosts on which they would run, and run nothing."""
    for i, command in enumerate(commands):
        place = f"{job.hosts[i].name}, this host" if i == job.local_node else job.hosts[i].name
        print(f"# {place}; to its standard input this line, then 'g' to start:\n#   {job.nodes[i].to_json()}")
        print(shlex.join(command))
