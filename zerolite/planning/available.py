"""Free memory of this process's device and host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
_ROOT = Path("/sys/fs/cgroup")


def available_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on ``device``.

    On CUDA this is the free memory and the unused part of torch's cache. On the host it is an equal share of the
    available memory for each local rank.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return share_of_host(local_ranks(os.environ) or 1)


def share_of_host(ranks: int) -> int:
    """Return an equal share for each of ``ranks`` processes of the bytes left on the host and in the control group."""
    left = psutil.virtual_memory().available
    limit = control_group_left()
    return (left if limit is None else min(left, limit)) // ranks


def local_ranks(environ: Mapping[str, str]) -> int | None:
    """Return the number of the job's ranks on this host from the launcher's variables; None if none is set."""
    return next((int(environ[name]) for name in _LOCAL_RANKS if environ.get(name, "").isdecimal()), 0) or None


_VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_VERSION_2 = "memory.max", "memory.current", "inactive_file"
"""Files with the limit and the usage for each version of control groups, and the entry of memory.stat for the page
cache. The kernel can drop that."""
_NO_LIMIT = 2**60  # version 1 has a larger number instead of "max"


def control_group_left(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the bytes left in the strictest control group of this process; None if there is no limit.

    Page cache that the kernel can drop counts as free.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found: list[int | None] = []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if (number == "0" and not controllers) or "memory" in controllers.split(","):
            base, version = (root / "memory", _VERSION_1) if controllers else (root, _VERSION_2)
            own = base / path.strip("/")
            groups = (group for group in (own, *own.parents) if group == base or base in group.parents)
            found += [_left(group, *version) for group in groups]
    return min((left for left in found if left is not None), default=None)


def _left(group: Path, limit_file: str, used_file: str, droppable: str) -> int | None:
    try:
        limit = (group / limit_file).read_text().strip()
        used = int((group / used_file).read_text())
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max" or int(limit) >= _NO_LIMIT:
        return None
    return max(0, int(limit) - used + int(stats.get(droppable, 0)))
