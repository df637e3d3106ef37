"""Self-check of a host before a job starts: `main([SPECIFICATION, NODE])`.

Writes two lines: facts at once, then what came of the attempts to reach the first node's port, at which that node's own
check listens meanwhile. Needs no torch.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from zerolite.launcher.job import find_target_problem
from zerolite.launcher.remote_commands import pack, unpack
from zerolite.utils import network
from zerolite.utils.resources import count_cuda_devices
from zerolite.version import __version__

LINE_START = "zerolite-check "
"""Begins each line that is meant for the launcher."""

REACH_S = 10.0
"""The attempts to reach the first node end after this time."""

ATTEMPT_S = 5.0
LISTEN_S = 25.0


@dataclass(frozen=True)
class CheckSpec:
    """Checks that the hosts of a job run.

    Attributes:
        job_id: the word by which the first node's listener is known.
        hosts: names, in the order of the nodes.
        addresses: at which the others may reach the first node; the first that all reach is used.
        from_launcher: whether the host that is connected to this one by ssh is the first node.
        port: TCP port of the rendezvous on the first node.
        cwd: the working directory.
        target: the script, `["-m", module]`, or a command if ``python`` is False.
        visible: CUDA_VISIBLE_DEVICES of the ranks; None if it is the host's own.
    """

    job_id: str
    hosts: list[str]
    addresses: list[str]
    from_launcher: bool
    port: int
    cwd: str
    target: list[str]
    python: bool = True
    visible: str | None = None

    def pack(self) -> str:
        return pack(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> CheckSpec:
        return cls(**unpack(text))


@dataclass
class Facts:
    """Facts about a host.

    Attributes:
        host: what it calls itself.
        time: seconds since the epoch by its clock.
        versions: of python, zerolite and torch ("" if it is not installed).
        at_work: whether it is in the working directory of the job.
        target_problem: why the script, module or command is not there.
        devices: number of CUDA devices.
        port_problem: why nothing can listen at the port; the first node alone looks.
        gloo: gloo's interface, if the host's environment sets it.
    """

    host: str
    time: float
    versions: dict[str, str]
    at_work: bool
    target_problem: str | None
    devices: int
    port_problem: str | None = None
    gloo: str | None = None


@dataclass
class Reach:
    """Reachability of a host and the first node from each other.

    Attributes:
        address: at which this host has reached the first node; None if it has not.
        interface: of this host, by which it did; "" if unknown. On the first node, the one at which others came.
        failed: why each of the other addresses was not reached.
    """

    address: str | None = None
    interface: str = ""
    failed: dict[str, str] = field(default_factory=dict)


def collect_facts(spec: CheckSpec) -> Facts:
    try:
        at_work = os.path.samefile(spec.cwd, ".")
    except OSError:
        at_work = False
    environ = os.environ if spec.visible is None else {"CUDA_VISIBLE_DEVICES": spec.visible}
    return Facts(
        host=socket.gethostname(),
        time=time.time(),
        versions=own_versions(),
        at_work=at_work,
        target_problem=find_target_problem(spec.target, spec.python),
        devices=count_cuda_devices(environ),
        gloo=os.environ.get(network.GLOO_VARIABLE),
    )


def own_versions() -> dict[str, str]:
    """Versions of what must be the same on all hosts, found without importing torch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {"python": ".".join(platform.python_version_tuple()[:2]), "zerolite": __version__, "torch": torch}


def await_others(listener: socket.socket, spec: CheckSpec) -> Reach:
    """Answer the other nodes until each has come, or until ``LISTEN_S`` are over."""
    deadline = time.monotonic() + LISTEN_S
    listener.settimeout(0.2)
    missing = {str(node) for node in range(1, len(spec.hosts))}
    reach = Reach()
    while missing and time.monotonic() < deadline:
        try:
            connection, _ = listener.accept()
        except OSError:  # no host has connected
            continue
        with connection:
            node = answer(connection, spec.job_id)
            if node in missing:
                missing.remove(node)
                reach.interface = reach.interface or network.interface_of(connection.getsockname()[0]) or ""
    return reach


