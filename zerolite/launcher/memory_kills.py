"""Detection of kills by the kernel for lack of memory, from the counter of this process's control group."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path


class MemoryKills:
    """Counter of out-of-memory kills in this process's control group since the object was made.

    Args:
        root: directory in which the control groups are mounted.
        membership: file that says which group this process is in.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> None:
        self._file = counter_file(root, membership)
        self._at_start = self._count()

    def _count(self) -> int:
        with contextlib.suppress(OSError, UnicodeError):
            if self._file is not None:
                found = re.search(r"^oom_kill (\d+)$", self._file.read_text(encoding="utf-8"), re.MULTILINE)
                return int(found[1]) if found else 0
        return 0

    def happened(self) -> bool:
        """Return True if the kernel has killed a process of the group since the start."""
        return self._count() > self._at_start


def counter_file(root: Path, membership: Path) -> Path | None:
    """Return the file with the kill counter of the group that ``membership`` names; None if there is none.

    Control groups of both versions are read. In a container only the file at the root exists, which is the container's.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "" or "memory" in controllers.split(","):
            base, name = (root / "memory", "memory.oom_control") if controllers else (root, "memory.events")
            for file in (base / path.lstrip("/") / name, base / name):
                if file.is_file():
                    return file
    return None
