"""CUDA devices and processor cores of this machine, found without importing torch."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

NVIDIA_SMI_TIMEOUT_S = 20.0
ROOT = Path("/")


def count_cuda_devices(environ: Mapping[str, str]) -> int:
    """Return the number of CUDA devices that a process with this environment sees; 0 where there are none.

    `CUDA_VISIBLE_DEVICES` decides where it is set; otherwise `nvidia-smi -L` is asked.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return count_visible_entries(visible)
    return count_listed_devices()


def count_visible_entries(visible: str) -> int:
    """Count the entries of a `CUDA_VISIBLE_DEVICES` value as CUDA does: up to the first one that names no device."""
    count = 0
    for entry in visible.split(","):
        entry = entry.strip()
        if not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count


def count_listed_devices() -> int:
    """Count the devices that `nvidia-smi -L` lists; 0 where the tool is missing, fails or does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listing = subprocess.run(
            [tool, "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    if listing.returncode != 0:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def visible_devices(environ: Mapping[str, str], chosen: Sequence[int]) -> str:
    """Return the value of `CUDA_VISIBLE_DEVICES` that shows a process only the chosen devices.

    `chosen` counts from 0, in the order of the variable if it is set (as `cuda:0` does), else in the driver's order.
    The entries may be indices or names (GPU-, MIG-) of devices.

    Raises:
        ValueError: the variable is set and has fewer devices.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ",".join(map(str, chosen))
    entries = [entry.strip() for entry in visible.split(",")][: count_visible_entries(visible)]
    missing = [slot for slot in chosen if slot >= len(entries)]
    if missing:
        raise ValueError(
            f"expected slots below {len(entries)}, since CUDA_VISIBLE_DEVICES={visible} leaves {len(entries)} "
            f"device{'s' if len(entries) != 1 else ''}, got {', '.join(map(str, missing))}; slots count from 0 in the "
            "order of that variable"
        )
    return ",".join(entries[slot] for slot in chosen)


def count_cores(root: Path = ROOT) -> int:
    """Return the number of physical cores this process may use, at least 1.

    Processor affinity and the container's CPU quota are respected; two hardware threads of a core count once.
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = len({min(_read_cpu_list(root / topology.format(cpu)) & usable | {cpu}) for cpu in usable})
    quota = read_cpu_quota(root)
    return cores if quota is None else min(cores, max(1, math.ceil(quota)))


def control_groups(controller: str, root: Path = ROOT) -> list[Path]:
    """Return this process's control group and those around it, the innermost first, in version 2 or 1.

    In a container the group's path may be the host's, while the mount shows the container's part as the root.
    """
    groups: list[Path] = []
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers
            own_group = base / group.strip("/")
            groups += [own_group, *(base / parent for parent in own_group.relative_to(base).parents)]
    return groups


def read_cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPUs that this process's control groups allow, such as 1.5; None without a limit.

    The strictest limit counts: `cpu.max` in version 2, `cpu.cfs_quota_us` in version 1.
    """
    quotas = map(_read_quota, control_groups("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def _read_quota(group: Path) -> float | None:
    words = _read_text(group / "cpu.max").split()  # as in "150000 100000", or "max 100000"
    if not words:
        words = [_read_text(group / "cpu.cfs_quota_us"), _read_text(group / "cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):  # -1: no limit
        return None
    return int(words[0]) / int(words[1])


def count_memory_kills(root: Path = ROOT) -> int:
    """Return the number of processes of this control group that the kernel has killed for lack of memory."""
    for group in control_groups("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            if match := re.search(r"^oom_kill (\d+)$", _read_text(group / name), re.MULTILINE):
                return int(match[1])
    return 0


def _read_cpu_list(path: Path) -> set[int]:
    """Return the CPUs of a list such as "0-3,8"; an empty set if there is no such file."""
    cpus: set[int] = set()
    for part in filter(None, _read_text(path).split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def find_nproc_problem(nproc: int) -> str | None:
    """Return why this number of processes makes no sense, or None."""
    if nproc < 1:
        return f"--nproc expects the number of processes, 1 or more, and got {nproc}"
    limit = max(64, 4 * (os.cpu_count() or 1))  # more are most likely a typing error
    if nproc > limit:
        return (
            f"--nproc {nproc} would start {nproc} processes on {os.cpu_count()} processors; the limit here is {limit}"
        )
    return None