def answer(connection: socket.socket, job_id: str) -> str | None:
    """Return the number of the node of this job that is at the other end; None if something else is."""
    try:
        connection.settimeout(ATTEMPT_S)
        word, _, node = connection.makefile("r", encoding="ascii").readline(200).strip().partition(" ")
        if word != job_id:
            return None
        connection.sendall(f"here {job_id}\n".encode())
        connection.recv(1)  # the other end closes first, so that the port is free at once
        return node
    except (OSError, UnicodeDecodeError):
        return None


def greet(address: str, port: int, job_id: str, node: int) -> str:
    """Speak to the listener of this job; return the address from which this host did. Raises OSError."""
    with socket.create_connection((address, port), timeout=ATTEMPT_S) as connection:
        connection.sendall(f"{job_id} {node}\n".encode())
        reply = connection.makefile("rb").readline(200)
        if reply != f"here {job_id}\n".encode():
            raise ConnectionError("something else listens there")
        return str(connection.getsockname()[0])


def reach_first(spec: CheckSpec, node: int) -> Reach:
    """Try the addresses of the first node in turn, until one is reached or the time is over."""
    reach = Reach()
    deadline = time.monotonic() + REACH_S
    while time.monotonic() < deadline:
        for address in candidate_addresses(spec, os.environ):
            try:
                own = greet(address, spec.port, spec.job_id, node)
            except (OSError, UnicodeError) as error:
                reach.failed[address] = describe_error(error)
            else:
                return Reach(address, network.interface_of(own) or "")
        time.sleep(0.1)
    return reach


def describe_error(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    number = getattr(error, "errno", None) or 0
    return os.strerror(number) if number > 0 else str(getattr(error, "strerror", None) or error)


def candidate_addresses(spec: CheckSpec, environ: Mapping[str, str]) -> list[str]:
    """The addresses to try, without repetition; the one that ssh came from is behind the given ones."""
    candidates = list(spec.addresses)
    came_from = environ.get("SSH_CONNECTION", "").split()
    if spec.from_launcher and came_from:
        candidates.append(came_from[0])
    return list(dict.fromkeys(candidates))


def node_index(node: str, hosts: Sequence[str], environ: Mapping[str, str]) -> int:
    """Return which of the hosts a process is on, told by number, name, or a variable that holds either.

    Raises:
        ValueError: it is none of them.
    """
    told = environ.get(node, node)
    if told in hosts:
        return list(hosts).index(told)
    if told.isdecimal() and int(told) < len(hosts):
        return int(told)
    raise ValueError(f"this process was started on {told!r}, which is none of the hosts: {', '.join(hosts)}")


def write_line(node: int, **content: Any) -> None:
    line = LINE_START + json.dumps({"node": node, **content}) + "\n"
    os.write(1, line.encode())


def run_first(spec: CheckSpec) -> None:
    """The first node's part: listen, and report meanwhile."""
    try:
        listener = network.listen(spec.port)
    except OSError as error:
        facts = collect_facts(spec)
        facts.port_problem = describe_error(error)
        write_line(0, facts=asdict(facts))
        return
    with listener, ThreadPoolExecutor(1) as pool:
        reach = pool.submit(await_others, listener, spec)
        write_line(0, facts=asdict(collect_facts(spec)))
        write_line(0, reach=asdict(reach.result()))


def main(argv: Sequence[str]) -> int:
    """Report on this host. 2 if it is none of the job's."""
    spec = CheckSpec.unpack(argv[0])
    try:
        node = node_index(argv[1], spec.hosts, os.environ)
    except ValueError as error:
        print(f"zerolite: {error}", file=sys.stderr)
        return 2
    if node == 0:
        run_first(spec)
    else:
        write_line(node, facts=asdict(collect_facts(spec)))
        write_line(node, reach=asdict(reach_first(spec, node)))
    return 0
