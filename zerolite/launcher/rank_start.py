"""Command line and environment of a node's ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from zerolite.launcher.job import NodeJob, module_arguments


def rank_command(job: NodeJob) -> list[str]:
    """Return the command of each rank."""
    if not job.python:
        what = ["--command", *job.target]
    elif job.target[0] == "-m":
        what = ["--module", *job.target[1:]]
    else:
        what = ["--script", *job.target]
    return [sys.executable, *module_arguments("zerolite.launcher.rank"), *what, *job.script_args]


def node_environment(job: NodeJob, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all ranks of the node get besides ``environ``: env file, threads, devices."""
    variables = dict(job.env)
    threads = threads_per_rank(job, environ)
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    if job.devices is not None:
        from zerolite.utils.resources import visible_devices

        variables["CUDA_VISIBLE_DEVICES"] = visible_devices({**environ, **job.env}, job.devices)
    return variables


def threads_per_rank(job: NodeJob, environ: Mapping[str, str]) -> int | None:
    """Return OMP_NUM_THREADS of each rank, an equal share of the cores; None if the user has set it."""
    if "OMP_NUM_THREADS" in environ or "OMP_NUM_THREADS" in job.env:
        return None
    from zerolite.utils.resources import count_cores

    return max(1, count_cores() // job.nproc)


def bound_cpus(job: NodeJob) -> dict[int, str]:
    """Return the logical CPUs of each local rank, such as `0,1,8`; nothing without core binding."""
    if not job.bind_cores:
        return {}
    from zerolite.utils.resources import core_sets

    return {rank: ",".join(map(str, cpus)) for rank, cpus in enumerate(core_sets(job.nproc))}
