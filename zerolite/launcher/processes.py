"""All processes of a job on this machine, found by descent, session and marker variable, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable

from zerolite.launcher.job import JOB_ID_VARIABLE

GRACE_S = 4.0
"""Seconds between SIGTERM and SIGKILL."""

KILL_WAIT_S = 3.0
"""Seconds after SIGKILL after which a process is given up: it is stuck in the kernel."""

SCAN_INTERVAL_S = 0.05

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class JobProcesses:
    """Processes of a job on this machine.

    A process belongs to the job if it descends from this process or has the job's marker in its environment. It also
    belongs to the job if a process of the job was ever seen in its session.

    Args:
        job_id: the marker, the value of :data:`JOB_ID_VARIABLE`.
        spare: children of this process that do not belong to the job, nor do their descendants. Neither do the
            descendants that exist already: `zerolite t.py > >(tee log)` has tee among them.
    """

    def __init__(self, job_id: str, spare: Collection[int] | None = None) -> None:
        import psutil

        self._job_id = job_id
        self._spare = () if spare is None else spare
        self._earlier = {process.pid for process in psutil.Process().children(recursive=True)}
        self._sessions: set[int] = set()

    def find(self) -> dict[int, str]:
        """Return the names of the processes that have not ended, by process id."""
        import psutil

        names: dict[int, str] = {}
        sessions: dict[int, int] = {}
        pids: set[int] = set()
        for child in psutil.Process().children():
            if child.pid not in self._spare and child.pid not in self._earlier:
                with contextlib.suppress(psutil.NoSuchProcess):
                    pids.update({child.pid}, (below.pid for below in child.children(recursive=True)))
        for process in psutil.process_iter(["name", "status", "environ"]):
            if process.info["status"] in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                continue
            with contextlib.suppress(OSError):
                sessions[process.pid] = os.getsid(process.pid)
                names[process.pid] = process.info["name"]
            if (process.info["environ"] or {}).get(JOB_ID_VARIABLE) == self._job_id:
                pids.add(process.pid)
        self._sessions.update(sessions[pid] for pid in pids if pid in sessions)
        self._sessions.discard(os.getsid(0))
        pids.update(pid for pid, session in sessions.items() if session in self._sessions)
        return {pid: names[pid] for pid in pids - {os.getpid()} if pid in names}

    def end(self, grace_s: float = GRACE_S) -> dict[int, str]:
        """Send SIGTERM to all, also to those that appear meanwhile, and SIGKILL to those left after ``grace_s``.

        Returns:
            Names of the processes that even SIGKILL could not end, by process id; normally none.
        """
        start = time.monotonic()
        signalled: set[int] = set()
        while True:
            waited = time.monotonic() - start
            left = self.find()
            if not left or waited > grace_s + KILL_WAIT_S:
                return left
            if waited >= grace_s:
                send(left, signal.SIGKILL)
            else:
                send(left.keys() - signalled, signal.SIGTERM)
                send(left.keys() - signalled, signal.SIGCONT)  # a stopped process takes no SIGTERM
                signalled.update(left)
            time.sleep(SCAN_INTERVAL_S)


_exit_codes: dict[int, int] = {}


def exit_code(pid: int) -> int | None:
    """Return how a child of this process has ended, as `Popen.returncode` has it; None while it runs.

    All children are collected, adopted orphans too.
    """
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _exit_codes[found[0]] = os.waitstatus_to_exitcode(found[1])
    return _exit_codes.get(pid)


def send(pids: Iterable[int], number: signal.Signals, to: Callable[[int, int], None] = os.kill) -> None:
    """Send a signal to each process, or with ``to=os.killpg`` to each process group. Ignore those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            to(pid, number)


def adopt_orphans() -> None:
    """Adopt descendants of this process whose parents end; otherwise init would, and they would no longer be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when ``parent``, which started it, ends. Send it now if that has."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before prctl was called
        os.kill(os.getpid(), number)


def _prctl(option: int, value: int) -> None:
    """Call prctl; do nothing on systems other than Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
