"""Assignment of a job to its hosts."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from zerolite.launcher.hosts import Host, HostsError, limit_hosts, read_hostfile, select_hosts
from zerolite.launcher.job import JOB_ID_VARIABLE, NodeJob
from zerolite.launcher.options import LaunchRequest
from zerolite.launcher.resources import count_cuda_devices
from zerolite.utils import network
from zerolite.utils.network import SECRET_VARIABLE, is_loopback
from zerolite.version import __version__

EXPORTED = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "ZEROLITE_")
"""The ranks of all hosts get the variables with these prefixes from the host where the job is started."""


@dataclass(frozen=True)
class JobPlan:
    """A job on its hosts.

    Attributes:
        hosts: hosts in the order of the nodes.
        nodes: the nodes' parts.
        local_node: number of the node that runs on this host; None if none does.
        by_ssh: there are parts on other hosts.
    """

    hosts: list[Host]
    nodes: list[NodeJob]
    local_node: int | None
    by_ssh: bool


def own_versions() -> dict[str, str]:
    """Return the versions that must be the same on all hosts, without importing torch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {"python": ".".join(platform.python_version_tuple()[:2]), "zerolite": __version__, "torch": torch}


def make_plan(request: LaunchRequest) -> JobPlan:
    """Assign a job to its hosts. Raises HostsError."""
    hosts = find_hosts(request)
    local_node = next((i for i, host in enumerate(hosts) if network.is_this_host(host.name)), None)
    port = request.master_port
    fields: dict[str, Any] = {"job_id": secrets.token_hex(8), "num_nodes": len(hosts)}
    by_ssh = len(hosts) > 1 or local_node is None
    if not by_ssh:
        fields["master_port"] = port or 0
    else:
        address = request.master_addr or first_address(hosts[0].name, local_node == 0)
        fields.update(master_addr=address, master_port=port or network.free_port())
        fields.update(env=job_variables(request, os.environ), versions=own_versions(), cwd=os.getcwd())
    nodes = [
        NodeJob.of(request, node_rank=i, nproc=host.slots, devices=host.devices and list(host.devices), **fields)
        for i, host in enumerate(hosts)
    ]
    return JobPlan(hosts, nodes, local_node, by_ssh)


def find_hosts(request: LaunchRequest) -> list[Host]:
    """Find the hosts: those of the hostfile, or this one. Raises HostsError if a filter or limit does not fit."""
    filters = (request.include, request.exclude)
    if request.hostfile is not None:
        hosts = read_hostfile(request.hostfile)
    elif (request.num_nodes or 1) > 1:
        raise HostsError(
            f"--num-nodes asks for {request.num_nodes} hosts and nothing says which: give a --hostfile with lines such "
            f"as 'worker-1 slots=8', or start the script by `torchrun --nnodes {request.num_nodes}` on each host"
        )
    else:
        slots = request.nproc or 0
        if not slots or filters != (None, None):
            slots = max(slots, count_cuda_devices({**os.environ, **request.env}) or 1)
        hosts = [Host("localhost", slots)]
    return limit_hosts(select_hosts(hosts, *filters), request.num_nodes, request.nproc)


def first_address(name: str, is_local: bool) -> str:
    """Return the address at which the others may reach the first host: its name, unless that means every host itself.

    Args:
        name: name of the first host in the hostfile.
        is_local: the first host is this one, so its own addresses are known.
    """
    own = network.own_addresses() if is_local and is_loopback(name) else []
    return own[0] if own else name


def job_variables(request: LaunchRequest, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the ranks of all hosts get: those exported here, of the env file, and the secret."""
    exported = {key: value for key, value in environ.items() if key.startswith(EXPORTED) and key != JOB_ID_VARIABLE}
    variables = {**exported, **request.env}
    if request.dry_run:  # it prints them, and a secret must not be printed
        variables.pop(SECRET_VARIABLE, None)
    else:
        variables.setdefault(SECRET_VARIABLE, secrets.token_hex(16))
    return variables
