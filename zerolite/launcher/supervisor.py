"""Supervisor of one node: starts the agent, forwards signals, ends every process, prints the summary.

It does not import torch, so it starts at once, stays small, and outlives any failure of the agent and the ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from zerolite.launcher.failures import count, signal_name
from zerolite.launcher.job import JOB_ID_VARIABLE, NodeJob, module_arguments
from zerolite.launcher.processes import GRACE_S, JobProcesses, adopt_orphans
from zerolite.launcher.rank import BIND_VARIABLE
from zerolite.utils.network import SECRET_VARIABLE

INTERRUPT_GRACE_S = 20.0
"""Seconds that the ranks get to finish after Ctrl-C."""

WAIT_S = 0.05
"""A signal, or the end of the agent, is noticed after so many seconds."""

LATE_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL for processes that are left after the agent has given the ranks `GRACE_S`."""

LEFTOVER_TIMEOUT_S = 10.0
"""Seconds that processes left behind by the ranks get to end after success."""

INTERRUPT, STAND_BACK = b"I", b"P"
"""Letters to the agent: pass Ctrl-C on to the ranks; start no more ranks, since the supervisor ends them."""

READY, DONE = b"R", b"D"
"""Letters of the agent: it has started the ranks; they have ended, and it has printed why."""

CPP_LOG_VARIABLE, QUIET = "TORCH_CPP_LOG_LEVEL", "quiet"
"""The variable silences torch's warnings about lost connections in the agent. With the agent's last argument, the agent
drops it, so that the ranks are not silenced."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Supervisor:
    """One node's part of a job, from its start to its end.

    Args:
        job: this node's part.
        log_dir: an existing directory for the ranks' output.

    Attributes:
        keeps_logs: the user has been told where the output is, so it must stay.
    """

    def __init__(self, job: NodeJob, log_dir: str) -> None:
        self.keeps_logs = False
        self._job = job
        self._log_dir = log_dir
        self._marker = f"{job.job_id}-{job.node_rank}"
        self._processes = JobProcesses(self._marker)
        self._signals: list[int] = []
        self._progress = b""
        self._stdin_open = job.watch_stdin
        self._interrupted_at: float | None = None
        self._agent = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        adopt_orphans()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the kernel forgets how children have ended
        for number in _SIGNALS:
            # A signal that is ignored from the start stays ignored: SIGHUP under nohup, for instance.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: self._signals.append(number))
        lifeline, self._lifeline = os.pipe()
        self._news, news = os.pipe()
        environ = {**os.environ, **self._job.environment(os.environ), JOB_ID_VARIABLE: self._marker}
        if self._job.num_nodes == 1:
            environ.setdefault(SECRET_VARIABLE, secrets.token_hex(16))
        quiet = [] if CPP_LOG_VARIABLE in environ else [QUIET]
        command = [sys.executable, *module_arguments("zerolite.launcher.agent")]
        agent = subprocess.Popen(
            [*command, str(lifeline), str(news), self._log_dir, *quiet],
            env={CPP_LOG_VARIABLE: "ERROR", **environ},
            stdin=subprocess.DEVNULL if self._job.watch_stdin else None,
            pass_fds=(lifeline, news),
            start_new_session=True,
        )
        os.close(lifeline)
        os.close(news)
        os.set_blocking(self._news, False)
        self._send_to_agent(self._job.to_json().encode() + b"\n")
        return agent

    def _send_to_agent(self, text: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._lifeline, text)

    def run(self) -> int:
        """Wait for the end of the job and return its exit status."""
        while self._agent.returncode is None:
            self._wait()
            status = self._react()
            if status is not None:
                return status
        with contextlib.suppress(BlockingIOError):
            while news := os.read(self._news, 4096):
                self._progress += news
        if self._interrupted_at is not None:
            self._end_all()
            self._print_log_dir(only_if_filled=True)
            return 128 + signal.SIGINT
        if not self._progress.endswith(DONE):
            return self._agent_died()
        if self._agent.returncode == 0:
            self._end_leftovers()
        else:
            self._end_all(LATE_GRACE_S)
            self._print_log_dir()
        return self._agent.returncode

    def _wait(self) -> None:
        """Wait a moment, and take what has come: letters of the agent, signals through standard input, ends."""
        readable = select.select([self._news, *([0] if self._stdin_open else [])], [], [], WAIT_S)[0]
        if self._news in readable:
            self._progress += os.read(self._news, 4096)
        if 0 in readable:
            numbers = b""
            with contextlib.suppress(OSError):
                numbers = os.read(0, 4096)
            self._stdin_open = bool(numbers)
            self._signals.extend(number for number in numbers if number in _SIGNALS)
        self._reap()

    def _reap(self) -> None:
        """Collect children that have ended: the agent, and orphans of the ranks."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._agent.pid:
                    self._agent.returncode = os.waitstatus_to_exitcode(status)

    def _react(self) -> int | None:
        """React to signals and to a closed connection. Return the exit status if this ends the job, else None."""
        if self._agent.returncode is not None:
            return None
        if self._signals:
            return self._take_signal(self._signals.pop(0))
        if self._interrupted_at is not None and time.monotonic() - self._interrupted_at > INTERRUPT_GRACE_S:
            say(f"the ranks did not finish within {INTERRUPT_GRACE_S:.0f} s of Ctrl-C and are ended")
            self._end_all()
            return 128 + signal.SIGINT
        if self._job.watch_stdin and not self._stdin_open:
            say(f"host {os.uname().nodename}: the connection to the launcher has closed; the ranks here are ended")
            self._end_all()
            return 128 + signal.SIGTERM
        return None

    def _take_signal(self, number: int) -> int | None:
        if number == signal.SIGINT and self._interrupted_at is None and self._progress.startswith(READY):
            say(f"Ctrl-C: the ranks have {INTERRUPT_GRACE_S:.0f} s to finish; press it again to end them at once")
            self._interrupted_at = time.monotonic()
            self._send_to_agent(INTERRUPT)
            return None
        self._end_all(0.0 if self._interrupted_at is not None else GRACE_S)
        say(f"received {signal_name(number)} and ended {count(self._job.nproc, 'rank')}")
        self._print_log_dir(only_if_filled=True)
        return 128 + (signal.SIGINT if self._interrupted_at is not None else number)

    def _agent_died(self) -> int:
        code = self._agent.returncode
        how = f"by signal {-code} ({signal_name(-code)})" if code < 0 else f"with exit status {code}"
        say(f"the agent (process {self._agent.pid}), which runs the ranks, ended {how}; the ranks are ended too")
        self._end_all()
        self._print_log_dir()
        return 128 - code if code < 0 else code or 1

    def _end_all(self, grace_s: float = GRACE_S) -> None:
        """End every process of the job on this host, with SIGKILL at once if another signal comes."""
        self._send_to_agent(STAND_BACK)
        self._signals.clear()
        agent = set() if self._agent.returncode is not None else {self._agent.pid}
        # The agent goes last: when it ends, the kernel kills the ranks at once, without their time of grace.
        ranks = JobProcesses(self._marker, spare=agent) if agent else self._processes
        stuck = ranks.end(grace_s, self._signal_came) | self._processes.end(0.0, self._signal_came)
        self._reap()  # the agent may have ended before it has collected the ranks
        for pid, name in stuck.items():
            say(f"process {pid} ({name}) does not end, not even by SIGKILL: it is stuck in the kernel")

    def _signal_came(self) -> bool:
        self._reap()
        return bool(self._signals)

    def _end_leftovers(self) -> None:
        """After success, wait for processes that the ranks have left behind, and end those that stay."""
        deadline = time.monotonic() + LEFTOVER_TIMEOUT_S
        while left := self._processes.find():
            if time.monotonic() > deadline or self._signals:
                names = ", ".join(f"{name} ({pid})" for pid, name in left.items())
                say(f"the ranks left {count(len(left), 'process')} behind, ended now: {names}")
                self._end_all()
                return
            time.sleep(0.1)
            self._reap()

    def _print_log_dir(self, only_if_filled: bool = False) -> None:
        """Print where the output is, and keep it."""
        if not only_if_filled or has_output(self._log_dir):
            self.keeps_logs = True
            on_host = "" if self._job.node_rank == 0 else f" on host {os.uname().nodename}"
            say(f"output of the ranks{on_host}: {self._log_dir}")


