"""Job specification of one node, sent from the first node to the others as JSON."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

JOB_ID_VARIABLE = "ZEROLITE_JOB_ID"
"""In the environment of every process of a job, so that none is overlooked when the job ends."""


def module_arguments(module: str) -> list[str]:
    """Arguments of Python that run ``main`` of a module of zerolite, as `-m` would, but without the working directory
    on ``sys.path``: a user's file that is called like one of Python's modules would take its place."""
    return [
        "-c",
        "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
        f"from {module} import main; sys.exit(main(sys.argv[1:]))",
    ]


def find_target_problem(target: Sequence[str], python: bool) -> str | None:
    """Say why a script, module or command cannot be run from the working directory, or return None. Of a module only
    the top-level package is looked for."""
    name = target[-1]
    if not python:
        return None if shutil.which(name) else f"there is no command {name!r} that could be run"
    if target[0] == "-m":
        if not all(part.isidentifier() for part in name.split(".")):
            return f"-m expects the name of a module, as in `-m mypackage.train`, and got {name!r}"
        top_level, path_before = name.partition(".")[0], list(sys.path)
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        try:
            found = top_level in sys.modules or importlib.util.find_spec(top_level) is not None
        finally:
            sys.path[:] = path_before
        missing = f"there is no module {top_level!r}, neither in {os.getcwd()!r} nor among the installed packages"
        return None if found else missing
    if os.path.isdir(name):
        return f"expected a script, and {name!r} is a directory: name the Python file in it, or use `-m` for a package"
    if not os.path.exists(name):
        return f"there is no script {name!r} in {os.getcwd()!r}"
    return None if os.access(name, os.R_OK) else f"the script {name!r} cannot be read: check its permissions"


def find_port_problem(port: int | None) -> str | None:
    """Say why the processes cannot meet at this port, or return None."""
    if port is None:
        return None
    if not 1 <= port <= 65535:
        return f"--master-port expects a TCP port, 1 to 65535, and got {port}; leave it out to have a free one chosen"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        return f"--master-port {port} cannot be used ({error.strerror}); leave it out to have a free one chosen"
    return None


@dataclass(frozen=True)
class JobSpec:
    """The part of a job that the command line gives and every node takes as it is.

    Attributes:
        target: what Python is to run, `["script.py"]` or `["-m", "module"]`; a command where ``python`` is False.
        script_args: the script's own arguments, untouched.
        python: whether ``target`` is run by this Python.
        max_restarts: how often all ranks are started again after a failure.
        log_dir: directory for the ranks' output, absolute; None for a temporary one, removed if the job succeeds.
        tee: ranks, besides rank 0, whose output also goes to the terminal, each line behind its rank; None for all.
        env: variables to set in the ranks' environment.
        bind_cores: whether each rank is bound to cores of its own.
    """

    target: list[str]
    script_args: list[str] = field(default_factory=list)
    python: bool = True
    max_restarts: int = 0
    log_dir: str | None = None
    tee: list[int] | None = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    bind_cores: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeJob(JobSpec):
    """One node's part of a job.

    Attributes:
        job_id: hexadecimal, the same on all nodes; the value of :data:`JOB_ID_VARIABLE`.
        nproc: processes on this node, 1 or more.
        min_nodes, max_nodes: how many nodes the job may have; equal unless it is elastic.
        node_rank: this node's place, 0 or more.
        master_addr: host name or address of the first node, as the others reach it.
        other_addresses: those to try where the first node cannot be reached at ``master_addr``.
        master_port: TCP port on the first node; 0 for a free one, where there is one node.
        join_s: seconds in which all nodes must have come.
        devices: indices of the CUDA devices to use on this node; None for all that are visible.
        watch_stdin: whether signals come through standard input, and the node's part ends when it closes.
        cwd: the working directory; None where the node has a command of its own.
        versions: of what must be the same on all hosts.
    """

    job_id: str
    nproc: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    other_addresses: list[str] = field(default_factory=list)
    master_port: int = 0
    join_s: float = 300.0
    devices: list[int] | None = None
    watch_stdin: bool = False
    cwd: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def is_elastic(self) -> bool:
        """True if the job goes on with fewer nodes when some are lost."""
        return self.min_nodes < self.max_nodes

    @classmethod
    def of(cls, spec: JobSpec, **fields: Any) -> NodeJob:
        """Return a node's part of a job; ``fields`` are the node's own."""
        shared = {one.name: getattr(spec, one.name) for one in dataclasses.fields(JobSpec)}
        return cls(**{"job_id": secrets.token_hex(8), **shared, **fields})

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> NodeJob:
        """Inverse of :meth:`to_json`. Raises TypeError for fields of another version of zerolite."""
        return cls(**json.loads(text))


def read_line(descriptor: int) -> str:
    """A file's first line, with its end if there is one, and nothing behind it, which another process may read."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return line.decode()
