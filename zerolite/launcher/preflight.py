"""Checks of all hosts before a job starts; all mismatches are named at once."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from zerolite.launcher.check import LINE_START, CheckSpec, Facts, Reach, own_versions
from zerolite.launcher.hosts import Host
from zerolite.launcher.remote_commands import Invocation, Route, make_commands

CHECK_S = 45.0
"""A host that has not answered by then does not take part."""

LEAVE_S = 1.0
"""The first node's check is ended this long after the others have ended."""

CLOCK_S = 60.0
"""Clocks may differ by this much."""


class ChecksFailed(Exception):
    """Some hosts cannot take part.

    Attributes:
        problems: (host, sentence).
    """

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("\n".join(f"{host}: {problem}" for host, problem in problems))
        self.problems = list(problems)


@dataclass
class Answer:
    """Answer of one host.

    Attributes:
        facts, reach: None if it did not get so far.
        failure: why not, in a sentence.
        asked, answered: seconds since the epoch between which it looked at its clock.
    """

    facts: Facts | None = None
    reach: Reach | None = None
    failure: str = ""
    asked: float = 0.0
    answered: float = 0.0


@dataclass
class Inquiry:
    """A command that asks one host, or all of them."""

    command: Invocation
    process: subprocess.Popen[bytes]
    asked: float = field(default_factory=time.time)
    output: bytes = b""
    errors: bytes = b""
    timed_out: bool = False
    answered: float = 0.0

    def collect(self) -> None:
        try:
            self.output, self.errors = self.process.communicate(timeout=CHECK_S)
        except subprocess.TimeoutExpired:
            self.timed_out = True
            self.end()
            self.output, self.errors = self.process.communicate()
        self.answered = time.time()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def check_hosts(route: Route, hosts: Sequence[Host], spec: CheckSpec) -> list[Reach]:
    """Ask all hosts at once; return how each reaches the first, in the order of the nodes.

    Interfaces are "" on hosts whose environment names one itself.

    Raises:
        ChecksFailed: some cannot take part.
    """
    answers = ask(route, spec)
    order = {host.name: i for i, host in enumerate(hosts)}
    problems = sorted(find_problems(route, hosts, spec, answers), key=lambda problem: order[problem[0]])
    if problems:
        raise ChecksFailed(problems)
    reaches = []
    for answer in answers:
        assert answer.facts is not None and answer.reach is not None
        interface = "" if answer.facts.gloo else answer.reach.interface
        reaches.append(Reach(answer.reach.address, interface))
    return reaches


def ask(route: Route, spec: CheckSpec) -> list[Answer]:
    """Run the check on all hosts; return their answers in the order of the nodes. Raises ChecksFailed."""
    inquiries: list[Inquiry] = []
    threads: list[threading.Thread] = []
    try:
        for command in make_commands(route, "zerolite.launcher.check", spec.pack()):
            inquiries.append(Inquiry(command, start(command)))
        threads = [threading.Thread(target=inquiry.collect, daemon=True) for inquiry in inquiries]
        for thread in threads:
            thread.start()
        for thread in threads[1:]:
            thread.join()
        threads[0].join(CHECK_S if len(threads) == 1 else LEAVE_S)
    finally:
        for inquiry in inquiries:
            if inquiry.process.poll() is None:
                inquiry.end()
    for thread in threads:
        thread.join()
    answers = [Answer() for _ in route.hosts]
    for inquiry in inquiries:
        read_answers(route, inquiry, answers)
    if route.launcher != "ssh" and all(answer.facts is None for answer in answers):
        raise ChecksFailed([(inquiries[0].command.argv[0], describe_tool_failure(inquiries[0]))])
    return answers


