"""Rank, world size and rendezvous address from the environment of torchrun, srun or mpirun."""

from __future__ import annotations

import importlib
import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from zerolite.utils.network import address_towards

DEFAULT_PORT = 29500  # torchrun's
LOCALHOST = "127.0.0.1"

# Range of ports computed from a job's number. Linux uses ports from 32768 on for outgoing connections.
_FIRST_PORT, _PORTS = 20000, 12768

# SLURM steps that srun did not start: the shell of salloc, the script of sbatch, and the step for adopted processes.
_STEPS_WITHOUT_TASKS = frozenset(str(0xFFFFFFFF - below) for below in range(2, 6)) | {"batch", "extern", "interactive"}


@dataclass(frozen=True)
class Rendezvous:
    """Rank of this process in its job and the address of rank 0, as read from an environment."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


class _Names(NamedTuple):
    """Variables of one kind of mpirun."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_OPEN_MPI = _Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_HYDRA = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # of MPICH and Intel MPI
_OTHER_PMI = _Names("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")


def read_environment(env: Mapping[str, str]) -> Rendezvous | None:
    """Read the rendezvous from the variables of torchrun, mpirun or SLURM; None if there are none.

    torchrun's variables win, because torchrun may run inside the others. mpirun's win over SLURM's: inside an
    allocation mpirun starts its daemons by srun, so SLURM's variables describe the daemons.

    Raises ValueError if the variables of one kind are incomplete or not numbers, or if nothing says where rank 0 is.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        return _read_torchrun(env)
    names = _mpi_names(env)
    if names is not None:
        return _read_mpi(env, names)
    if _is_slurm_task(env):
        return _read_slurm(env)
    return None


def ranks_of_job() -> int:
    """Return the number of ranks of torch.distributed, or else of the environment; 1 if neither says it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    rendezvous = read_environment(os.environ)
    return 1 if rendezvous is None else rendezvous.world_size


def ranks_of_host(env: Mapping[str, str]) -> int | None:
    """Return the number of ranks on this host, None if no launcher says it."""
    names = ("LOCAL_WORLD_SIZE", _OPEN_MPI.local_size, _OTHER_PMI.local_size, "SLURM_NTASKS_PER_NODE")
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)


def find_local_rank(env: Mapping[str, str]) -> int | None:
    """Return the process's number on its host, from 0; None if ``env`` does not say it.

    Scripts under srun or mpirun often export RANK without LOCAL_RANK. Then the launcher's own variable is used, if it
    belongs to the same rank.
    """
    if "LOCAL_RANK" in env:
        return _integer(env, "LOCAL_RANK")
    names = _mpi_names(env)
    if names is not None:
        rank_name, local_name = names.rank, names.local_rank
    elif _is_slurm_task(env):
        rank_name, local_name = "SLURM_PROCID", "SLURM_LOCALID"
    else:
        return None
    if local_name not in env or env.get("RANK", env.get(rank_name)) != env.get(rank_name):
        return None
    return _integer(env, local_name)


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: ``node[03-05,9],login`` gives ``node03``."""
    match = re.match(r"(?:[^\[\],\s]|\[[^\[\]]+\])+", nodelist.strip())
    if match is None:
        raise ValueError(f"init_distributed: expected a SLURM node list such as 'node[01-04]', got {nodelist!r}")
    return re.sub(r"\[([^\]]*)\]", lambda ranges: re.split("[,-]", ranges.group(1))[0], match.group())


def _read_torchrun(env: Mapping[str, str]) -> Rendezvous:
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    if missing:
        raise ValueError(
            f"init_distributed: the environment sets only part of torchrun's variables; {' and '.join(missing)} "
            "missing. Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of them for a single process."
        )
    rank, world_size = _rank_and_size(env, "RANK", "WORLD_SIZE")
    local_rank = find_local_rank(env)
    return Rendezvous(
        rank,
        world_size,
        rank if local_rank is None else local_rank,
        env.get("MASTER_ADDR", LOCALHOST),
        _integer(env, "MASTER_PORT", default=DEFAULT_PORT),
    )


# ------------------------------------------------------------------ SLURM


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Return True if srun started this process.

    The shell of salloc and the script of sbatch also have the number of tasks, and some a SLURM_PROCID of 0.
    """
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    return step is not None and step not in _STEPS_WITHOUT_TASKS and "SLURM_PROCID" in env


def _read_slurm(env: Mapping[str, str]) -> Rendezvous:
    size = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if name in env), None)
    if size is None:
        raise ValueError(
            "init_distributed: srun has set SLURM_PROCID, but neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS says how "
            "many tasks there are. Let the job keep SLURM's variables, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT."
        )
    rank, world_size = _rank_and_size(env, "SLURM_PROCID", size)
    return Rendezvous(
        rank,
        world_size,
        _integer(env, "SLURM_LOCALID", default=0),
        env.get("MASTER_ADDR") or _slurm_host(env) or LOCALHOST,
        _integer(env, "MASTER_PORT", default=_port_of_slurm(env)),
    )


