"""Specification of a job and of one node's part, which goes to the other nodes as JSON."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

JOB_ID_VARIABLE = "ZEROLITE_JOB_ID"
"""Marker in the environment of every process of a job, by which the end of the job finds them."""


def module_arguments(module: str) -> list[str]:
    """Return the arguments with which Python runs ``main`` of a module of zerolite.

    `-m` would put the working directory first on ``sys.path``. A user's file called like one of Python's modules, such
    as `queue.py`, would then be imported in its place.
    """
    return [
        "-c",
        "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
        f"from {module} import main; sys.exit(main(sys.argv[1:]))",
    ]


@dataclass(frozen=True)
class JobSpec:
    """Settings of a job that the command line gives and that are equal on all nodes.

    Attributes:
        target: `["script.py"]` or `["-m", "module"]` for Python; a command if ``python`` is False.
        script_args: arguments of the script, unchanged.
        python: ``target`` is run by this Python.
        log_dir: absolute path of the directory for the ranks' output; None for a temporary one, which is removed if the
            job succeeds.
        tee: ranks, besides rank 0, whose lines also go to the terminal, each with its rank in front; None for all.
        env: variables to set in the ranks' environment.
    """

    target: list[str]
    script_args: list[str] = field(default_factory=list)
    python: bool = True
    log_dir: str | None = None
    tee: list[int] | None = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeJob(JobSpec):
    """One node's part of a job.

    Attributes:
        job_id: hexadecimal number of the job.
        nproc: number of ranks on this node, 1 or more.
        num_nodes: number of nodes.
        node_rank: number of this node, 0 or more.
        master_addr: host name or address at which the others reach the first node.
        master_port: TCP port on the first node; 0 for a free one, possible with one node.
        join_s: seconds within which all nodes must come.
        devices: indices of the CUDA devices to use on this node; None for all visible ones.
        cwd: the working directory; None on one machine.
        versions: versions of Python, torch and zerolite, which must be the same on all hosts.
    """

    job_id: str
    nproc: int = 1
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    join_s: float = 300.0
    devices: list[int] | None = None
    cwd: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: JobSpec, **fields: Any) -> NodeJob:
        """Return a node's part of a job; ``fields`` are the fields of NodeJob itself."""
        shared = {one.name: getattr(spec, one.name) for one in dataclasses.fields(JobSpec)}
        return cls(**{"job_id": secrets.token_hex(8), **shared, **fields})

    def to_json(self) -> str:
        """Return the part as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> NodeJob:
        """Inverse of :meth:`to_json`. Raises TypeError for fields of another version of zerolite."""
        return cls(**json.loads(text))

    def rank_command(self) -> list[str]:
        """Return the command of each rank."""
        what = ["--script" if self.python else "--command", *self.target]
        if self.python and self.target[0] == "-m":
            what = ["--module", *self.target[1:]]
        return [sys.executable, *module_arguments("zerolite.launcher.rank"), *what, *self.script_args]

    def threads_per_rank(self, environ: Mapping[str, str]) -> int | None:
        """Return OMP_NUM_THREADS of each rank, an equal share of the cores; None if the user has set it."""
        if "OMP_NUM_THREADS" in environ or "OMP_NUM_THREADS" in self.env:
            return None
        from zerolite.launcher.resources import count_cores

        return max(1, count_cores() // self.nproc)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that all ranks of the node get besides ``environ``: env file, threads, devices."""
        variables = dict(self.env)
        threads = self.threads_per_rank(environ)
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
        if self.devices is not None:
            from zerolite.launcher.resources import visible_devices

            variables["CUDA_VISIBLE_DEVICES"] = visible_devices({**environ, **self.env}, self.devices)
        return variables


def find_target_problem(target: Sequence[str], python: bool) -> str | None:
    """Say why a script, module or command cannot be run from the working directory, or return None.

    Only the top-level package of a module is searched for: a search for what is inside would import it.
    """
    name = target[-1]
    if not python:
        return None if shutil.which(name) else f"there is no command {name!r} that could be run"
    if target[0] == "-m":
        if not all(part.isidentifier() for part in name.split(".")):
            return f"-m expects the name of a module, as in `-m mypackage.train`, and got {name!r}"
        top_level, path_before = name.partition(".")[0], list(sys.path)
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        try:
            is_importable = top_level in sys.modules or importlib.util.find_spec(top_level) is not None
        finally:
            sys.path[:] = path_before
        missing = f"there is no module {top_level!r}, neither in {os.getcwd()!r} nor among the installed packages"
        return None if is_importable else missing
    if os.path.isdir(name):
        return f"expected a script, and {name!r} is a directory: name the Python file in it, or use `-m` for a package"
    if not os.path.exists(name):
        return f"there is no script {name!r} in {os.getcwd()!r}"
    return None if os.access(name, os.R_OK) else f"the script {name!r} cannot be read: check its permissions"


def find_port_problem(port: int | None) -> str | None:
    """Say why the rendezvous store cannot listen at this port, or return None."""
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
