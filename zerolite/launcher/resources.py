"""What this machine offers a job: CUDA devices and processor cores, found without importing torch."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

NVIDIA_SMI_TIMEOUT_S = 20.0
CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


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


def count_cores() -> int:
    """Return the number of physical cores this process may use, at least 1.

    Processor affinity and the container's CPU quota are respected; two hardware threads of a core count once.
    """
    import psutil  # only a launch needs it, `zerolite --help` does not

    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        usable = os.cpu_count() or 1
    logical = psutil.cpu_count(logical=True) or usable
    physical = psutil.cpu_count(logical=False) or logical
    cores = usable * physical // logical if physical < logical else usable
    quota = read_cpu_quota(CGROUP_CPU_MAX)
    if quota is not None:
        cores = min(cores, math.ceil(quota))
    return max(1, cores)


def read_cpu_quota(path: Path) -> float | None:
    """Return the CPUs that a cgroup (version 2) grants, as in "150000 100000" -> 1.5; None where there is no limit."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max 100000"
        return None


def default_nproc(environ: Mapping[str, str]) -> int:
    """One process per visible CUDA device; without any, one process, since its threads already use every core."""
    return max(1, count_cuda_devices(environ))


def largest_sensible_nproc(environ: Mapping[str, str]) -> int:
    """More processes than this are a slip of the finger: they would only fight for cores and memory."""
    return max(64, 4 * (os.cpu_count() or 1))
