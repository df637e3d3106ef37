"""Assignment of a job to its hosts."""

from __future__ import annotations

import os
import secrets
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerolite.launcher.hosts import Host, HostsError, limit_hosts, read_hostfile, select_hosts
from zerolite.launcher.job import NodeJob
from zerolite.launcher.node_main import own_versions
from zerolite.launcher.options import LaunchRequest
from zerolite.launcher.remote_commands import Route, exported_variables
from zerolite.utils import network
from zerolite.utils.listening import SECRET_VARIABLE, is_loopback
from zerolite.utils.resources import default_nproc

JOIN_S = 120.0
"""Seconds within which nodes that one command starts must meet."""


@dataclass(frozen=True)
class JobPlan:
    """A job on several hosts.

    Attributes:
        job_id: hexadecimal number of the job.
        hosts: hosts in the order of the nodes.
        route: way to reach them.
        port: TCP port of the rendezvous on the first host.
        addresses: addresses at which the first host may be reached, the likeliest first.
        min_nodes: smallest number of nodes with which the job runs.
        may_lose: the job goes on without lost hosts, as long as ``min_nodes`` are left.
    """

    job_id: str
    hosts: list[Host]
    route: Route
    port: int
    addresses: list[str]
    min_nodes: int
    may_lose: bool


def make_plan(request: LaunchRequest) -> JobPlan:
    """Assign a job to its hosts. Raises HostsError."""
    hosts, named = find_hosts(request)
    check_reachable(hosts, request.launcher)
    names = [host.name for host in hosts]
    here = next((i for i, name in enumerate(names) if network.is_this_host(name)), None)
    route = Route(
        request.launcher, [host.login for host in hosts], here, request.launcher_args, request.ssh_port, named
    )
    fewest = min_nodes(request, hosts)
    return JobPlan(
        job_id=uuid.uuid4().hex,
        hosts=hosts,
        route=route,
        port=request.master_port or network.free_port(),
        addresses=first_addresses(request.master_addr, names[0], here == 0),
        min_nodes=fewest,
        may_lose=request.max_restarts > 0 and fewest < len(hosts),
    )


def min_nodes(request: LaunchRequest, hosts: Sequence[Host]) -> int:
    """Return the smallest number of nodes with which the job runs: all, unless --num-nodes names a range."""
    return len(hosts) if request.num_nodes is None else request.num_nodes[0]


def check_reachable(hosts: Sequence[Host], launcher: str) -> None:
    """Raise HostsError if the launcher's command cannot express a host's user or IPv6 address."""
    for host in hosts:
        if host.user is not None and launcher in ("openmpi", "slurm"):
            raise HostsError(
                f"the hostfile names the host {host.login!r}, and --launcher {launcher} logs in nowhere: leave out "
                f"'{host.user}@', or use --launcher ssh"
            )
        if ":" in host.name and launcher in ("pdsh", "openmpi", "slurm"):
            raise HostsError(
                f"the hostfile names the host {host.name!r} by an IPv6 address, which --launcher {launcher} does not "
                f"take: give it a name, or use --launcher ssh"
            )


def find_hosts(request: LaunchRequest) -> tuple[list[Host], bool]:
    """Find the hosts in the hostfile, the SLURM allocation, or here.

    Returns:
        The hosts, and whether srun must be told them: False if they are a whole allocation.

    Raises:
        HostsError: they cannot be found, or a filter or limit does not fit.
    """
    asked, named = request.num_nodes, True
    if request.hostfile is not None:
        hosts = read_hostfile(request.hostfile)
    elif request.launcher == "slurm":
        hosts = allocated_hosts(request.nproc)
        named = asked is not None or bool(request.include or request.exclude)
    elif asked is not None and asked[1] > 1:
        raise HostsError(
            f"--num-nodes asks for {asked[1]} hosts and nothing says which: give a --hostfile with lines such as "
            f"'worker-1 slots=8', or start each node by a command of its own, with --no-ssh, --node-rank and "
            f"--master-addr"
        )
    else:
        hosts = [Host("localhost", max(request.nproc or 0, default_nproc(os.environ)))]
    return limit_hosts(select_hosts(hosts, request.include, request.exclude), asked, request.nproc), named


