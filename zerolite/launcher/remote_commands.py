"""Command lines for remote starts: ssh, pdsh, mpirun, srun."""

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

CONNECT_TIMEOUT_S = 10
KEEPALIVE_S, KEEPALIVES = 5, 4
"""A connection over which nothing comes back for the product of these is lost."""

SSH_OPTIONS = {
    "BatchMode": "yes",  # a question for a password would wait for ever
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ServerAliveInterval": str(KEEPALIVE_S),
    "ServerAliveCountMax": str(KEEPALIVES),
}

EXPORTED = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "ZEROLITE_")
"""Variables that begin so are the same in the ranks of all hosts as where the job is started."""

NOT_EXPORTED = ("ZEROLITE_JOB_ID", "ZEROLITE_BIND_CPUS")


@dataclass(frozen=True)
class Route:
    """Way to reach the hosts of a job.

    Attributes:
        launcher: `ssh`, `pdsh`, `openmpi` or `slurm`.
        hosts: names, some as `user@name`, in the order of the nodes.
        here: which of them is the host that this runs on; with ssh, it is started without.
        launcher_args: further arguments of the launcher's own command.
        ssh_port: of the hosts' sshd; None for what ssh's configuration says.
        name_hosts: whether srun is told the hosts; otherwise it takes those of the allocation.
        cwd: the working directory, on all hosts.
        interpreter: path of Python, on all hosts.
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
    """A process to start on this host.

    Attributes:
        nodes: indices of the hosts on which it starts something.
        argv: the command line.
        env: variables to set for it.
    """

    nodes: Sequence[int]
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)

    def shell_line(self) -> str:
        """The command as it would be typed."""
        return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in self.env.items()), shlex.join(self.argv)])


def exported_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the ranks of all hosts are to have as they are here."""
    return {key: value for key, value in environ.items() if key.startswith(EXPORTED) and key not in NOT_EXPORTED}


def pack(value: object) -> str:
    """Return a JSON value as letters and digits, for a command line."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(value).encode(), 9)).decode()


def unpack(text: str) -> Any:
    """Inverse of :func:`pack`."""
    return json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))


def python_line(route: Route, module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return what a shell on a host is to run: a module of zerolite, in the working directory, by the same Python.

    Python's own variables, such as PYTHONPATH, are the same as here. Where the directory is missing the module starts
    elsewhere, to say so.
    """
    settings = [f"{key}={value}" for key, value in sorted(environ.items()) if key.startswith("PYTHON")]
    environment = ["env", *settings] if settings else []
    argv = [*environment, route.interpreter, *module_arguments(module), *arguments]
    return f"cd {shlex.quote(route.cwd)}; exec {shlex.join(argv)}"


def make_commands(
    route: Route, module: str, payload: str | None, environ: Mapping[str, str] | None = None
) -> list[Invocation]:
    """Return the commands that run `main` of MODULE, with PAYLOAD and NODE if there is one, on every host.

    NODE tells the process which host it is: its index, its name, or the environment variable in which either stands.

    Args:
        payload: of :func:`pack`; None if each process is told by its standard input, which only ssh can do. Those on
            other hosts then get `ssh` as their only argument.
    """
    environ = os.environ if environ is None else environ
    if route.launcher == "ssh":
        return [ssh_command(route, i, module, payload, environ) for i in range(len(route.hosts))]
    if payload is None:
        raise ValueError(f"{route.launcher} cannot give each host a standard input of its own")
    node = {"pdsh": "NODE", "openmpi": "OMPI_COMM_WORLD_RANK", "slurm": "SLURMD_NODENAME"}[route.launcher]
    line = python_line(route, module, [payload, node], environ)
    everywhere = range(len(route.hosts))
    if route.launcher == "pdsh":
        return [pdsh_command(route, line, environ)]
    argv = openmpi_arguments(route) if route.launcher == "openmpi" else slurm_arguments(route)
    return [Invocation(everywhere, [*argv, "/bin/sh", "-c", line])]


def ssh_command(route: Route, index: int, module: str, payload: str | None, environ: Mapping[str, str]) -> Invocation:
    arguments = [] if payload is None else [payload, str(index)]
    if index == route.here:
        return Invocation([index], [route.interpreter, *module_arguments(module), *arguments])
    arguments = arguments or ["ssh"]
    options = [word for key, value in SSH_OPTIONS.items() for word in ("-o", f"{key}={value}")]
    if route.ssh_port is not None:
        options += ["-p", str(route.ssh_port)]
    line = python_line(route, module, arguments, environ)
    return Invocation([index], ["ssh", *route.launcher_args, *options, route.hosts[index], line])


def pdsh_command(route: Route, line: str, environ: Mapping[str, str]) -> Invocation:
    """pdsh replaces %h by the host's name. Without -N it would put that before each line of output."""
    options = " ".join(f"-o {key}={value}" for key, value in SSH_OPTIONS.items())
    if route.ssh_port is not None:
        options += f" -p {route.ssh_port}"
    theirs = environ.get("PDSH_SSH_ARGS_APPEND", "")
    hosts = ",".join(route.hosts)
    argv = ["pdsh", "-R", "ssh", "-S", "-N", "-f", "1024", *route.launcher_args, "-w", hosts]
    remote = line.replace("%", "%%").removesuffix("NODE") + "%h"
    return Invocation(range(len(route.hosts)), [*argv, remote], {"PDSH_SSH_ARGS_APPEND": f"{theirs} {options}".strip()})


def openmpi_arguments(route: Route) -> list[str]:
    """One process per host, in the order of the hosts, which may use all cores of its host."""
    hosts = ",".join(f"{host}:1" for host in route.hosts)
    count = str(len(route.hosts))
    return ["mpirun", *route.launcher_args, "-n", count, "--map-by", "ppr:1:node", "--bind-to", "none", "-H", hosts]


def slurm_arguments(route: Route) -> list[str]:
    """One task per host, which may use all cores that the step has there. With -l or a prefix, checks would fail."""
    count = len(route.hosts)
    argv = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    argv += ["--cpu-bind=none", "--unbuffered", *route.launcher_args]
    return [*argv, f"--nodelist={','.join(route.hosts)}"] if route.name_hosts else argv