def run_node(job: NodeJob) -> int:
    """Run one node's part of a job and return its exit status.

    Call it once, in the main thread of a process without other children: it waits for all children, adopts orphans and
    handles signals.

    Returns:
        0 if every rank succeeded. 2 if the directory for the output cannot be made. 128 + n if signal n ended the job
        or the rank that failed first. Otherwise the exit status of that rank.
    """
    try:
        log_dir = make_log_dir(job)
    except OSError as error:
        where = "a temporary directory" if job.log_dir is None else f"--log-dir {job.log_dir!r}"
        say(f"nothing was started: {where} cannot be made ({error.strerror}: {error.filename!r})")
        return 2
    print_threads_per_rank(job)
    supervisor = Supervisor(job, log_dir)
    status = supervisor.run()
    if job.log_dir is None and not supervisor.keeps_logs:
        shutil.rmtree(log_dir, ignore_errors=True)
    return status


def make_log_dir(job: NodeJob) -> str:
    """Make the directory for the ranks' output: one per job below ``--log-dir``, or a temporary one."""
    if job.log_dir is None:
        return tempfile.mkdtemp(prefix="zerolite_")
    path = os.path.join(job.log_dir, f"job_{job.job_id[:8]}")
    os.makedirs(path, exist_ok=True)
    return path


def has_output(directory: str) -> bool:
    """Return True if any file below a directory has contents."""
    return any(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(directory) for name in names)


def print_threads_per_rank(job: NodeJob) -> None:
    """Print the number of threads if the launcher has chosen it, once per job: on the first node."""
    threads = job.threads_per_rank(os.environ)
    if threads is None or job.node_rank != 0:
        return
    from zerolite.launcher.resources import count_cores

    say(
        f"OMP_NUM_THREADS={threads} in each process, to share {count(count_cores(), 'core')} among "
        f"{count(job.nproc, 'process')}; set it yourself to choose another number"
    )


def print_dry_run(job: NodeJob) -> None:
    """Print one shell line for each rank of the node: its variables and its command.

    Two things are decided at the start only, and left out: a free port, and the ranks' numbers on several nodes.
    """
    print(f"cd {shlex.quote(os.getcwd())}")
    cpus = job.bound_cpus()
    for local_rank in range(job.nproc):
        rank = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": job.nproc, "MASTER_ADDR": job.master_addr}
        if job.num_nodes == 1:
            rank |= {"RANK": local_rank, "WORLD_SIZE": job.nproc}
        if job.master_port:
            rank["MASTER_PORT"] = job.master_port
        if local_rank in cpus:
            rank[BIND_VARIABLE] = cpus[local_rank]
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
