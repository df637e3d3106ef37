"""Detection of kills by the kernel for lack of memory, from cgroup counters."""

from __future__ import annotations

import contextlib
from pathlib import Path


class MemoryKills:
    """Counts the out-of-memory kills in this process's cgroup from its making on.

    Args:
        root: where the control groups are mounted.
        membership: the file that says which group this process is in.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> None:
        self._files = counter_files(root, membership)
        self._at_start = self._count()

    def _count(self) -> int:
        return sum(read_counter(path) for path in self._files)

    def happened(self) -> bool:
        """True if a kill was counted since the start."""
        return self._count() > self._at_start


def counter_files(root: Path, membership: Path) -> list[Path]:
    """The files with the kill counters of the group that ``membership`` names, of version 2 and 1; none if unknown."""
    found: list[Path] = []
    with contextlib.suppress(OSError, ValueError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                names = [root / path.lstrip("/") / "memory.events", root / "memory.events"]
            elif "memory" in controllers.split(","):
                version1 = root / "memory"
                names = [version1 / path.lstrip("/") / "memory.oom_control", version1 / "memory.oom_control"]
            else:
                continue
            found.extend(name for name in names if name.is_file())
    return found[:1]  # the first of each pair is the group's own; in a container only the second exists


def read_counter(path: Path) -> int:
    """The number behind `oom_kill`; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0
