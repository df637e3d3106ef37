"""Command lines of ssh, pdsh, mpirun and srun that start nodes on other hosts."""

from __future__ import annotations

import base64
import json
import os
import shlex
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerolite.launcher.job import module_arguments

NODE_MODULE = "zerolite.launcher.node_main"

CONNECT_TIMEOUT_S = 10
KEEPALIVE_S, KEEPALIVES = 5, 4
"""A connection without an answer for KEEPALIVE_S x KEEPALIVES seconds is lost."""

SSH_OPTIONS = {
    "BatchMode": "yes",  # no question for a password, which would wait for ever
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ServerAliveInterval": str(KEEPALIVE_S),
    "ServerAliveCountMax": str(KEEPALIVES),
}

EXPORTED = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "ZEROLITE_")
"""The ranks of all hosts get the variables with these prefixes from the host where the job is started."""

NOT_EXPORTED = ("ZEROLITE_JOB_ID", "ZEROLITE_BIND_CPUS")


@dataclass(frozen=True)
class Route:
    """Way to reach the hosts of a job.

    Attributes:
        launcher: `ssh`, `pdsh`, `openmpi` or `slurm`.
        hosts: names, some as `user@name`, in the order of the nodes.
        here: index of this host, whose node starts without ssh; None if it is not among them.
        launcher_args: additional arguments for the launcher's own command.
        ssh_port: port of the hosts' sshd; None leaves it to ssh's configuration.
        name_hosts: name the hosts to srun; False lets it take those of the allocation.
        cwd: the working directory on all hosts.
        interpreter: path of Python on all hosts.
    """

    launcher: str
    hosts: Sequence[str]
    here: int | None = None
    launcher_args: Sequence[str] = ()
    ssh_port: int | None = None
    name_hosts: bool = True
    cwd: str = field(default_factory=os.getcwd)
    interpreter: str = sys.executable


@dataclass(frozen=True)
class Invocation:
    """Process to start on this host.

    Attributes:
        argv: the command line.
        env: variables to set for it.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)

    def shell_line(self) -> str:
        """Return the command as it would be typed into a shell."""
        return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in self.env.items()), shlex.join(self.argv)])


def exported_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the ranks of all hosts get from this one."""
    return {key: value for key, value in environ.items() if key.startswith(EXPORTED) and key not in NOT_EXPORTED}


def pack(value: object) -> str:
    """Return a JSON value as text that no shell changes."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(value).encode(), 9)).decode()


def unpack(text: str) -> Any:
    """Inverse of :func:`pack`."""
    return json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))


def node_line(route: Route, arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the shell line that starts a node on a host: in the working directory, by the same Python.

    Python's own variables, such as PYTHONPATH, are set as here. `cd` and Python are joined by `;`, not `&&`: if the
    directory is missing, the node starts elsewhere and reports it.
    """
    settings = [f"{key}={value}" for key, value in sorted(environ.items()) if key.startswith("PYTHON")]
    environment = ["env", *settings] if settings else []
    argv = [*environment, route.interpreter, *module_arguments(NODE_MODULE), *arguments]
    return f"cd {shlex.quote(route.cwd)}; exec {shlex.join(argv)}"


def ssh_commands(route: Route, environ: Mapping[str, str] | None = None) -> list[Invocation]:
    """Return one command per host, in their order. Each node reads its job from its standard input.

    The node on this host needs no ssh; the others get `ssh` as their only argument.
    """
    line = node_line(route, ["ssh"], os.environ if environ is None else environ)
    options = [word for key, value in SSH_OPTIONS.items() for word in ("-o", f"{key}={value}")]
    if route.ssh_port is not None:
        options += ["-p", str(route.ssh_port)]
    here = Invocation([route.interpreter, *module_arguments(NODE_MODULE)])
    return [
        here if i == route.here else Invocation(["ssh", *route.launcher_args, *options, host, line])
        for i, host in enumerate(route.hosts)
    ]


def tool_command(route: Route, payload: str, environ: Mapping[str, str] | None = None) -> Invocation:
    """Return the one command by which pdsh, mpirun or srun starts the nodes of all hosts.

    Every host runs the same line, `PAYLOAD NODE`. NODE tells the process which host it is on: the host's name, or an
    environment variable with its name or index.

    Args:
        payload: all nodes' jobs, of :func:`pack`.
    """
    environ = os.environ if environ is None else environ
    if route.launcher == "pdsh":
        return pdsh_command(route, payload, environ)
    is_openmpi = route.launcher == "openmpi"
    line = node_line(route, [payload, "OMPI_COMM_WORLD_RANK" if is_openmpi else "SLURMD_NODENAME"], environ)
    argv = openmpi_arguments(route) if is_openmpi else slurm_arguments(route)
    return Invocation([*argv, "/bin/sh", "-c", line])


def pdsh_command(route: Route, payload: str, environ: Mapping[str, str]) -> Invocation:
    """Return pdsh's command. ssh's options go through a variable, since pdsh starts ssh itself."""
    options = " ".join(f"-o {key}={value}" for key, value in SSH_OPTIONS.items())
    if route.ssh_port is not None:
        options += f" -p {route.ssh_port}"
    users = environ.get("PDSH_SSH_ARGS_APPEND", "")
    # Without -N, pdsh would put the host's name before each line of output.
    argv = ["pdsh", "-R", "ssh", "-S", "-N", "-f", "1024", *route.launcher_args, "-w", ",".join(route.hosts)]
    # pdsh replaces %h by the host's name, and %% by %.
    line = node_line(route, [payload], environ).replace("%", "%%") + " %h"
    return Invocation([*argv, line], {"PDSH_SSH_ARGS_APPEND": f"{users} {options}".strip()})


def openmpi_arguments(route: Route) -> list[str]:
    """Return the start of mpirun's command: one process per host, in the hosts' order, not bound to cores."""
    hosts = ",".join(f"{host}:1" for host in route.hosts)
    count = str(len(route.hosts))
    return ["mpirun", *route.launcher_args, "-n", count, "--map-by", "ppr:1:node", "--bind-to", "none", "-H", hosts]


def slurm_arguments(route: Route) -> list[str]:
    """Return the start of srun's command: one task per host, not bound to the cores that the step has there."""
    count = len(route.hosts)
    argv = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    argv += ["--cpu-bind=none", "--unbuffered", *route.launcher_args]
    return [*argv, f"--nodelist={','.join(route.hosts)}"] if route.name_hosts else argv