def allocated_hosts(nproc: int | None) -> list[Host]:
    """Return the hosts of the SLURM allocation. Raises HostsError if there is none."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise HostsError(
            "--launcher slurm takes the hosts from an allocation, and SLURM_JOB_NODELIST is not set: run `zerolite` "
            "within sbatch or salloc, or give a --hostfile"
        )
    argv = ["scontrol", "show", "hostnames", nodes]
    try:
        listing = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostsError(f"`{' '.join(argv)}`, which names the allocated hosts, cannot be run: {error}") from None
    if listing.returncode != 0 or not listing.stdout.split():
        raise HostsError(f"`{' '.join(argv)}` names no hosts: {listing.stderr.strip()}")
    slots = nproc or default_nproc(os.environ)
    return [Host(name, slots) for name in listing.stdout.split()]


def first_addresses(given: str | None, name: str, here: bool) -> list[str]:
    """Return the addresses at which the others may reach the first host, the likeliest first.

    Its name alone is not enough: only the ssh configuration may know it.

    Args:
        given: the address of `--master-addr`, which is then the only one.
        name: name of the first host in the hostfile.
        here: the first host is this one, so its own addresses are known.
    """
    if given is not None:
        return [given]
    names = [] if name in ("localhost", "::1") or name.startswith("127.") else [name]
    known = [address for address in network.resolve(name) if not is_loopback(address)]
    return [*names, *(known or (network.own_addresses() if here else []))] or [name]


def make_node_job(request: LaunchRequest, hosts: Sequence[Host], rank: int, **fields: Any) -> NodeJob:
    """Return the part of the job of host number ``rank``; ``fields`` do not follow from the host."""
    devices = hosts[rank].devices
    return NodeJob.of(
        request,
        nproc=hosts[rank].slots,
        min_nodes=min_nodes(request, hosts),
        max_nodes=len(hosts),
        node_rank=rank,
        devices=None if devices is None else list(devices),
        **fields,
    )


def make_node_jobs(request: LaunchRequest, job: JobPlan) -> list[NodeJob]:
    """Return each node's part of the job."""
    variables = {**exported_variables(os.environ), **request.env}
    if request.dry_run:  # it prints them, and a secret must not be printed
        variables.pop(SECRET_VARIABLE, None)
    else:
        variables.setdefault(SECRET_VARIABLE, secrets.token_hex(16))
    first, *others = job.addresses
    return [
        make_node_job(
            request,
            job.hosts,
            i,
            job_id=job.job_id,
            master_addr=first,
            other_addresses=others,
            master_port=job.port,
            join_s=JOIN_S,
            env=variables,
            watch_stdin=job.route.launcher == "ssh",
            cwd=job.route.cwd,
            versions=own_versions(),
        )
        for i in range(len(job.hosts))
    ]


def own_node_job(request: LaunchRequest, default_port: int) -> NodeJob:
    """Return this host's part of a job with a hostfile whose nodes are each started by a command of their own.

    Args:
        request: the command line.
        default_port: port of the rendezvous if the command line names none.

    Raises:
        HostsError: the hostfile or a filter cannot be used, or this host's number is not known.
    """
    hosts, _ = find_hosts(request)
    names = [host.name for host in hosts]
    rank = request.node_rank
    if rank is None:
        rank = next((i for i, name in enumerate(names) if network.is_this_host(name)), None)
    if rank is None:
        raise HostsError(f"this host is none of {', '.join(names)}: say with --node-rank which of them it is to be")
    if not 0 <= rank < len(hosts):
        raise HostsError(f"--node-rank is {rank}, and there are {len(hosts)} hosts, counted from 0: {', '.join(names)}")
    address, port = request.master_addr or names[0], request.master_port or default_port
    return make_node_job(request, hosts, rank, master_addr=address, master_port=port)
