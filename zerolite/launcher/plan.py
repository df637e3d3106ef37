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
from zerolite.launcher.rank import BIND_VARIABLE
from zerolite.launcher.resources import default_nproc
from zerolite.utils import network
from zerolite.utils.network import SECRET_VARIABLE, is_loopback
from zerolite.version import __version__

JOIN_S = 120.0
"""Seconds within which nodes that one command starts must meet."""

DEFAULT_PORT = 29500
"""Default port if every node has a command of its own: all nodes must use the same one."""

EXPORTED = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "ZEROLITE_")
"""The ranks of all hosts get the variables with these prefixes from the host where the job is started."""

NOT_EXPORTED = (JOB_ID_VARIABLE, BIND_VARIABLE)


@dataclass(frozen=True)
class JobPlan:
    """A job on its hosts.

    Attributes:
        hosts: hosts in the order of the nodes.
        nodes: the nodes' parts.
        local_node: number of the node that runs on this host; None if none does.
        by_ssh: this command starts the parts of all hosts; otherwise only this host's.
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
    local_node = request.node_rank
    if local_node is None and (request.hostfile is not None or not request.no_ssh):
        local_node = next((i for i, host in enumerate(hosts) if network.is_this_host(host.name)), None)
    if request.no_ssh:
        local_node = check_own_number(request, local_node, hosts)
    port, first = request.master_port, hosts[0].name
    fields: dict[str, Any] = {"job_id": secrets.token_hex(8), "num_nodes": len(hosts)}
    by_ssh = not request.no_ssh and (len(hosts) > 1 or local_node != 0)
    if not by_ssh and len(hosts) == 1:
        fields["master_port"] = port or 0
    elif not by_ssh:
        fields.update(master_addr=request.master_addr or first, master_port=port or DEFAULT_PORT)
    else:
        address = request.master_addr or first_address(first, local_node == 0)
        fields.update(master_addr=address, master_port=port or network.free_port())
        fields.update(env=job_variables(request, os.environ), versions=own_versions())
        fields.update(join_s=JOIN_S, cwd=os.getcwd())
    devices = [None if host.devices is None else list(host.devices) for host in hosts]
    nodes = [
        NodeJob.of(request, **{"node_rank": i, "nproc": host.slots, "devices": devices[i], **fields})
        for i, host in enumerate(hosts)
    ]
    return JobPlan(hosts, nodes, local_node, by_ssh)


def find_hosts(request: LaunchRequest) -> list[Host]:
    """Find the hosts: those of the hostfile, this one, or as many without names as have commands of their own.

    Raises:
        HostsError: they cannot be found, or a filter or limit does not fit.
    """
    asked, filters = request.num_nodes or 1, (request.include, request.exclude)
    if request.hostfile is not None:
        hosts = read_hostfile(request.hostfile)
    elif request.no_ssh and filters != (None, None):
        raise HostsError("with --no-ssh, --include and --exclude need --hostfile")
    elif asked > 1 and not request.no_ssh:
        raise HostsError(
            f"--num-nodes asks for {asked} hosts and nothing says which: give a --hostfile with lines such as "
            f"'worker-1 slots=8', or start each node by a command of its own, with --no-ssh, --node-rank and "
            f"--master-addr"
        )
    else:
        slots = request.nproc or 0
        if not slots or filters != (None, None):
            slots = max(slots, default_nproc({**os.environ, **request.env}))
        hosts = [Host("localhost", slots)] * asked
    return limit_hosts(select_hosts(hosts, *filters), request.num_nodes, request.nproc)


def check_own_number(request: LaunchRequest, node_rank: int | None, hosts: list[Host]) -> int:
    """Return this node's number in a job whose nodes have commands of their own. Raises HostsError without one."""
    names = ", ".join(host.name for host in hosts)
    if node_rank is None and request.hostfile is not None:
        raise HostsError(f"this host is none of {names}: say with --node-rank which of them it is to be")
    if node_rank is None and len(hosts) > 1:
        raise HostsError(
            "--no-ssh with several nodes needs --node-rank: 0 on the node at --master-addr, then 1, 2, ..."
        )
    if node_rank and len(hosts) == 1:
        raise HostsError(f"--node-rank {node_rank} needs --num-nodes too, the number of nodes of the job")
    if request.hostfile is None and request.master_addr is None and len(hosts) > 1:
        raise HostsError(
            "--no-ssh with several nodes needs --master-addr: the first node's name or address, the same everywhere"
        )
    if not 0 <= (node_rank or 0) < len(hosts):
        raise HostsError(f"--node-rank expects 0 to {len(hosts) - 1}, and got {node_rank}: there are the hosts {names}")
    return node_rank or 0


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
    exported = {key: value for key, value in environ.items() if key.startswith(EXPORTED) and key not in NOT_EXPORTED}
    variables = {**exported, **request.env}
    if request.dry_run:  # it prints them, and a secret must not be printed
        variables.pop(SECRET_VARIABLE, None)
    else:
        variables.setdefault(SECRET_VARIABLE, secrets.token_hex(16))
    return variables
