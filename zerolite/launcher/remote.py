"""Start, course and end of a job on several hosts, seen from the host where it is started."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Sequence

from zerolite.launcher import supervisor
from zerolite.launcher.hosts import HostsError
from zerolite.launcher.job import NodeJob, find_port_problem
from zerolite.launcher.node_main import check, find_device_problems
from zerolite.launcher.node_process import NodeProcess
from zerolite.launcher.options import LaunchRequest
from zerolite.launcher.plan import JobPlan, make_node_job, make_node_jobs, make_plan
from zerolite.launcher.remote_commands import Invocation, Route, pack, ssh_commands, tool_command
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
    """Return a list to which the signals that this process gets are appended, to be passed to the nodes."""
    received: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, lambda number, _: received.append(signal.Signals(number)))
    return received


def run(request: LaunchRequest) -> int:
    """Run a job on several hosts and return its exit status, 2 if it cannot be started."""
    try:
        job = make_plan(request)
        if len(job.hosts) == 1 and job.route.here == 0:
            return run_here(request, job)
        nodes = make_node_jobs(request, job)
        if request.dry_run:
            return print_commands(job, nodes)
        if job.route.here == 0 and (problem := find_port_problem(job.port)) is not None:
            raise CannotStart(problem)
        signals = record_signals()
        processes: list[NodeProcess] = []
        try:
            start_nodes(job, nodes, processes, signals)
            return wait_for_nodes(job, processes, signals)
        finally:
            for process in processes:
                process.kill()
    except (HostsError, CannotStart) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


def run_here(request: LaunchRequest, job: JobPlan) -> int:
    """Run a job whose only host is this one."""
    node = make_node_job(request, job.hosts, 0, job_id=job.job_id, master_port=request.master_port or 0)
    if request.dry_run:
        supervisor.print_dry_run(node)
        return 0
    return supervisor.run_node(node)


def start_nodes(
    job: JobPlan, nodes: Sequence[NodeJob], processes: list[NodeProcess], signals: list[signal.Signals]
) -> None:
    """Start all nodes. With ssh, first wait until all have reported that they can take part.

    Args:
        job: the job's hosts.
        nodes: the nodes' parts, in the order of the hosts.
        processes: gets every process that is started, so that the caller can end them after an error.
        signals: signals that have come; they end the start.

    Raises:
        CannotStart: a host cannot take part.
    """
    lines = [node.to_json() for node in nodes]
    names = [host.name for host in job.hosts]
    if job.route.launcher != "ssh":
        command = tool_command(job.route, pack({"hosts": names, "jobs": lines}))
        processes.append(start_process(command.argv[0], command, None))
        return
    commands = ssh_commands(job.route)
    here = job.route.here
    for i, command in enumerate(commands):
        if i != here:
            processes.append(start_process(names[i], command, lines[i]))
    deadline = time.monotonic() + CHECK_S
    while any(process.answer is None and not process.poll() for process in processes) and not signals:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_INTERVAL_S)
    if signals:
        for process in processes:
            process.close_input()
        return
    check_answers(job, nodes, {process.name: process for process in processes})
    for process in processes:
        process.start_ranks()
    if here is not None:
        processes.insert(here, NodeProcess(names[here], commands[here], lines[here], here=True))


def start_process(name: str, command: Invocation, first_line: str | None) -> NodeProcess:
    try:
        return NodeProcess(name, command, first_line)
    except OSError as error:
        raise CannotStart(
            f"nothing was started: {command.argv[0]!r} cannot be run ({error.strerror}): install it, or choose another "
            "--launcher"
        ) from None


def check_answers(job: JobPlan, nodes: Sequence[NodeJob], processes: dict[str, NodeProcess]) -> None:
    """Raise CannotStart with the problems of all hosts, if any."""
    problems: list[tuple[str, str]] = []
    devices: dict[int, int] = {}
    for i, node in enumerate(nodes):
        name = job.hosts[i].name
        answer = check(node) if i == job.route.here else processes[name].answer
        if answer is None:
            problems.append((name, describe_no_answer(job.route, processes[name], job.hosts[i].login)))
            continue
        devices[i] = answer["devices"]
        problems += [(name, problem) for problem in answer["problems"]]
    if any(devices.values()):  # hosts without devices are wrong only if others have some
        bare = [i for i, found in devices.items() if not found]
        problems += [(job.hosts[i].name, text) for i in bare for text in find_device_problems(nodes[i], 0)]
    if not problems:
        return
    lines = ["nothing was started, since not all hosts can take part:"]
    bad = [host.name for host in job.hosts if host.name in dict(problems)]
    lines += [f"  {host}: {problem}" for name in bad for host, problem in problems if host == name]
    if len(bad) < len(job.hosts) and job.hosts[0].name not in bad:
        lines.append(f"put that right, or leave out what cannot take part: --exclude {'@'.join(bad)}")
    raise CannotStart("\nzerolite: ".join(lines))


def describe_no_answer(route: Route, process: NodeProcess, login: str) -> str:
    """Say why a host has not answered."""
    if process.status is None:
        return f"has not answered within {CHECK_S:.0f} s: check that it is up, and what its login shell does"
    errors = process.errors.decode(errors="replace").strip()
    last = errors.splitlines()[-1] if errors else "no message"
    if process.status == 255:
        by_hand = shlex.join(["ssh", *route.launcher_args, login])
        return (
            f"cannot be reached by ssh ({last}): check its name and the network, and that {by_hand!r} works without a "
            "password"
        )
    if "No module named 'zerolite" in errors or "No module named zerolite" in errors:
        return f"has no zerolite for {route.interpreter!r}: install it there as here, or share the directory it is in"
    if process.status in (126, 127):
        return (
            f"cannot run {route.interpreter!r}, the Python of this job ({last}): install the same environment at the "
            f"same path, or share it"
        )
    return f"has not reported; ssh ended with status {process.status} ({last})"


def wait_for_nodes(job: JobPlan, processes: Sequence[NodeProcess], signals: list[signal.Signals]) -> int:
    """Wait for all nodes, end all if one fails, and return the job's exit status.

    Nodes first get time to end by themselves. Then their input is closed, and at last their processes are killed.
    """
    passed = 0
    end_at = kill_at = float("inf")
    known: set[str] = set()
    while not poll_all(processes):
        now = time.monotonic()
        for number in signals[passed:]:
            passed += 1
            for process in processes:
                process.forward_signal(number)
            gently = number is signal.SIGINT and passed == 1
            end_at = min(end_at, now + OWN_END_S + (INTERRUPT_GRACE_S if gently else 0.0))
        for process in processes:
            if process.status is not None and process.name not in known:
                known.add(process.name)
                if not signals:
                    end_at = min(end_at, now + seconds_until_end(job, process, processes))
        if now >= end_at:
            end_at, kill_at = float("inf"), min(kill_at, now + CLOSED_END_S)
            for process in processes:
                process.close_input()
        if now >= kill_at:
            for process in processes:
                process.kill()
        time.sleep(POLL_INTERVAL_S)
    return 128 + signals[0] if signals else job_status(job, processes)


def poll_all(processes: Sequence[NodeProcess]) -> bool:
    """Poll all processes, and return whether all have ended."""
    return sum(process.poll() for process in processes) == len(processes)  # all() would not poll every one


def seconds_until_end(job: JobPlan, process: NodeProcess, processes: Sequence[NodeProcess]) -> float:
    """Return the seconds after which the other nodes are ended, now that this one has ended."""
    if process.status == 0:
        return float("inf")
    if not process.lost:
        return OWN_END_S
    left = len([other for other in processes if not other.lost])
    what = f"the connection to {process.name} is lost (ssh ended with status {process.status})"
    if may_go_on(job, processes):
        say(f"{what}; the job goes on with {left} of {len(processes)} hosts, and needs {job.min_nodes}")
        return float("inf")
    say(f"{what}; the job ends on all hosts")
    return LOST_END_S


def may_go_on(job: JobPlan, processes: Sequence[NodeProcess]) -> bool:
    """Return True if an elastic job still has the first host, which hosts the rendezvous, and enough others."""
    left = [process for process in processes if not process.lost]
    return job.may_lose and len(left) >= job.min_nodes and processes[0] in left


def job_status(job: JobPlan, processes: Sequence[NodeProcess]) -> int:
    """Return the exit status of the first node that failed by itself, else 1 for any other failure, else 0."""
    if may_go_on(job, processes):
        processes = [process for process in processes if not process.lost]
    own = [process.status for process in processes if process.status and not process.lost and not process.closed_here]
    if own:
        return own[0]
    return 1 if any(process.status for process in processes) else 0


def print_commands(job: JobPlan, nodes: Sequence[NodeJob]) -> int:
    """Print the commands and the hosts on which they would run, and run nothing."""
    lines = [node.to_json() for node in nodes]
    names = [host.name for host in job.hosts]
    if job.route.launcher != "ssh":
        print(f"# on {', '.join(names)}, where the last words but one hold:")
        for line in lines:
            print(f"#   {line}")
        print(tool_command(job.route, pack({"hosts": names, "jobs": lines})).shell_line())
        return 0
    for i, command in enumerate(ssh_commands(job.route)):
        place = f"{names[i]}, this host" if i == job.route.here else names[i]
        print(f"# {place}; to its standard input this line, then 'g' to start:\n#   {lines[i]}")
        print(command.shell_line())
    return 0