def _slurm_host(env: Mapping[str, str]) -> str | None:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    return first_host(nodes) if nodes else None


def _port_of_slurm(env: Mapping[str, str]) -> int:
    """Return a port that differs between jobs with close numbers, and between the steps of a job."""
    job = _integer(env, "SLURM_JOB_ID", default=0)
    step = _integer(env, "SLURM_STEP_ID", default=0)
    return _FIRST_PORT + (job + 4001 * step) % _PORTS


# ------------------------------------------------------------------ MPI


def _mpi_names(env: Mapping[str, str]) -> _Names | None:
    """Return the variables of the mpirun that started this process. PMI's variables alone are SLURM's in a SLURM
    job."""
    if _OPEN_MPI.rank in env:
        return _OPEN_MPI
    if _HYDRA.rank in env and _HYDRA.local_rank in env:
        return _HYDRA
    if "SLURM_JOB_ID" not in env and (_OTHER_PMI.rank in env or "PMIX_RANK" in env):
        return _OTHER_PMI if _OTHER_PMI.rank in env else _OTHER_PMI._replace(rank="PMIX_RANK")
    return None


def _read_mpi(env: Mapping[str, str], names: _Names) -> Rendezvous:
    if names.size not in env:
        raise ValueError(
            f"init_distributed: {names.rank} says that an MPI launcher started this process, but not how many there "
            f"are ({names.size} missing). Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each "
            f"process, or unset {names.rank} for a single process."
        )
    rank, world_size = _rank_and_size(env, names.rank, names.size)
    local_rank = _integer(env, names.local_rank, default=0 if names.local_size in env else rank)
    one_host = world_size == 1 or _integer(env, names.local_size, default=0) == world_size
    address = env.get("MASTER_ADDR") or (LOCALHOST if one_host else None)
    address = address or _mpi_host(env, rank, world_size)
    port = _integer(env, "MASTER_PORT", default=_port_of_mpi(env, one_host))
    return Rendezvous(rank, world_size, local_rank, address, port)


def _mpi_host(env: Mapping[str, str], rank: int, world_size: int) -> str:
    """Return the host of rank 0: the first host of a SLURM job, or the address that rank 0 tells through mpi4py."""
    if "SLURM_JOB_NODELIST" in env:
        return first_host(env["SLURM_JOB_NODELIST"])
    remedy = (
        "Say it with `mpirun -x MASTER_ADDR=HOST` (Open MPI) or `mpiexec -genv MASTER_ADDR HOST` (MPICH, Intel MPI), "
        "where HOST is the host of rank 0 as the others reach it"
    )
    try:
        world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    except ImportError:
        raise ValueError(
            f"init_distributed: mpirun started rank {rank} of {world_size} on several hosts, and nothing says where "
            f"rank 0 is. {remedy}, or install mpi4py, which lets the ranks ask each other."
        ) from None
    if world.Get_size() != world_size:
        raise ValueError(
            f"init_distributed: mpirun started {world_size} ranks, but mpi4py sees {world.Get_size()}: it belongs to "
            f"another MPI than this mpirun, so it cannot tell where rank 0 is. {remedy}."
        )
    # The address that leads to others; 192.0.2.0/24 is reserved, and nothing is sent.
    own = (address_towards("192.0.2.1") or socket.getfqdn()) if rank == 0 else None
    address: str = world.bcast(own, root=0)
    return address


def _port_of_mpi(env: Mapping[str, str], one_host: bool) -> int:
    """Return a port that is the same on all ranks of a job and, as far as possible, different between jobs."""
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    if job is None and "SLURM_JOB_ID" in env:
        return _port_of_slurm({"SLURM_JOB_ID": env["SLURM_JOB_ID"]})
    if job is None and one_host:
        job = _launching_process()
    return DEFAULT_PORT if job is None else _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _launching_process() -> str | None:
    """Return the mpirun above this process on this host, as its process id and start time; None if there is none."""
    pid = "self"
    while pid != "0":
        try:
            before, _, after = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")
        except OSError:  # no Linux
            return None
        own_pid, _, name = before.partition(" (")  # "pid (name) state ppid ...": the name may contain spaces
        if name.startswith(("hydra_", "mpiexec", "mpirun", "pmi_proxy")):
            start_time = after.split()[19]
            return f"{own_pid} {start_time}"
        pid = after.split()[1]
    return None


def _rank_and_size(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, world_size = _integer(env, rank_name), _integer(env, size_name)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"init_distributed: expected 0 <= {rank_name} < {size_name}, got {rank_name}={rank}, "
            f"{size_name}={world_size}"
        )
    return rank, world_size


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    try:
        if not env[name].isascii():
            raise ValueError("digits of another script")
        return int(env[name])
    except ValueError:
        raise ValueError(f"init_distributed: expected a number in the variable {name}, got {env[name]!r}") from None
