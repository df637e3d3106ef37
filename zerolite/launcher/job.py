"""Job specification of one node, sent from the first node to the others as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from zerolite.utils.network import GLOO_VARIABLE, interface_towards

JOB_ID_VARIABLE = "ZEROLITE_JOB_ID"
"""In the environment of every process of a job, so that none is overlooked when the job ends."""


def run_module(module: str) -> list[str]:
    """Arguments of Python that run ``main`` of a module of zerolite, as `-m` would, but without the working directory
    on ``sys.path``: a user's file that is called like one of Python's modules would take its place."""
    return [
        "-c",
        "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
        f"from {module} import main; sys.exit(main(sys.argv[1:]))",
    ]


def gloo_variables(job: NodeJob, environ: Mapping[str, str]) -> dict[str, str]:
    """Return gloo's interface for a node that finds it for itself, as a variable of the environment.

    Empty where it is set already, where there is one node, and where no interface leads to the first node.
    """
    if job.max_nodes == 1 or GLOO_VARIABLE in environ or GLOO_VARIABLE in job.env:
        return {}
    interface = interface_towards(job.master_addr)
    return {} if interface is None else {GLOO_VARIABLE: interface}


@dataclass(frozen=True)
class NodeJob:
    """One node's part of a job.

    Attributes:
        job_id: hexadecimal, the same on all nodes; the value of :data:`JOB_ID_VARIABLE`.
        target: what Python is to run, `["script.py"]` or `["-m", "module"]`; a command where ``python`` is False.
        script_args: the script's own arguments, untouched.
        python: whether ``target`` is run by this Python.
        nproc: processes on this node, 1 or more.
        min_nodes, max_nodes: how many nodes the job may have; equal unless it is elastic.
        node_rank: this node's place, 0 or more; None where nodes are numbered as they come (an elastic job).
        master_addr: host name or address of the first node, as the others reach it.
        several_addresses: whether the nodes reach the first one at different addresses, so that it listens at all.
        master_port: TCP port on the first node; 0 for a free one, where there is one node.
        max_restarts: how often all ranks are started again after a failure.
        log_dir: directory for the ranks' output; None for a temporary one, which is removed if the job succeeds.
        tee: ranks, besides rank 0, whose output also goes to the terminal, each line behind its rank; None for all.
        env: variables to set in the ranks' environment.
        devices: indices of the CUDA devices to use on this node; None for all that are visible.
        bind_cores: whether each rank is bound to cores of its own.
        watch_stdin: whether the node's part ends when nothing more comes through standard input.
    """

    job_id: str
    target: list[str]
    script_args: list[str] = field(default_factory=list)
    python: bool = True
    nproc: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = 0
    master_addr: str = "127.0.0.1"
    several_addresses: bool = False
    master_port: int = 0
    max_restarts: int = 0
    log_dir: str | None = None
    tee: list[int] | None = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    devices: list[int] | None = None
    bind_cores: bool = False
    watch_stdin: bool = False

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> NodeJob:
        """Inverse of :meth:`to_json`. Raises TypeError for fields of another version of zerolite."""
        return cls(**json.loads(text))


def read_line(descriptor: int) -> str:
    """A file's first line, with its end if there is one, and nothing behind it, which somebody else may read."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return line.decode()