def start(command: Invocation) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own. Raises ChecksFailed if its program is missing."""
    pipe = subprocess.PIPE
    env = {**os.environ, **command.env}
    try:
        return subprocess.Popen(
            command.argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=env, start_new_session=True
        )
    except OSError as error:
        problem = f"{command.argv[0]!r} cannot be run ({error.strerror}): install it, or choose another --launcher"
        raise ChecksFailed([("this host", problem)]) from None


def read_answers(route: Route, inquiry: Inquiry, answers: list[Answer]) -> None:
    """Put what a command has printed where it belongs."""
    for line in inquiry.output.decode(errors="replace").splitlines():
        _, found, text = line.partition(LINE_START)
        if not found:
            continue  # a greeting of the login shell
        with suppress(ValueError, TypeError, KeyError, IndexError):
            content = json.loads(text)
            answer = answers[content["node"]]
            if "facts" in content:
                answer.facts = Facts(**content["facts"])
            else:
                answer.reach = Reach(**content["reach"])
    for node in inquiry.command.nodes:
        answers[node].asked, answers[node].answered = inquiry.asked, inquiry.answered
        answers[node].failure = describe_failure(route, inquiry, route.hosts[node])


def describe_failure(route: Route, inquiry: Inquiry, host: str) -> str:
    """Say why a host has not reported, if it has not."""
    status = inquiry.process.returncode
    errors = inquiry.errors.decode(errors="replace").strip()
    last = errors.splitlines()[-1] if errors else "no message"
    tool = inquiry.command.argv[0]
    if inquiry.timed_out:
        return f"has not answered within {CHECK_S:.0f} s: check that it is up, and what its login shell does"
    if tool == "ssh" and status == 255:
        return (
            f"cannot be reached by ssh ({last}): check its name and the network, and that "
            f"{shlex.join(['ssh', *route.launcher_args, host])!r} works without a password"
        )
    if "No module named 'zerolite" in errors or "No module named zerolite" in errors:
        return f"has no zerolite for {route.interpreter!r}: install it there as here, or share the directory it is in"
    if status in (126, 127):
        return (
            f"cannot run {route.interpreter!r}, the Python of this job ({last}): install the same environment at the "
            f"same path, or share it"
        )
    return f"has not reported; {tool} ended with status {status} ({last})"


def describe_tool_failure(inquiry: Inquiry) -> str:
    """Say that mpirun, srun or pdsh has reached no host, in its own words."""
    if inquiry.timed_out:
        return f"has reached no host within {CHECK_S:.0f} s"
    lines = inquiry.errors.decode(errors="replace").splitlines()
    words = " ".join(line.strip() for line in lines if any(letter.isalpha() for letter in line))
    return f"has reached no host, and ended with status {inquiry.process.returncode}: {words[:600] or 'no message'}"


def find_problems(
    route: Route, hosts: Sequence[Host], spec: CheckSpec, answers: Sequence[Answer]
) -> Iterator[tuple[str, str]]:
    """Yield (host, sentence) for all that does not fit."""
    expected = own_versions()
    most_devices = max((answer.facts.devices for answer in answers if answer.facts is not None), default=0)
    first = answers[0].facts
    first_listens = first is not None and first.port_problem is None
    for host, answer in zip(hosts, answers, strict=True):
        if answer.facts is None:
            yield host.name, answer.failure
            continue
        for problem in find_fact_problems(route, host, spec, answer.facts, expected, most_devices):
            yield host.name, problem
        offset = clock_offset(answer.facts.time, answer.asked, answer.answered)
        if abs(offset) > CLOCK_S:
            yield (
                host.name,
                f"has a clock {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} this host's: "
                f"expected at most {CLOCK_S:.0f} s; synchronise the clocks",
            )
        if host is not hosts[0] and first_listens and (answer.reach is None or answer.reach.address is None):
            yield host.name, describe_unreached(hosts[0].name, spec.port, answer.reach)
    yield from find_namesakes(hosts, answers)


def find_fact_problems(
    route: Route, host: Host, spec: CheckSpec, facts: Facts, expected: dict[str, str], most_devices: int
) -> Iterator[str]:
    for what, here in expected.items():
        there = facts.versions.get(what, "")
        if there != here:
            found = f"{what} {there}" if there else f"no {what}"
            yield (
                f"has {found} where {what} {here} was expected, as on this host: install the same version for "
                f"{route.interpreter!r}"
            )
    if not facts.at_work:
        yield f"has no working directory {spec.cwd!r}: start where all hosts have the same directory, or share it"
    elif facts.target_problem is not None:
        yield f"cannot run the job: {facts.target_problem}; copy or share what is to run"
    needed = host.slots if host.devices is None else max(host.devices) + 1
    if most_devices and facts.devices < needed:
        asked = "slots in the hostfile" if host.devices is None else "devices up to the last that is asked for"
        yield (
            f"has {facts.devices} CUDA device{'s' if facts.devices != 1 else ''} and {needed} {asked}: correct the "
            f"hostfile or the filter (CUDA_VISIBLE_DEVICES counts, where it is set)"
        )
    if facts.port_problem is not None:
        yield (
            f"cannot listen at port {spec.port}, at which the nodes are to meet ({facts.port_problem}): choose another "
            f"with --master-port, or leave it out to have one chosen"
        )


def clock_offset(theirs: float, asked: float, answered: float) -> float:
    """Return by how many seconds a clock is ahead at least (negative: behind), if it was read in this interval."""
    return theirs - answered if theirs > answered else min(0.0, theirs - asked)


def describe_unreached(first: str, port: int, reach: Reach | None) -> str:
    tried = "" if reach is None else "; ".join(f"{address}: {why}" for address, why in reach.failed.items())
    return (
        f"cannot reach {first} at port {port} ({tried or 'it has not tried'}): open the port in the firewalls between "
        f"them, choose another with --master-port, or say with --master-addr at which address {first} is reached"
    )


def find_namesakes(hosts: Sequence[Host], answers: Sequence[Answer]) -> Iterator[tuple[str, str]]:
    """Yield a problem for each host that calls itself as one before it does."""
    owner: dict[str, str] = {}
    for host, answer in zip(hosts, answers, strict=True):
        if answer.facts is None:
            continue
        name = answer.facts.host
        if name in owner:
            yield (
                host.name,
                f"calls itself {name!r}, as {owner[name]} does: name each machine once in the hostfile, and give each "
                f"a host name of its own",
            )
        owner.setdefault(name, host.name)
