"""Search for and end of all processes of a job on this machine: by descent, session and marker variable.

Linux only where it reads /proc. Needs no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from zerolite.launcher.job import JOB_ID_VARIABLE

GRACE_S = 4.0
"""Seconds between SIGTERM and SIGKILL."""

KILL_WAIT_S = 3.0
"""Seconds after which a process that SIGKILL does not end (it is stuck in the kernel) is given up."""

SCAN_INTERVAL_S = 0.05

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ProcessStat:
    """Fields of /proc about a process."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int


def read_processes() -> dict[int, ProcessStat]:
    """All processes of this machine that have not ended, zombies left out."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            stat = read_process(int(entry))
            if stat is not None and stat.state not in "ZXx":
                found[stat.pid] = stat
    return found


def read_process(pid: int) -> ProcessStat | None:
    """One process, None if there is none of this number."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]
    state, parent, group, session = text[text.rindex(")") + 2 :].split()[:4]
    return ProcessStat(pid, name, state, int(parent), int(group), int(session))


def has_marker(pid: int, job_id: str) -> bool:
    """True if the process was started with this job's marker in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{JOB_ID_VARIABLE}={job_id}".encode() in file.read().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return False


def descendants(processes: dict[int, ProcessStat], roots: Iterable[int]) -> set[int]:
    """The processes below ``roots``, without these."""
    children: dict[int, list[int]] = {}
    for stat in processes.values():
        children.setdefault(stat.parent, []).append(stat.pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


class JobProcesses:
    """The processes of a job on this machine, looked for as often as asked.

    They are those below this process, those that carry the job's marker, and those in a session in which one of them
    was ever seen. This process and those in ``spare`` are none of them.
    """

    def __init__(self, job_id: str, spare: Collection[int] = ()) -> None:
        self._job_id = job_id
        self._spare = {os.getpid(), *spare}
        self._own_session = os.getsid(0)
        self._sessions: set[int] = set()

    def find(self) -> dict[int, ProcessStat]:
        """Find the processes that have not ended."""
        processes = read_processes()
        found = descendants(processes, [os.getpid()])
        found.update(pid for pid in processes if pid not in found and has_marker(pid, self._job_id))
        self._sessions.update(processes[pid].session for pid in found if pid in processes)
        self._sessions.discard(self._own_session)
        found.update(stat.pid for stat in processes.values() if stat.session in self._sessions)
        return {pid: processes[pid] for pid in found - self._spare if pid in processes}

    def end(self, grace_s: float = GRACE_S, hurry: Callable[[], bool] = lambda: False) -> list[ProcessStat]:
        """SIGTERM to all of them, also to those that appear meanwhile; SIGKILL to what is left after ``grace_s``.

        ``hurry`` is called before each look, and may collect children that have ended; once it returns True, the time
        of grace is over.

        Returns:
            Those that not even SIGKILL could end; normally none.
        """
        start = time.monotonic()
        told: set[int] = set()
        while True:
            waited = time.monotonic() - start
            if hurry():
                grace_s = min(grace_s, waited)
            left = self.find()
            if not left or waited > grace_s + KILL_WAIT_S:
                return list(left.values())
            if waited >= grace_s:
                send(left, signal.SIGKILL)
            else:
                send(left.keys() - told, signal.SIGTERM)
                send(left.keys() - told, signal.SIGCONT)  # a stopped process takes no SIGTERM
                told.update(left)
            time.sleep(SCAN_INTERVAL_S)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each, if it is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def send_to_groups(leaders: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process group, if it is still there."""
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)


def adopt_orphans() -> None:
    """Make descendants of this process whose parents end its own children, not init's, from now on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when ``parent``, which started this process, ends; at once if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _prctl(option: int, value: int) -> None:
    """Call prctl; do nothing on systems other than Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
