"""Start and end of a job on several hosts."""

from __future__ import annotations

from collections.abc import Sequence

from zerolite.launcher import supervisor
from zerolite.launcher.check import CheckSpec, Reach
from zerolite.launcher.follow import Signals, follow_parts
from zerolite.launcher.hosts import Host, HostsError
from zerolite.launcher.job import NodeJob
from zerolite.launcher.options import LaunchRequest
from zerolite.launcher.parts import Part
from zerolite.launcher.plan import JobPlan, make_node_jobs, make_part, make_plan
from zerolite.launcher.preflight import ChecksFailed, check_hosts
from zerolite.launcher.remote_commands import make_commands, pack
from zerolite.launcher.supervisor import say
from zerolite.utils import network


def run(request: LaunchRequest) -> int:
    """Run a job on the hosts that were asked for; return its exit status, 2 if it cannot be started."""
    try:
        job = make_plan(request)
        if len(job.hosts) == 1 and job.route.here == 0:
            return run_here(request, job)
        if request.dry_run:
            return print_commands(request, job)
        reaches = check(request, job)
    except HostsError as error:
        say(str(error))
        return 2
    except ChecksFailed as error:
        say_problems(error, job.hosts)
        return 2
    except KeyboardInterrupt:
        return 130
    nodes = make_node_jobs(request, job, reaches)
    say_interfaces(job.hosts, nodes)
    with Signals() as signals:
        return follow_parts(job, start_parts(job, nodes), signals)


def check(request: LaunchRequest, job: JobPlan) -> list[Reach]:
    """Check all hosts; return how each reaches the first. Raises ChecksFailed."""
    spec = CheckSpec(
        job_id=job.job_id,
        hosts=[host.name for host in job.hosts],
        addresses=job.addresses,
        from_launcher=job.route.here == 0 and request.master_addr is None,
        port=job.port,
        cwd=job.route.cwd,
        target=request.target,
        python=request.python,
        visible=request.env.get("CUDA_VISIBLE_DEVICES"),
    )
    return check_hosts(job.route, job.hosts, spec)


def run_here(request: LaunchRequest, job: JobPlan) -> int:
    """Run a job whose only host is this one."""
    part = make_part(request, job.hosts, 0, job_id=job.job_id, master_port=request.master_port or 0)
    if request.dry_run:
        supervisor.print_dry_run(part)
        return 0
    return supervisor.run_node(part)


def start_parts(job: JobPlan, nodes: Sequence[NodeJob]) -> list[Part]:
    """Start all nodes."""
    lines = [node.to_json() for node in nodes]
    parts: list[Part] = []
    if job.route.launcher == "ssh":
        for command in make_commands(job.route, "zerolite.launcher.node", None):
            node = command.nodes[0]
            parts.append(Part(job.hosts[node].name, command, lines[node], here=node == job.route.here))
    else:
        payload = pack({"hosts": [host.name for host in job.hosts], "jobs": lines})
        command = make_commands(job.route, "zerolite.launcher.node", payload)[0]
        parts.append(Part(command.argv[0], command, None, here=False))
    for part in parts:
        part.start_forwarding()
    return parts


def say_problems(error: ChecksFailed, hosts: Sequence[Host]) -> None:
    """Name all that does not fit."""
    say("nothing was started, since not all hosts can take part:")
    for host, problem in error.problems:
        say(f"  {host}: {problem}")
    bad = {host for host, _ in error.problems}
    left_out = [host.name for host in hosts if host.name in bad]
    if left_out and len(left_out) < len(hosts) and hosts[0].name not in left_out:
        say(f"put that right, or leave out what cannot take part: --exclude {'@'.join(left_out)}")


def say_interfaces(hosts: Sequence[Host], nodes: Sequence[NodeJob]) -> None:
    """Say once which network interface gloo is told to use, and why."""
    chosen = {host.name: node.env.get(network.GLOO_VARIABLE, "") for host, node in zip(hosts, nodes, strict=True)}
    names = sorted({interface for interface in chosen.values() if interface})
    if not names:
        return
    if len(names) == 1:
        what = f"{network.GLOO_VARIABLE}={names[0]} on each host"
    else:
        what = f"{network.GLOO_VARIABLE} is " + ", ".join(f"{name} on {host}" for host, name in chosen.items() if name)
    say(
        f"{what}: the interface that leads to the first host; gloo would look for the host's own name, which often "
        f"means 127.0.1.1; set it yourself to choose another"
    )


def print_commands(request: LaunchRequest, job: JobPlan) -> int:
    """Print what would run, and on which hosts; run nothing. The checks, which find addresses, come before it."""
    nodes = make_node_jobs(request, job, None)
    lines = [node.to_json() for node in nodes]
    if job.route.launcher != "ssh":
        payload = pack({"hosts": [host.name for host in job.hosts], "jobs": lines})
        print(f"# on {', '.join(host.name for host in job.hosts)}, where the last words but one hold:")
        for line in lines:
            print(f"#   {line}")
        print(make_commands(job.route, "zerolite.launcher.node", payload)[0].shell_line())
        return 0
    for command in make_commands(job.route, "zerolite.launcher.node", None):
        node = command.nodes[0]
        place = f"{job.hosts[node].name}, this host" if node == job.route.here else job.hosts[node].name
        print(f"# {place}; to its standard input this line, then a byte every second:\n#   {lines[node]}")
        print(command.shell_line())
    return 0
