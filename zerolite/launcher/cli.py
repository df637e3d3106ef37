"""Entry of the `zerolite` command: run a script, module or command, or a subcommand such as `report`.

It does not import torch, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from zerolite.launcher.job import find_port_problem, find_target_problem
from zerolite.launcher.options import LaunchRequest, build_parser, read_options
from zerolite.launcher.resources import find_nproc_problem

COMMANDS = {
    "plan": "zerolite.planning.command",
    "report": "zerolite.diagnostics.report",
    "export": "zerolite.checkpoint.export",
    "import-deepspeed": "zerolite.compat.deepspeed_import",
}
"""Subcommands, which start no ranks, and the modules of their `main(argv)`, imported only when needed."""


def run_job(request: LaunchRequest, parser: argparse.ArgumentParser) -> int:
    """Run a job, or this node's part of it, and return its exit status. Mistakes end the process with status 2."""
    from zerolite.launcher import plan, ssh, supervisor  # not needed for --help
    from zerolite.launcher.hosts import HostsError

    try:
        job = plan.make_plan(request)
    except HostsError as error:
        parser.error(str(error))
    if job.local_node == 0 and (problem := find_port_problem(request.master_port)) is not None:
        parser.error(problem)
    if job.by_ssh:
        return ssh.run(request, job)
    assert job.local_node is not None
    if request.dry_run:
        supervisor.print_dry_run(job.nodes[job.local_node])
        return 0
    return supervisor.run_node(job.nodes[job.local_node], supervisor.record_signals())


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
    parser = build_parser()
    request = read_options(arguments, parser)
    problem = find_target_problem(request.target, request.python)
    if problem is None and request.nproc is not None:
        problem = find_nproc_problem(request.nproc)
    if problem is not None:
        parser.error(problem)
    try:
        return run_job(request, parser)
    except KeyboardInterrupt:  # pressed before the supervisor handles signals
        return 130


if __name__ == "__main__":
    sys.exit(main())
