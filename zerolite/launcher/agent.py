"""Node agent: torch's elastic agent that ends ranks within seconds and knows which of them failed first."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from zerolite.launcher.board import LEAVE_S, SILENCE_S, Board, NodeRendezvous, NodeRendezvousError, NodeState
from zerolite.launcher.failures import Failure, count, describe, exit_status, headline
from zerolite.launcher.job import JOB_ID_VARIABLE, NodeJob
from zerolite.launcher.logs import RankLogs
from zerolite.launcher.processes import JobProcesses, send
from zerolite.launcher.rank import BIND_VARIABLE, PARENT_VARIABLE
from zerolite.launcher.resources import count_memory_kills
from zerolite.launcher.supervisor import INTERRUPT_GRACE_S, SIGNALS, say, write
from zerolite.utils import failure_record
from zerolite.utils.failure_record import FailureRecord

MONITOR_INTERVAL_S = 0.05

HANG_TIMEOUT_S = 3.0
"""Time after which a rank that has reported an error and still runs counts as failed."""


class JobEnded(Exception):
    """The ranks have ended, and do not start again."""


class NodeAgent(LocalElasticAgent):
    """torch's elastic agent with our end of a job.

    Args:
        job: this node's part.
        log_dir: an existing directory for the ranks' output.

    Attributes:
        failures: why the job ends, causes first.
    """

    def __init__(self, job: NodeJob, log_dir: str) -> None:
        self.job = job
        self.failures: list[Failure] = []
        self._host = socket.gethostname()
        self._rendezvous_handler = NodeRendezvous(job, self._host)
        self._logs = RankLogs(log_dir, job.log_dir is not None, job.tee, rank_variables(job))
        self._processes = JobProcesses(os.environ[JOB_ID_VARIABLE])
        self._pids: dict[int, int] = {}  # by local rank; each leads a process group of its own
        self._signals: list[int] = []
        self._interrupted_at: float | None = None
        self._restart_reason = ""
        self._memory_kills = count_memory_kills()
        self._ended_at: dict[int, float] = {}
        self._reported_at: dict[int, float] = {}
        super().__init__(make_spec(job, self._rendezvous_handler), self._logs, exit_barrier_timeout=5)

    @property
    def _board(self) -> Board:
        assert self._rendezvous_handler.board is not None
        return self._rendezvous_handler.board

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = self._rendezvous_handler.attempt
        if attempt and self.job.node_rank == 0:
            ranks = count(worker_group.workers[0].world_size, "rank")
            nodes = count(self.job.num_nodes, "node")
            say(f"attempt {attempt} starts: {ranks} on {nodes}, because {self._restart_reason}")
        self._ended_at, self._reported_at = {}, {}
        self._pids = super()._start_workers(worker_group)
        for number in SIGNALS:  # torch's handlers would raise an exception
            signal.signal(number, lambda number, _: self._signals.append(number))
        self._logs.start_tee()
        return self._pids

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """End the ranks and every process that they started. After success, the supervisor ends what is left."""
        if self._pids:
            if self.failures or self._signals:
                self._processes.end()
            super()._shutdown(*args, **kwargs)
            self._pids = {}
            self._logs.stop_tee()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Report how the ranks are, and obey a signal or the verdict.

        Raises:
            JobEnded: they do not start again.
        """
        codes = self._exit_codes()
        if self._signals:
            self._obey_signal(codes)
        board, state = self._board, self._state(codes)
        board.state = state
        verdict, silence_s = board.verdict, board.look()
        if verdict is None and (board.broken or (self.job.node_rank and silence_s > SILENCE_S)):
            why = f"has gone: its agent has ended or cannot be reached ({board.broken})"
            why = why if board.broken else f"has not answered for {SILENCE_S:.0f} s"
            sentence = f"the first node, {self.job.master_addr}, {why}"
            verdict = [*state.failures, Failure(host=self._host, seen=time.time(), node_failure=sentence)]
        if verdict is None or self._interrupted_at is not None:
            return RunResult(WorkerState.HEALTHY)
        self.failures = verdict
        may_restart = verdict and not any(failure.node_failure for failure in verdict)
        if not may_restart or self._rendezvous_handler.attempt >= self.job.max_restarts:
            raise JobEnded
        self._restart_reason = headline(verdict[0])
        return RunResult(WorkerState.FAILED)

    def _obey_signal(self, codes: dict[int, int | None]) -> None:
        """Let the ranks finish after Ctrl-C, and end them after any other signal. The command ends all after two."""
        now = time.monotonic()
        if self._signals[0] != signal.SIGINT:
            raise JobEnded
        if self._interrupted_at is None:
            self._interrupted_at = now
            say(f"Ctrl-C: the ranks have {INTERRUPT_GRACE_S:.0f} s to finish; press it again to end them at once")
            send(self._pids.values(), signal.SIGINT, os.killpg)
        elif None not in codes.values():
            raise JobEnded
        elif now - self._interrupted_at > INTERRUPT_GRACE_S:
            say(f"the ranks did not finish within {INTERRUPT_GRACE_S:.0f} s of Ctrl-C and are ended")
            raise JobEnded

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

    def _state(self, codes: dict[int, int | None]) -> NodeState:
        """Return how the ranks are. One that has reported an error a while ago and still runs counts as failed."""
        state, now = NodeState(), time.monotonic()
        for worker in self.get_worker_group().workers:
            code, record = codes[worker.local_rank], failure_record.read(self._logs.error_files[worker.global_rank])
            if code == 0:
                state.finished.append(self._failure(worker, 0, None))
            elif code or record is not None:
                state.failures.append(self._failure(worker, code, record))
                hangs = now - self._reported_at.setdefault(worker.local_rank, now) > HANG_TIMEOUT_S
                state.pending |= code is None and not hangs
                state.failed |= code is not None or hangs
        state.succeeded = len(state.finished) == len(codes)
        return state

    def _failure(self, worker: Worker, code: int | None, record: FailureRecord | None) -> Failure:
        return Failure(
            rank=worker.global_rank,
            world_size=worker.world_size,
            host=self._host,
            pid=self._pids[worker.local_rank],
            exitcode=1 if code is None else code,
            seen=self._ended_at.get(worker.local_rank, time.time()),
            record=record and record.shortened(),
            killed_for_memory=code == -signal.SIGKILL and count_memory_kills() > self._memory_kills,
            output=self._logs.outputs[worker.global_rank],
            tail="" if code == 0 else self._logs.tail(worker.global_rank),
            by_itself=code is not None,
        )

    def fail(self, error: Exception) -> None:
        """Make the error of this agent, which is being handled, the failure of its node."""
        sentence = f"the agent on host {self._host} failed: {type(error).__name__}: {error}"
        record = FailureRecord("", traceback.format_exc() if not isinstance(error, NodeRendezvousError) else "")
        self.failures = [Failure(host=self._host, node_failure=sentence, record=record)]

    def leave(self) -> int:
        """Leave the job: print its last lines on one node, and return its exit status."""
        board = self._rendezvous_handler.board
        if board is not None and board.verdict is not None:
            board.join(LEAVE_S + 1.0)
        failures = [] if self._signals else self.failures
        if failures and (self.job.node_rank == 0 or board is None or board.verdict is None):
            for line in describe(failures, self._rendezvous_handler.attempt, self._host):
                write(line)
        return exit_status(failures)


def make_spec(job: NodeJob, rendezvous: NodeRendezvous) -> WorkerSpec:
    # torch's agent expands `$` macros in arguments, and turns `$$` into a plain `$`.
    arguments = [part.replace("$", "$$") for part in job.rank_command()[1:]]
    return WorkerSpec(
        role="rank",
        local_world_size=job.nproc,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=tuple(arguments),
        max_restarts=job.max_restarts,
        monitor_interval=MONITOR_INTERVAL_S,
    )


def rank_variables(job: NodeJob) -> dict[int, dict[str, str]]:
    """Return additional environment variables for each local rank."""
    cpus = {local_rank: {BIND_VARIABLE: cpus} for local_rank, cpus in job.bound_cpus().items()}
    return {rank: {PARENT_VARIABLE: str(os.getpid()), **cpus.get(rank, {})} for rank in range(job.nproc)}


def run_agent(job: NodeJob, log_dir: str) -> int:
    """Run this node's part of the job in this process and return its exit status."""
    agent = NodeAgent(job, log_dir)
    try:
        with contextlib.suppress(JobEnded):
            agent.run()
    except Exception as error:
        agent.fail(error)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return agent.leave()
