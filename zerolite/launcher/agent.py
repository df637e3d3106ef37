"""Node agent: torch's elastic agent, in a process that the supervisor starts.

`main([LIFELINE, PROGRESS, LOG_DIR, quiet?])` gets two file descriptors and a directory. From LIFELINE the agent reads
one line, the job, and then single letters: the supervisor's `INTERRUPT` and `STAND_BACK`. If LIFELINE closes, the
supervisor has died, and the agent ends everything. To PROGRESS it writes `READY` once the ranks run, and `DONE` when
they have ended and it has printed why.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from zerolite.launcher.failures import Failure, MemoryKills, causes_first, count, describe, exit_status, headline
from zerolite.launcher.job import JOB_ID_VARIABLE, NodeJob, read_line
from zerolite.launcher.logs import RankLogs
from zerolite.launcher.processes import JobProcesses, send
from zerolite.launcher.rank import BIND_VARIABLE, PARENT_VARIABLE
from zerolite.launcher.rendezvous import REACHED_KEY, SILENCE_S, FailureBoard, NodeRendezvous, NodeRendezvousError
from zerolite.launcher.supervisor import CPP_LOG_VARIABLE, DONE, INTERRUPT, QUIET, READY, say, write
from zerolite.utils import failure_record
from zerolite.utils.failure_record import EXIT_COUNT, NUMBERED_EXIT, FailureRecord
from zerolite.utils.network import GLOO_VARIABLE, interface_of, interface_towards

MONITOR_INTERVAL_S = 0.05

CAUSE_WAIT_S = 2.0
"""Time to wait for a first failure if every failed rank only reports the loss of another rank."""

REPORTED_WAIT_S = 1.0
"""Time in which a rank may end by itself after it has reported an error."""

HANG_TIMEOUT_S = 3.0
"""Time after which a rank that has reported an error and still runs counts as failed."""


class JobEnded(Exception):
    """The ranks have ended, and do not start again."""


class NodeAgent(LocalElasticAgent):
    """torch's elastic agent that ends ranks within seconds and knows which of them failed first.

    Args:
        job: this node's part.
        log_dir: an existing directory for the ranks' output.
        progress: file descriptor from which the supervisor reads.
    """

    def __init__(self, job: NodeJob, log_dir: str, progress: int) -> None:
        self.job = job
        self.host = socket.gethostname()
        self.rendezvous = NodeRendezvous(job, self.host)
        self.logs = RankLogs(log_dir, job.log_dir is not None, job.tee, rank_variables(job))
        self.processes = JobProcesses(os.environ[JOB_ID_VARIABLE], spare=[os.getppid()])
        self.failures: list[Failure] = []  # of this node and its ranks in the current attempt
        self.pids: dict[int, int] = {}  # by local rank; each leads a process group of its own
        self._progress = progress
        self._stopping = False
        self._restart_reason = ""
        self._memory_kills = MemoryKills()
        self._ended_at: dict[int, float] = {}
        self._reported_at: dict[int, float] = {}
        self._announced: set[int] = set()
        super().__init__(make_spec(job, self.rendezvous), self.logs, exit_barrier_timeout=5)

    @property
    def board(self) -> FailureBoard:
        """Failures and successes of the nodes in the current attempt."""
        assert self.rendezvous.board is not None
        return self.rendezvous.board

    def obey_supervisor(self, lifeline: int) -> None:
        """Obey the supervisor's letters, and end everything if it or the first node has gone. Runs in a thread.

        Args:
            lifeline: file descriptor of a pipe whose other end the supervisor holds.
        """
        while True:
            if select.select([lifeline], [], [], 0.5)[0]:
                letter = os.read(lifeline, 1)
                if not letter or not self.pids:
                    self._end_everything()
                self._stopping = True
                if letter == INTERRUPT:
                    send(self.pids.values(), signal.SIGINT, os.killpg)
            if self.pids and self.board.silence_s > SILENCE_S:  # no other node can be told
                sentence = f"host {self.host} had no answer from the first node, {self.rendezvous.address}, for "
                self.board.disconnect()
                self._report([Failure(host=self.host, node_failure=f"{sentence}{SILENCE_S:.0f} s")])
                self._end_everything()

    def fail(self, error: Exception) -> None:
        """Make the error of this agent, which is being handled, the failure of its node."""
        sentence = f"the agent on host {self.host} failed: {type(error).__name__}: {error}"
        record = FailureRecord("", traceback.format_exc() if not isinstance(error, NodeRendezvousError) else "")
        self.failures = [Failure(host=self.host, node_failure=sentence, record=record)]

    def _end_everything(self) -> NoReturn:
        self._stopping = True
        self.processes.end()
        os._exit(1)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = self.rendezvous.attempt
        if attempt and self.job.node_rank == 0:
            ranks = count(worker_group.workers[0].world_size, "rank")
            nodes = count(self.job.num_nodes, "node")
            say(f"attempt {attempt} starts: {ranks} on {nodes}, because {self._restart_reason}")
        self.failures, self._ended_at, self._reported_at, self._announced = [], {}, {}, set()
        self._choose_interface()
        if self._stopping:
            os._exit(1)
        self.pids = super()._start_workers(worker_group)
        os.write(self._progress, READY)
        # torch's handlers would raise an exception. SIGTERM ends this process, and with it the ranks; the other signals
        # are for the supervisor, which tells the agent by a letter.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else lambda *_: None)
        self.logs.start_tee()
        return self.pids

    def _choose_interface(self) -> None:
        """Set gloo's network interface to the one that leads to the first node, unless the user has chosen one."""
        if GLOO_VARIABLE in os.environ or self.job.num_nodes == 1:
            return
        first = self.job.node_rank == 0
        interface = interface_of(self.rendezvous.store.get(REACHED_KEY).decode()) if first else None
        interface = interface or interface_towards(self.rendezvous.address)
        if interface is not None:
            os.environ[GLOO_VARIABLE] = interface
        if interface is not None and first:
            say(
                f"{GLOO_VARIABLE}={interface} here, and on each other host the interface that leads to this one; gloo "
                "would look for the host's own name, which often means 127.0.1.1; set it yourself to choose another"
            )

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """End the ranks and every process that they started. After success, the supervisor ends what is left."""
        if self.pids:
            if self.get_worker_group().state != WorkerState.SUCCEEDED:
                self.processes.end()
            super()._shutdown(*args, **kwargs)
            self.pids = {}
            self.logs.stop_tee()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        board, codes = self.board, self._exit_codes()
        board.poll()
        self._announce_exits(codes)
        if self._stopping:
            if None not in codes.values():
                raise JobEnded
            return RunResult(WorkerState.HEALTHY)
        others_failed = (board.failures or board.disconnected) and not board.all_succeeded
        if others_failed or any(codes.values()) or self._hanging(codes):
            self._fail()
            return RunResult(WorkerState.FAILED)
        if None not in codes.values():
            board.note_success()
            # Until all nodes have succeeded this one waits: if a rank fails elsewhere, all ranks may start again.
            if board.all_succeeded:
                ranks = [worker.global_rank for worker in worker_group.workers]
                return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        return RunResult(WorkerState.HEALTHY)

    def _exit_codes(self) -> dict[int, int | None]:
        """Return the exit status of each local rank as `Popen.returncode` has it; None while it runs."""
        codes: dict[int, int | None] = {}
        for local_rank, pid in self.pids.items():
            # WNOWAIT leaves the process to torch.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            codes[local_rank] = None
            if ended is not None:
                codes[local_rank] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                self._ended_at.setdefault(local_rank, time.time())
        return codes

    def _announce_exits(self, codes: dict[int, int | None]) -> None:
        """Tell all ranks which of them have exited with status 0, so that the others stop waiting for these."""
        store = self.rendezvous.rank_store
        for worker in self.get_worker_group().workers:
            if codes[worker.local_rank] == 0 and worker.local_rank not in self._announced:
                self._announced.add(worker.local_rank)
                with contextlib.suppress(RuntimeError):  # the first node has gone
                    store.set(NUMBERED_EXIT.format(store.add(EXIT_COUNT, 1)), str(worker.global_rank))

    def _hanging(self, codes: dict[int, int | None]) -> list[int]:
        """Return the local ranks that have reported an error a while ago and still run."""
        now = time.monotonic()
        for worker in self.get_worker_group().workers:
            if os.path.exists(self.logs.error_files[worker.global_rank]):
                self._reported_at.setdefault(worker.local_rank, now)
        return [rank for rank, at in self._reported_at.items() if codes[rank] is None and now - at > HANG_TIMEOUT_S]

    def _fail(self) -> None:
        """Find out what has failed, here or on another node, tell the others, and end the ranks.

        Raises:
            JobEnded: they do not start again.
        """
        board = self.board
        self._wait_for_cause()
        self.failures = local_failures = self._rank_failures()
        if board.disconnected and not board.failures:
            sentence = f"the first node, {self.rendezvous.address}, has gone: its agent has ended or cannot be reached"
            local_failures.append(Failure(host=self.host, seen=time.time(), node_failure=sentence))
        # All failures only say that another rank has gone: it may be one that exited with status 0.
        if all(failure.consequence for failure in [*local_failures, *board.failures]):
            codes = self._exit_codes()
            local_failures += [
                self._failure(w, 0, None) for w in self.get_worker_group().workers if codes[w.local_rank] == 0
            ]
        if local_failures:
            board.post(local_failures)
        self.processes.end()
        board.poll(at_once=True)
        known = causes_first([*local_failures, *board.failures])
        if self.rendezvous.attempt >= self.job.max_restarts or any(failure.node_failure for failure in known):
            raise JobEnded
        self._restart_reason = headline(known[0])

    def _wait_for_cause(self) -> None:
        """Wait a little for the cause, and for ranks that have reported an error and are about to end."""
        start = time.monotonic()
        while True:
            codes = self._exit_codes()
            records = {worker.local_rank: self._record(worker) for worker in self.get_worker_group().workers}
            failed = [records[rank] for rank, code in codes.items() if code]
            about_to_end = {rank for rank, record in records.items() if record and codes[rank] is None}
            limit = REPORTED_WAIT_S if about_to_end.difference(self._hanging(codes)) else 0.0
            if failed and not self.board.failures and all(record and record.consequence for record in failed):
                limit = CAUSE_WAIT_S
            if time.monotonic() - start >= limit:
                return
            time.sleep(MONITOR_INTERVAL_S)
            self.board.poll()

    def _rank_failures(self) -> list[Failure]:
        """Return the failures of this node's ranks: those that have ended with an error, or have reported one."""
        codes = self._exit_codes()
        workers = self.get_worker_group().workers
        ends = [(worker, codes[worker.local_rank], self._record(worker)) for worker in workers]
        return [self._failure(worker, code or None, record) for worker, code, record in ends if code or record]

    def _record(self, worker: Worker) -> FailureRecord | None:
        return failure_record.read(self.logs.error_files[worker.global_rank])

    def _failure(self, worker: Worker, code: int | None, record: FailureRecord | None) -> Failure:
        return Failure(
            rank=worker.global_rank,
            world_size=worker.world_size,
            host=self.host,
            pid=self.pids[worker.local_rank],
            exitcode=1 if code is None else code,
            seen=self._ended_at.get(worker.local_rank, time.time()),
            record=record,
            killed_for_memory=code == -signal.SIGKILL and self._memory_kills.happened(),
            output=self.logs.outputs[worker.global_rank],
            tail=self.logs.tail(worker.global_rank),
            by_itself=code is not None,
        )

    def leave(self) -> int:
        """Leave the job: print its last lines on one node, and return its exit status."""
        failures, board = list(self.failures), self.rendezvous.board
        if board is not None:
            board.leave()
            failures = causes_first([*failures, *board.failures])
        if self._stopping:
            failures = []  # of no interest: the supervisor has ended the ranks
        self._report(failures)
        return exit_status(failures)

    def _report(self, failures: list[Failure]) -> None:
        board = self.rendezvous.board
        if failures and (self.job.node_rank == 0 or board is None or board.disconnected):
            for line in describe(failures, self.rendezvous.attempt, self.host):
                write(line)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._progress, DONE)


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


def main(argv: list[str]) -> NoReturn:
    """Run this node's part of the job, and end the process with its exit status."""
    lifeline, progress, log_dir = int(argv[0]), int(argv[1]), argv[2]
    if QUIET in argv[3:]:
        del os.environ[CPP_LOG_VARIABLE]  # torch has read it at import; the ranks are not to inherit it
    os.set_inheritable(lifeline, False)
    os.set_inheritable(progress, False)
    line = read_line(lifeline)
    if not line:
        os._exit(1)
    agent = NodeAgent(NodeJob.from_json(line), log_dir, progress)
    threading.Thread(target=agent.obey_supervisor, args=(lifeline,), daemon=True).start()
    try:
        with contextlib.suppress(JobEnded):
            agent.run()
    except Exception as error:
        agent.fail(error)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(agent.leave())
