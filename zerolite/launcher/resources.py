"""CUDA devices and processor cores of this machine, found without importing torch."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, order=True)
class Core:
    """A physical core. Sorted, cores of a NUMA node are together, in the order of their CPUs.

    Attributes:
        node: number of the NUMA node.
        package: number of the socket.
        cpus: its logical CPUs (hardware threads) that this process may use, at least one, ascending.
    """

    node: int
    package: int
    cpus: tuple[int, ...]


def read_cores(root: Path = ROOT) -> list[Core]:
    """Return the physical cores that this process may use, sorted. Without more information every CPU counts as one."""
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:  # not on macOS
        usable = set(range(os.cpu_count() or 1))
    nodes: dict[int, int] = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        nodes |= dict.fromkeys(_read_cpu_list(path), int(path.parent.name.removeprefix("node")))
    cores = set()
    for cpu in usable:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read_cpu_list(topology / "thread_siblings_list") & usable
        package = _read_text(topology / "physical_package_id")
        number = int(package) if package.isdecimal() else 0
        cores.add(Core(nodes.get(cpu, 0), number, tuple(sorted(siblings | {cpu}))))
    return sorted(cores)


def count_cores(root: Path = ROOT) -> int:
    """Return the number of physical cores this process may use, at least 1.

    Processor affinity and the container's CPU quota are respected; two hardware threads of a core count once.
    """
    cores = len(read_cores(root))
    quota = read_cpu_quota(root)
    return cores if quota is None else min(cores, max(1, math.ceil(quota)))


def count_core_groups(root: Path = ROOT) -> int:
    """Return the number of NUMA nodes, or sockets, whose cores this process may use, at least 1.

    A group with less than half as many usable cores as the largest is not counted, nor groups beyond the container's
    CPU quota.
    """
    sizes = Counter((core.node, core.package) for core in read_cores(root))
    largest = max(sizes.values())
    groups = sum(2 * size >= largest for size in sizes.values())
    return min(groups, -(-count_cores(root) // largest))


def core_sets(nproc: int, root: Path = ROOT) -> list[list[int]]:
    """Return the logical CPUs for each of `nproc` local ranks, ascending: equally many whole cores, side by side.

    Remaining cores go to some of the ranks. With more ranks than cores, ranks share a core.
    """
    cores = read_cores(root)
    if nproc > len(cores):
        return [list(cores[rank * len(cores) // nproc].cpus) for rank in range(nproc)]
    starts = [rank * len(cores) // nproc for rank in range(nproc + 1)]
    return [
        sorted(cpu for core in cores[start:end] for cpu in core.cpus)
        for start, end in zip(starts[:-1], starts[1:], strict=True)
    ]


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


def default_nproc(environ: Mapping[str, str], root: Path = ROOT) -> int:
    """Return one process per visible CUDA device; without any, one per NUMA node or socket, whose cores its threads
    use."""
    return count_cuda_devices(environ) or count_core_groups(root)


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
