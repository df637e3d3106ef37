"""The command's view of a job: its parts, one on each host, their signals, their end, and what they leave behind.

It does not import torch, so it starts at once, stays small, and outlives any failure of the agent and the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from zerolite.launcher.failures import Failure, describe, exit_status, signal_name
from zerolite.launcher.job import JOB_ID_VARIABLE, NodeJob
from zerolite.launcher.processes import JobProcesses, adopt_orphans, die_with_parent, exit_code, send
from zerolite.utils.network import SECRET_VARIABLE
from zerolite.utils.text import counted

INTERRUPT_GRACE_S = 20.0
"""Seconds that the ranks get to finish after Ctrl-C."""

REPETITION_S = 0.5
"""`timeout -s INT` sends its signal to a process and, at once, to its group too: that is one Ctrl-C, not two."""

WAIT_S = 0.05
"""A signal, or the end of a part, is noticed after so many seconds."""

LATE_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL for processes that are left after the agent has given the ranks time to end."""

LEFTOVER_TIMEOUT_S = 10.0
"""Seconds that processes left behind by the ranks get to end after success."""

TELL_S = 3.0
"""The reason for a job's end is told below the last output of its ranks, but at the latest after so many seconds."""

KILL_S = 8.0
"""A part that still runs so many seconds after a signal or a failure is killed. By itself it needs less."""

