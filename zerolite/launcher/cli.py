"""Entry of the `zerolite` command: run a script, module or command, or a subcommand such as `report`.

It does not import torch, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence

from zerolite.launcher.job import NodeJob, find_port_problem, find_target_problem
from zerolite.launcher.options import LaunchRequest, build_parser, read_options
from zerolite.utils.resources import default_nproc, find_nproc_problem

COMMANDS = {
    "plan": "zerolite.planning.command",
    "report": "zerolite.diagnostics.report",
    "inspect": "zerolite.checkpoint.inspect",
    "export": "zerolite.checkpoint.export",
    "import-deepspeed": "zerolite.compat.deepspeed_import",
}
"""Subcommands, which start no ranks, and the modules of their `main(argv)`, imported only when needed."""

DEFAULT_PORT = 29500
"""Default port if every node has a command of its own: all nodes must use the same one."""


def parse_command_line(argv: Sequence[str]) -> LaunchRequest:
    """Parse and check the command line. A mistake prints a sentence and exits with status 2."""
    parser = build_parser()
    request = read_options(argv, parser)
    problem = find_target_problem(request.target, request.python)
    if problem is None and request.nproc is not None:
        problem = find_nproc_problem(request.nproc)
    problem = problem or find_node_problem(request)
    if problem is None and not is_remote(request) and (request.node_rank or 0) == 0:
        problem = find_port_problem(request.master_port)
    if problem is not None:
        parser.error(problem)
    return request


def is_remote(request: LaunchRequest) -> bool:
    """Return True if this command starts the nodes of other hosts too, or has to find the hosts first."""
    asks = (request.hostfile, request.include, request.exclude)
    several = request.num_nodes is not None and request.num_nodes[1] > 1
    return not request.no_ssh and (several or request.launcher != "ssh" or any(ask is not None for ask in asks))


def find_node_problem(request: LaunchRequest) -> str | None:
    """Say which option this node's part of a job on several nodes lacks, or return None."""
    if not request.no_ssh:
        return None
    if request.hostfile is not None:
        return None  # it names the nodes
    if request.include is not None or request.exclude is not None:
        return "with --no-ssh, --include and --exclude need --hostfile"
    if request.num_nodes is None or request.num_nodes[1] == 1:
        if (request.node_rank or 0) != 0:
            return f"--node-rank {request.node_rank} needs --num-nodes too, the number of nodes of the job"
        return None
    if request.node_rank is None:
        return "--no-ssh with several nodes needs --node-rank: 0 on the node at --master-addr, then 1, 2, ..."
    if not 0 <= request.node_rank < request.num_nodes[1]:
        return f"--node-rank expects 0 to {request.num_nodes[1] - 1} with --num-nodes, and got {request.node_rank}"
    if request.master_addr is None:
        return "--no-ssh with several nodes needs --master-addr: the first node's name or address, the same everywhere"
    return None


def make_local_job(request: LaunchRequest) -> NodeJob:
    """Return this host's part: the whole job, or one node of it if every node has a command of its own.

    Raises:
        ValueError: the hostfile does not say which part this is; the message is a sentence for the user.
    """
    if request.hostfile is not None:
        from zerolite.launcher.plan import own_node_job

        return own_node_job(request, DEFAULT_PORT)
    fewest, most = request.num_nodes or (1, 1)
    nproc = default_nproc({**os.environ, **request.env}) if request.nproc is None else request.nproc
    job = NodeJob.of(request, nproc=nproc, min_nodes=fewest, max_nodes=most)
    if most == 1:
        return dataclasses.replace(job, master_port=request.master_port or 0)
    return dataclasses.replace(
        job,
        node_rank=request.node_rank or 0,
        master_addr=request.master_addr or job.master_addr,
        master_port=request.master_port or DEFAULT_PORT,
    )


def open_closed_streams() -> None:
    """Open /dev/null in place of a standard stream that the caller has closed (`2>&-`).

    Otherwise the next pipe or file would get the descriptor 0, 1 or 2, and be taken for that stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # opens as the lowest free descriptor: this one
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `zerolite` command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_closed_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        print("zerolite: the working directory is gone: change to one that is there", file=sys.stderr)
        return 2
    command = arguments[0] if arguments else ""
    if command in COMMANDS and not os.path.isfile(command):
        status: int = importlib.import_module(COMMANDS[command]).main(arguments[1:])
        return status
    request = parse_command_line(arguments)
    try:
        if is_remote(request):
            from zerolite.launcher import remote

            return remote.run(request)
        from zerolite.launcher.supervisor import print_dry_run, run_node  # not needed for --help

        try:
            job = make_local_job(request)
        except ValueError as error:
            build_parser().error(str(error))
        if request.dry_run:
            print_dry_run(job)
            return 0
        return run_node(job)
    except KeyboardInterrupt:  # pressed before the supervisor handles signals
        return 130


if __name__ == "__main__":
    sys.exit(main())
