"""What memory a process may still take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
_ROOT = Path("/sys/fs/cgroup")


def available_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on ``device``: what is free there, with what torch's allocator holds
    without using it; on the host an equal share of what is left there, and in this process's control group, for each
    rank that starts here."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    left = psutil.virtual_memory().available
    limit = control_group_left()
    return (left if limit is None else min(left, limit)) // local_ranks(os.environ)


def local_ranks(environ: Mapping[str, str]) -> int:
    """How many ranks of the job this host has, as far as the launcher says; otherwise 1."""
    return next((int(environ[name]) for name in _LOCAL_RANKS if environ.get(name, "").isdecimal()), 1) or 1


def control_group_left(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that the strictest control group (version 2) around this process leaves; pages of files that it could drop
    count as free. None where there is no limit."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    path = next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), None)
    if path is None:
        return None
    own = root / path.strip("/")
    lefts = [_left(group) for group in (own, *own.parents) if group == root or root in group.parents]
    return min((left for left in lefts if left is not None), default=None)


def _left(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(stats.get("inactive_file", 0)))