CPP_LOG_VARIABLE = "TORCH_CPP_LOG_LEVEL"
"""The variable silences torch's warnings about lost connections in the agent, which reads it when it imports torch."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Part(ABC):
    """One host's part of a job: a :class:`LocalPart`, or an :class:`~zerolite.launcher.ssh.SshPart`.

    Attributes:
        name: name of the host.
        status: exit status, 128 + n if signal n ended it; None while it runs.
        failures: why it ends, of ranks and of itself, as soon as it is known. Ranks with status 0 may be among them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.status: int | None = None
        self.failures: list[Failure] = []

    @property
    def failed(self) -> bool:
        """True if it is about to end with an error, or has."""
        return bool(self.status) or exit_status(self.failures) != 0

    @abstractmethod
    def poll(self) -> bool:
        """Read what the part reports, set its status if it has ended, and return True then."""

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Pass a signal on: the first one asks for the end, another one brings it at once."""

    @abstractmethod
    def end(self) -> None:
        """Ask for the end, because another part has failed."""

    @abstractmethod
    def kill(self) -> None:
        """End the part at once."""


class LocalPart(Part):
    """The part of this host: an agent, forked from this process, and all processes below it.

    Make it before this process has threads. The agent waits until :meth:`start`.

    Args:
        job: this node's part.
        log_dir: an existing directory for the ranks' output.
        spare: children of this process that do not belong to the part.
    """

    def __init__(self, job: NodeJob, log_dir: str, spare: set[int] | None = None) -> None:
        super().__init__(os.uname().nodename)
        self._job = job
        self._log_dir = log_dir
        self._signals: list[int] = []
        self._marker = f"{job.job_id}-{job.node_rank}"
        self._processes = JobProcesses(self._marker, spare)
        adopt_orphans()
        go, self._go = os.pipe()
        self._report, report = os.pipe()
        self._report_text = b""
        os.set_blocking(self._report, False)
        sys.stdout.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)
            os.close(self._report)
            self._become_agent(parent, go, report)
        os.close(go)
        os.close(report)

    def _become_agent(self, parent: int, go: int, report: int) -> NoReturn:
        """Run the agent in this process, the fork, and end it with the agent's exit status."""
        status = 1
        try:
            os.setsid()  # Ctrl-C at the terminal is for the command alone
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            die_with_parent(parent, signal.SIGTERM)
            if os.read(go, 1):
                os.environ.update(self._job.environment(os.environ))
                os.environ[JOB_ID_VARIABLE] = self._marker
                if self._job.num_nodes == 1:
                    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(16))
                quiet = CPP_LOG_VARIABLE not in os.environ
                os.environ.setdefault(CPP_LOG_VARIABLE, "ERROR")
                from zerolite.launcher.agent import run_agent

                if quiet:  # the ranks are not to inherit it
                    del os.environ[CPP_LOG_VARIABLE]
                status = run_agent(self._job, self._log_dir, report)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def start(self) -> None:
        """Let the agent start its ranks."""
        with contextlib.suppress(OSError):
            os.write(self._go, b"g")

    def poll(self) -> bool:
        code = exit_code(self.pid)
        self._read_report()
        if self.status is None and code is not None:
            self.status = code if code >= 0 else 128 - code
            if code and not self.failures and not self._signals:
                how = f"by signal {-code} ({signal_name(-code)})" if code < 0 else f"with status {code}"
                sentence = f"the agent (process {self.pid}), which ran the ranks of host {self.name}, ended {how}"
                self.failures = [Failure(host=self.name, exitcode=code, node_failure=sentence)]
            if self.status or self._signals:
                self._end_processes(LATE_GRACE_S)
        return self.status is not None

    def _read_report(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._report, 1 << 16):
                self._report_text += data
        if self._report_text.endswith(b"\n"):
            self.failures = [Failure.from_json(fields) for fields in json.loads(self._report_text)]
            self._report_text = b""

    def send_signal(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            self.kill()
        elif self.status is None:
            send([self.pid], signal.Signals(number))

    def end(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._end_processes(0.0)
        if self.status is None and exit_code(self.pid) is None:
            self.status = 128 + signal.SIGKILL  # the agent itself is stuck

    def _end_processes(self, grace_s: float) -> None:
        for pid, name in self._processes.end(grace_s).items():
            say(f"process {pid} ({name}) does not end, not even by SIGKILL: it is stuck in the kernel")

    def finish(self, signals: Sequence[int], status: int) -> None:
        """End processes that the ranks have left behind, then say where the ranks' output is, or remove it.

        Args:
            signals: those that have come, and may still come.
            status: the job's exit status. After success, what is left behind first gets time to end by itself.
        """
        if signals or status:
            self._end_processes(LATE_GRACE_S)
        else:
            self._end_leftovers(signals)
        if signals and (signals[0] != signal.SIGINT or len(signals) > 1):
            say(f"received {signal_name(signals[-1])} and ended {counted(self._job.nproc, 'rank')}")
        if (self.status and not signals) or (signals and has_output(self._log_dir)):
            on_host = "" if self._job.node_rank == 0 else f" on host {self.name}"
            say(f"output of the ranks{on_host}: {self._log_dir}")
        elif self._job.log_dir is None:
            shutil.rmtree(self._log_dir, ignore_errors=True)

    def _end_leftovers(self, signals: Sequence[int]) -> None:
        deadline = time.monotonic() + LEFTOVER_TIMEOUT_S
        while left := self._processes.find():
            if time.monotonic() > deadline or signals:
                names = ", ".join(f"{name} ({pid})" for pid, name in left.items())
                say(f"the ranks left {counted(len(left), 'process', 'es')} behind, ended now: {names}")
                self._end_processes(LATE_GRACE_S)
                return
            time.sleep(0.1)
            self.poll()


def record_signals() -> list[int]:
    """Collect the signals of this process. Returns the list to which handlers append their numbers.

    A signal that comes again within :data:`REPETITION_S` counts once.
    """
    signals: list[int] = []
    counted_at: dict[int, float] = {}

    def note(number: int, _: Any) -> None:
        now = time.monotonic()
        if now - counted_at.get(number, float("-inf")) > REPETITION_S:
            counted_at[number] = now
            signals.append(number)

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the kernel forgets how children have ended
    for number in SIGNALS:
        # A signal that is ignored from the start stays ignored: SIGHUP under nohup, for instance.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, note)
    return signals


def pause() -> None:
    time.sleep(WAIT_S)


def tell_failures(failures: Sequence[Failure]) -> None:
    for line in describe(failures, os.uname().nodename):
        write(line)


def wait_for(
    parts: Sequence[Part],
    signals: Sequence[int],
    pause: Callable[[], None] = pause,
    tell: Callable[[Sequence[Failure]], None] = tell_failures,
) -> int:
    """Wait for all parts, end all if one fails or a signal comes, and return the job's exit status.

    Parts first get time to end by themselves. At last they are killed.

    Args:
        parts: they have been started.
        signals: those that have come; more may be appended by handlers and by ``pause``.
        pause: waits a moment.
        tell: tells, once, why the job fails.

    Returns:
        The status of the rank, or the part, that failed first; 128 + the number of a signal that came before; else 0.
    """
    passed = 0  # signals that the parts have been sent
    is_failed = False
    is_told = False
    tell_at = float("inf")
    kill_at = float("inf")
    while True:
        ended = [part.poll() for part in parts]  # all of them, so that no part waits for another
        now = time.monotonic()
        if not is_failed and not signals and any(part.failed for part in parts):
            is_failed = True
            tell_at = now + TELL_S
            kill_at = now + KILL_S
            for part in parts:
                if not part.failed and part.status is None:
                    part.end()
        for number in signals[passed:]:
            passed += 1
            for part in parts:
                part.send_signal(number)
            gently = number == signal.SIGINT and passed == 1
            kill_at = min(kill_at, now + KILL_S + (INTERRUPT_GRACE_S if gently else 0.0))
        if is_failed and not is_told and (all(ended) or now >= tell_at):
            is_told = True
            if failures := [failure for part in parts for failure in part.failures]:
                tell(failures)
        if all(ended):
            break
        if now >= kill_at:
            for part in parts:
                if part.status is None:
                    part.kill()
        pause()
    if not is_failed:
        return 128 + signals[0] if signals else 0
    failures = [failure for part in parts for failure in part.failures]
    return exit_status(failures) or next(part.status for part in parts if part.status)


def run_node(job: NodeJob, signals: list[int]) -> int:
    """Run a job of this host alone and return its exit status, 2 if the directory for the output cannot be made.

    Call it once, in the main thread of a process without other children.
    """
    log_dir = make_log_dir(job)
    if log_dir is None:
        return 2
    part = LocalPart(job, log_dir)
    part.start()
    status = wait_for([part], signals)
    part.finish(signals, status)
    return status


def make_log_dir(job: NodeJob) -> str | None:
    """Make the directory for the ranks' output: one per job below ``--log-dir``, or a temporary one.

    Returns None after a sentence if it cannot be made.
    """
    try:
        if job.log_dir is None:
            path = tempfile.mkdtemp(prefix="zerolite_")
        else:
            path = os.path.join(job.log_dir, f"job_{job.job_id[:8]}")
            os.makedirs(path, exist_ok=True)
    except OSError as error:
        where = "a temporary directory" if job.log_dir is None else f"--log-dir {job.log_dir!r}"
        say(f"nothing was started: {where} cannot be made ({error.strerror}: {error.filename!r})")
        return None
    return path


def has_output(directory: str) -> bool:
    """Return True if any file below a directory has contents."""
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # it has gone meanwhile
                if os.path.getsize(os.path.join(place, name)):
                    return True
    return False


def print_dry_run(job: NodeJob) -> None:
    """Print one shell line for each rank of the node: its variables and its command.

    A free port is chosen at the start only, and left out.
    """
    print(f"cd {shlex.quote(os.getcwd())}")
    for local_rank in range(job.nproc):
        rank: dict[str, Any] = {
            "RANK": local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": job.nproc,
            "LOCAL_WORLD_SIZE": job.nproc,
        }
        rank["MASTER_ADDR"] = job.master_addr
        if job.master_port:
            rank["MASTER_PORT"] = job.master_port
        variables = {**job.environment(os.environ), **rank}
        variables.pop(SECRET_VARIABLE, None)  # a secret must not be printed
        settings = [f"{name}={value}" for name, value in sorted(variables.items())]
        print(shlex.join(["env", *settings, *job.rank_command()]))


def say(sentence: str) -> None:
    write(f"zerolite: {sentence}")


def write(line: str) -> None:
    """Write to stderr and ignore a closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
