"""Node agent: torch's elastic agent that ends ranks within seconds and reports which of them failed first."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from zerolite.launcher.failures import Failure, exit_status
from zerolite.launcher.job import JOB_ID_VARIABLE, NodeJob
from zerolite.launcher.logs import RankLogs
from zerolite.launcher.processes import JobProcesses, send
from zerolite.launcher.rank import PARENT_VARIABLE
from zerolite.launcher.rendezvous import NodeRendezvous, NodeRendezvousError
from zerolite.launcher.resources import count_memory_kills
from zerolite.launcher.supervisor import INTERRUPT_GRACE_S, SIGNALS, say
from zerolite.utils import failure_record
from zerolite.utils.failure_record import FailureRecord

MONITOR_INTERVAL_S = 0.05

HANG_TIMEOUT_S = 3.0
"""Time after which a rank that has reported an error and still runs counts as failed."""

CAUSE_WAIT_S = 2.0
"""Time to wait for the cause of a failure, and for the end of ranks that have reported an error."""


class JobEnded(Exception):
    """The ranks have succeeded, or are ended."""


class NodeAgent(LocalElasticAgent):
    """torch's elastic agent with our end of a job.

    Args:
        job: this node's part.
        log_dir: an existing directory for the ranks' output.
        report: file descriptor of a pipe; before it ends the ranks, it writes what it knows of their failures there.
    """

    def __init__(self, job: NodeJob, log_dir: str, report: int) -> None:
        self.job = job
        self._report: int | None = report
        self._host = socket.gethostname()
        self._rendezvous_handler = NodeRendezvous(job)
        self._logs = RankLogs(log_dir, job.log_dir is not None, job.tee, {PARENT_VARIABLE: str(os.getpid())})
        self._processes = JobProcesses(os.environ[JOB_ID_VARIABLE])
        self._pids: dict[int, int] = {}  # by local rank; each leads a process group of its own
        self._signals: list[int] = []
        self._interrupted_at: float | None = None
        self._failures: list[Failure] = []  # of ranks that have ended or reported an error, those with status 0 too
        self._succeeded = False
        self._memory_kills = count_memory_kills()
        self._failed_at: float | None = None
        self._ended_at: dict[int, float] = {}
        self._reported_at: dict[int, float] = {}
        # torch's agent expands `$` macros in arguments, and turns `$$` into a plain `$`.
        arguments = tuple(part.replace("$", "$$") for part in job.rank_command()[1:])
        spec = WorkerSpec(
            role="rank",
            local_world_size=job.nproc,
            rdzv_handler=self._rendezvous_handler,
            entrypoint=sys.executable,
            args=arguments,
            max_restarts=0,
            monitor_interval=MONITOR_INTERVAL_S,
        )
        super().__init__(spec, self._logs, exit_barrier_timeout=5)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._pids = super()._start_workers(worker_group)
        for number in SIGNALS:  # torch's handlers would raise an exception
            signal.signal(number, lambda number, _: self._signals.append(number))
        self._logs.start_tee()
        return self._pids

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """End the ranks and every process that they started. After success, the supervisor ends what is left."""
        if self._pids:
            if not self._succeeded:
                self._processes.end()
            super()._shutdown(*args, **kwargs)
            self._pids = {}
            self._logs.stop_tee()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the ranks, and obey a signal. Raises JobEnded at the end."""
        codes = self._exit_codes()
        is_failed = self._look(codes)
        if self._signals:
            self._obey_signal(codes)
            return RunResult(WorkerState.HEALTHY)
        finished = [failure.rank for failure in self._failures if failure.exitcode == 0]
        self._rendezvous_handler.announce(finished)
        if len(finished) == len(codes) and self._rendezvous_handler.leave():
            self._succeeded = True
            raise JobEnded
        if is_failed:
            self._end()
        return RunResult(WorkerState.HEALTHY)

    def _obey_signal(self, codes: dict[int, int | None]) -> None:
        """Let the ranks finish after Ctrl-C, and end them after any other signal. The command ends all after two."""
        now = time.monotonic()
        if any(number != signal.SIGINT for number in self._signals):  # SIGTERM comes when the command has gone
            self._end()
        if self._interrupted_at is None:
            self._interrupted_at = now
            say(f"Ctrl-C: the ranks have {INTERRUPT_GRACE_S:.0f} s to finish; press it again to end them at once")
            send(self._pids.values(), signal.SIGINT, os.killpg)
        elif None not in codes.values():
            self._end()
        elif now - self._interrupted_at > INTERRUPT_GRACE_S:
            say(f"the ranks did not finish within {INTERRUPT_GRACE_S:.0f} s of Ctrl-C and are ended")
            self._end()

    def _exit_codes(self) -> dict[int, int | None]:
        """Return the exit status of each local rank as `Popen.returncode` has it; None while it runs."""
        codes: dict[int, int | None] = {}
        for local_rank, pid in self._pids.items():
            # WNOWAIT leaves the process to torch.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            codes[local_rank] = None
            if ended is not None:
                codes[local_rank] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                self._ended_at.setdefault(local_rank, time.time())
        return codes

    def _look(self, codes: dict[int, int | None]) -> bool:
        """Find the failures, and return True if it is time to act on them.

        A rank that has reported an error a while ago and still runs counts as failed. An error that only tells of
        another rank's end waits a little for its cause.
        """
        now, is_failed, is_pending = time.monotonic(), False, False
        self._failures = []
        for worker in self.get_worker_group().workers:
            code, record = codes[worker.local_rank], failure_record.read(self._logs.error_files[worker.global_rank])
            if code is None and record is not None and record.pid != self._pids[worker.local_rank]:
                record = None  # of a child, which inherits the variable; the rank may bear its failure
            if code == 0:
                self._failures.append(self._failure(worker, 0, None))
            elif code or record is not None:
                self._failures.append(self._failure(worker, code, record))
                hangs = now - self._reported_at.setdefault(worker.local_rank, now) > HANG_TIMEOUT_S
                is_pending |= code is None and not hangs
                is_failed |= code is not None or hangs
        if not is_failed:  # a rank that hung may have ended with status 0
            self._failed_at = None
        elif self._failed_at is None:
            self._failed_at = now
        is_pending |= all(failure.consequence for failure in self._failures if failure.exitcode)
        return self._failed_at is not None and not (is_pending and now - self._failed_at < CAUSE_WAIT_S)

    def _failure(self, worker: Worker, code: int | None, record: FailureRecord | None) -> Failure:
        return Failure(
            rank=worker.global_rank,
            world_size=worker.world_size,
            host=self._host,
            pid=self._pids[worker.local_rank],
            exitcode=1 if code is None else code,
            seen=self._ended_at.get(worker.local_rank, time.time()),
            record=record,
            killed_for_memory=code == -signal.SIGKILL and count_memory_kills() > self._memory_kills,
            output=self._logs.outputs[worker.global_rank],
            tail="" if code == 0 else self._logs.tail(worker.global_rank),
            by_itself=code is not None,
        )

    def _end(self) -> NoReturn:
        self.send_report()
        raise JobEnded

    def send_report(self) -> None:
        """Write the failures to the supervisor, which may have to end this process before the ranks have ended."""
        if self._report is not None:
            text = json.dumps([dataclasses.asdict(failure) for failure in self._failures]) + "\n"
            with contextlib.suppress(OSError), os.fdopen(self._report, "w") as pipe:
                pipe.write(text)
            self._report = None

    def fail(self, error: Exception) -> None:
        """Make the error of this agent, which is being handled, the failure of its node."""
        sentence = f"the agent on host {self._host} failed: {type(error).__name__}: {error}"
        record = FailureRecord("", traceback.format_exc() if not isinstance(error, NodeRendezvousError) else "")
        self._failures = [Failure(host=self._host, seen=time.time(), node_failure=sentence, record=record)]
        self.send_report()

    @property
    def status(self) -> int:
        """Exit status of this process."""
        if self._succeeded:
            return 0
        return 128 + self._signals[0] if self._signals else exit_status(self._failures) or 1


def run_agent(job: NodeJob, log_dir: str, report: int) -> int:
    """Run this node's part of the job in this process and return its exit status."""
    agent = NodeAgent(job, log_dir, report)
    try:
        with contextlib.suppress(JobEnded):
            agent.run()
    except Exception as error:
        agent.fail(error)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return agent.status
