"""Node agent: torch's elastic agent, in a process that the supervisor starts.

`main([LIFELINE, OUTCOME, LOG_DIR, quiet?])` gets two file descriptors and a directory. From LIFELINE the agent reads
one line, the job, and then single letters: the supervisor's `INTERRUPT` and `STAND_BACK`. If LIFELINE closes, the
supervisor has died, and the agent ends everything. To OUTCOME it writes `READY` once the ranks run, and at the end the
job's outcome.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from zerolite.launcher.failure_store import HEARTBEAT_TIMEOUT_S, FailureStore
from zerolite.launcher.failures import Failure, NodeOutcome, causes_first, count, exit_status, headline
from zerolite.launcher.job import JOB_ID_VARIABLE, NodeJob, read_line
from zerolite.launcher.logs import RankLogs
from zerolite.launcher.memory_kills import MemoryKills
from zerolite.launcher.node_rendezvous import FIRST_NODE_ADDRESS_KEY, NodeRendezvous, NodeRendezvousError, host_name
from zerolite.launcher.processes import JobProcesses, send
from zerolite.launcher.rank import BIND_VARIABLE, PARENT_VARIABLE
from zerolite.launcher.rank_start import bound_cpus, rank_command
from zerolite.launcher.supervisor import CPP_LOG_VARIABLE, INTERRUPT, QUIET, READY, say
from zerolite.utils import failure_record
from zerolite.utils.failure_record import EXIT_COUNT, NUMBERED_EXIT, FailureRecord
from zerolite.utils.network import GLOO_VARIABLE, interface_of, interface_towards

MONITOR_INTERVAL_S = 0.05

CAUSE_WAIT_S = 2.0
"""If every failed rank only reports that it lost another one, the failure of that one is awaited for so long."""

REPORTED_WAIT_S = 1.0
"""A rank that has reported an error is about to end by itself, and gets so long for it."""

HANG_TIMEOUT_S = 3.0
"""A rank that has reported an error and still runs after so long counts as failed."""


class NodeAgent(LocalElasticAgent):
    """torch's elastic agent that ends ranks within seconds and knows which of them failed first.

    Args:
        job: this node's part.
        log_dir: an existing directory for the ranks' output.
        outcome: file descriptor from which the supervisor reads.
    """

    def __init__(self, job: NodeJob, log_dir: str, outcome: int) -> None:
        self.job = job
        self.host = host_name()
        self.rendezvous = NodeRendezvous(job, self.host)
        self.logs = RankLogs(log_dir, job.log_dir is not None, job.tee, rank_variables(job))
        self.processes = JobProcesses(os.environ[JOB_ID_VARIABLE], spare=[os.getppid()])
        self.stopping = False
        self.failures: list[Failure] = []
        self._outcome = outcome
        self._noted_success = False
        self._memory_kills = MemoryKills()
        self._unfinished_since: dict[int, float] = {}
        self._announced_exits: set[int] = set()
        super().__init__(make_spec(job, self.rendezvous), self.logs)

    @property
    def failure_store(self) -> FailureStore | None:
        """Failures of the current attempt; None if the job has one node."""
        return self.rendezvous.failure_store

    @property
    def ranks_run(self) -> bool:
        return self._pcontext is not None

    def _choose_interface(self) -> None:
        """Set gloo's network interface to the one that leads to the first node, unless the user has chosen one."""
        if GLOO_VARIABLE in os.environ or len(self.rendezvous.hosts) == 1:
            return
        first = self.job.node_rank == 0
        interface = interface_of(self.rendezvous.store.get(FIRST_NODE_ADDRESS_KEY).decode()) if first else None
        interface = interface or interface_towards(self.rendezvous.address)
        if interface is not None:
            os.environ[GLOO_VARIABLE] = interface
        if interface is not None and first:
            say(
                f"{GLOO_VARIABLE}={interface} here, and on each other host the interface that leads to this one; gloo "
                "would look for the host's own name, which often means 127.0.1.1; set it yourself to choose another"
            )

    def stop(self) -> None:
        """Start no more ranks. The caller ends those that run."""
        self.stopping = True

    def rank_pids(self) -> dict[int, int]:
        """Return the process id of each local rank. Each leads a process group of its own."""
        return {} if self._pcontext is None else dict(self._pcontext.pids())

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        rendezvous = self.rendezvous
        nodes, world = len(rendezvous.hosts), worker_group.workers[0].world_size
        self._remaining_restarts = max(0, self.job.max_restarts - rendezvous.restarts)
        self.failures, self._unfinished_since, self._noted_success = [], {}, False
        self._announced_exits = set()
        self.logs.begin_attempt(rendezvous.attempt)
        if rendezvous.attempt and rendezvous.node == 0:
            why = rendezvous.last_failure() or "nodes have come or gone"
            say(f"attempt {rendezvous.attempt} starts: {count(world, 'rank')} on {count(nodes, 'node')}, because {why}")
        self._choose_interface()
        if self.stopping:
            os._exit(1)
        started: dict[int, Any] = super()._start_workers(worker_group)
        write_line(self._outcome, READY)
        # torch's handlers would raise an exception here. SIGTERM ends this process, and with it the ranks; the other
        # signals are for the supervisor, which tells the agent by a letter.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else lambda *_: None)
        self.logs.start_tee()
        return started

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self._shutdown()

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """End the ranks and every process that they started. After success, the supervisor ends what is left."""
        if self._pcontext is not None:
            if self._worker_group.state != WorkerState.SUCCEEDED:
                self.processes.end()
            self._pcontext.close()
            self.logs.stop_tee()

    def _exit_codes(self) -> dict[int, int | None]:
        """Return the exit status of each local rank; None while it runs."""
        assert isinstance(self._pcontext, SubprocessContext)
        handlers = self._pcontext.subprocess_handlers
        return {local_rank: handlers[local_rank].proc.poll() for local_rank in sorted(handlers)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._exit_codes()
        self._announce_exits(codes)
        if self.stopping:
            self._remaining_restarts = 0
            return RunResult(WorkerState.HEALTHY if None in codes.values() else WorkerState.FAILED)
        failed = self._failed_ranks(codes)
        store = self.failure_store
        if failed or (store is not None and (store.failures or store.disconnected) and not store.all_succeeded):
            return self._fail(worker_group, failed)
        if None in codes.values() or not self._all_nodes_succeeded():
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in worker_group.workers})

    def _announce_exits(self, codes: dict[int, int | None]) -> None:
        """Tell all ranks which of them have exited with status 0, so that a rank that waits for one of them raises."""
        store = self.rendezvous.rank_store
        for worker in self._worker_group.workers:
            if codes[worker.local_rank] == 0 and worker.local_rank not in self._announced_exits:
                self._announced_exits.add(worker.local_rank)
                with contextlib.suppress(RuntimeError):  # the first node has gone
                    store.set(NUMBERED_EXIT.format(store.add(EXIT_COUNT, 1)), str(worker.global_rank))

    def _failed_ranks(self, codes: dict[int, int | None]) -> dict[int, int]:
        """Return the exit statuses of the failed local ranks, 1 for a rank that hangs after it reported an error."""
        failed = {local_rank: code for local_rank, code in codes.items() if code}
        for worker in self._worker_group.workers:
            if codes[worker.local_rank] is None and os.path.exists(self.logs.error_files[worker.global_rank]):
                since = self._unfinished_since.setdefault(worker.local_rank, time.monotonic())
                if time.monotonic() - since > HANG_TIMEOUT_S:
                    failed[worker.local_rank] = 1
        return failed

    def _fail(self, worker_group: WorkerGroup, failed: dict[int, int]) -> RunResult:
        """Collect what is known of the failure, here or on another node, post it, and end the ranks."""
        seen = dict.fromkeys(failed, time.time())
        self._wait_for_cause(failed, seen)
        self.failures = [self._failure(worker_group, rank, code, seen[rank]) for rank, code in failed.items()]
        store = self.failure_store
        if store is not None and store.disconnected and not store.failures:
            sentence = f"the first node, {self.rendezvous.address}, has gone: its agent has ended or cannot be reached"
            self.failures.append(Failure(host=self.host, seen=time.time(), node_failure=sentence))
        failures = causes_first(self.failures + (store.failures if store is not None else []))
        # All failures only say that another rank has gone: it may be one that exited with status 0.
        if failures and all(failure.consequence for failure in failures):
            ended = [rank for rank, code in self._exit_codes().items() if code == 0]
            self.failures += [self._failure(worker_group, rank, 0, time.time()) for rank in ended]
        if self._can_restart():
            self.rendezvous.note_failure(headline(failures[0]) if failures else "another node failed")
        else:
            self._remaining_restarts = 0
            if store is not None and self.failures:
                store.post(self.failures)
        ending = time.time()
        self.processes.end()
        self._add_late_failures(worker_group, failed, ending)
        return RunResult(WorkerState.FAILED)

    def _can_restart(self) -> bool:
        if self._remaining_restarts <= 0:
            return False
        store = self.failure_store
        return (
            store is None
            or not store.disconnected
            and len(self.rendezvous.hosts) - len(store.lost_hosts) >= self.job.min_nodes
        )

    def _wait_for_cause(self, failed: dict[int, int], seen: dict[int, float]) -> None:
        """Wait a little for the cause, and for ranks that have reported an error and are about to end.

        Args:
            failed: exit status by local rank; ranks that fail meanwhile are added.
            seen: time of each failure, in seconds since the epoch; completed likewise.
        """
        start = time.monotonic()
        while failed and not (self.failure_store is not None and self.failure_store.failures):
            limit = REPORTED_WAIT_S if self._others_have_reported(failed) else 0.0
            if self._cause_is_missing(failed):
                limit = CAUSE_WAIT_S
            if time.monotonic() - start > limit:
                return
            time.sleep(MONITOR_INTERVAL_S)
            for local_rank, code in self._exit_codes().items():
                if code and local_rank not in failed:
                    failed[local_rank] = code
                    seen[local_rank] = time.time()

    def _cause_is_missing(self, failed: dict[int, int]) -> bool:
        """Return True if every failed rank only reports that it lost another one."""
        records = [self._record(local_rank) for local_rank in failed]
        return all(record is not None and record.consequence for record in records)

    def _others_have_reported(self, failed: dict[int, int]) -> bool:
        """Return True if a rank that still runs has reported an error."""
        return any(self._record(w.local_rank) for w in self._worker_group.workers if w.local_rank not in failed)

    def _record(self, local_rank: int) -> FailureRecord | None:
        return failure_record.read(self.logs.error_files[self._worker_group.workers[local_rank].global_rank])

    def _failure(self, worker_group: WorkerGroup, local_rank: int, code: int, seen: float) -> Failure:
        worker = worker_group.workers[local_rank]
        pid = self.rank_pids()[local_rank]
        return Failure(
            rank=worker.global_rank,
            world_size=worker.world_size,
            host=self.host,
            pid=pid,
            exitcode=code,
            seen=seen,
            record=self._record(local_rank),
            killed_for_memory=code == -signal.SIGKILL and self._memory_kills.happened(),
            output=self.logs.outputs[worker.global_rank],
            tail=self.logs.tail(worker.global_rank),
        )

    def _add_late_failures(self, worker_group: WorkerGroup, failed: dict[int, int], ending: float) -> None:
        """Add the failures of ranks that had failed by themselves before they were told to end, at time ``ending``."""
        for local_rank, code in self._exit_codes().items():
            record = self._record(local_rank)
            if local_rank not in failed and record is not None and record.time <= ending:
                failure = self._failure(worker_group, local_rank, code or 1, time.time())
                self.failures.append(dataclasses.replace(failure, by_itself=False))

    def _all_nodes_succeeded(self) -> bool:
        """Post that this node's ranks have succeeded, and return whether those of all nodes have.

        Until then this node waits: if a rank fails elsewhere, all ranks may have to start again.
        """
        if self.failure_store is not None and not self._noted_success:
            self._noted_success = True
            self.failure_store.note_success()
        return self.failure_store is None or self.failure_store.all_succeeded

    def _exit_barrier(self) -> None:
        """Do nothing: :meth:`_all_nodes_succeeded` has waited for the other nodes already."""

    def outcome(self) -> NodeOutcome:
        """Return the outcome of the job as far as this node knows it."""
        if self.failure_store is None:
            return NodeOutcome(self.failures, True, self.rendezvous.attempt)
        prints_summary = self.rendezvous.node == 0 or self.failure_store.disconnected
        return NodeOutcome(self.failures + self.failure_store.failures, prints_summary, self.rendezvous.attempt)

    def leave(self) -> None:
        """Leave the job. The first node, which hosts the store, waits until the others have left."""
        if self.failure_store is not None and not self.failure_store.disconnected:
            self.failure_store.exit_barrier()


def make_spec(job: NodeJob, rendezvous: NodeRendezvous) -> WorkerSpec:
    # torch's agent expands `$` macros in arguments, and turns `$$` into a plain `$`.
    arguments = [part.replace("$", "$$") for part in rank_command(job)[1:]]
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
    variables = {local_rank: {PARENT_VARIABLE: str(os.getpid())} for local_rank in range(job.nproc)}
    for local_rank, cpus in bound_cpus(job).items():
        variables[local_rank][BIND_VARIABLE] = cpus
    return variables


class SupervisorListener:
    """Thread that obeys the supervisor, and ends everything if the supervisor or the first node has gone.

    Args:
        lifeline: file descriptor of a pipe whose other end the supervisor holds.
        outcome: file descriptor from which the supervisor reads.

    Attributes:
        agent: the agent; None until it has met the agents of the other nodes.
    """

    def __init__(self, lifeline: int, outcome: int) -> None:
        self._agent: NodeAgent | None = None
        self._lifeline = lifeline
        self._outcome = outcome
        threading.Thread(target=self._listen, name="zerolite supervisor listener", daemon=True).start()

    def watch(self, agent: NodeAgent) -> None:
        """Let the supervisor's letters end ``agent``."""
        self._agent = agent

    def _listen(self) -> None:
        while True:
            if select.select([self._lifeline], [], [], 0.5)[0]:
                self._on_letter(os.read(self._lifeline, 1))
            store = self._agent.failure_store if self._agent is not None else None
            if store is not None and store.silence_s > HEARTBEAT_TIMEOUT_S:
                self._on_lost_first_node()

    def _on_letter(self, letter: bytes) -> None:
        """Obey a letter of the supervisor; an empty one means that the supervisor has ended."""
        if letter == b"" or self._agent is None or not self._agent.ranks_run:
            self._end_everything()
        self._agent.stop()
        if letter == INTERRUPT:
            send(self._agent.rank_pids().values(), signal.SIGINT, os.killpg)

    def _on_lost_first_node(self) -> None:
        """End everything with a sentence for the supervisor; without the store no other node can be told."""
        assert self._agent is not None
        sentence = f"host {self._agent.host} had no answer from the first node, {self._agent.rendezvous.address}, for "
        failure = Failure(host=self._agent.host, node_failure=f"{sentence}{HEARTBEAT_TIMEOUT_S:.0f} s")
        write_line(self._outcome, NodeOutcome([failure]).to_json())
        self._end_everything()

    def _end_everything(self) -> NoReturn:
        if self._agent is not None:
            self._agent.stop()
            self._agent.processes.end()
        os._exit(1)


def write_line(outcome: int, line: str) -> None:
    """Write a line to the supervisor; do nothing if it has ended."""
    with contextlib.suppress(BrokenPipeError):
        os.write(outcome, f"{line}\n".encode())


def main(argv: list[str]) -> NoReturn:
    """Run this node's part of the job, and end the process with its exit status."""
    lifeline, outcome, log_dir = int(argv[0]), int(argv[1]), argv[2]
    if QUIET in argv[3:]:
        del os.environ[CPP_LOG_VARIABLE]  # torch has read it at import; the ranks are not to inherit it
    os.set_inheritable(lifeline, False)
    os.set_inheritable(outcome, False)
    line = read_line(lifeline)
    if not line:
        os._exit(1)
    job = NodeJob.from_json(line)
    listener = SupervisorListener(lifeline, outcome)
    agent = None
    try:
        agent = NodeAgent(job, log_dir, outcome)
        listener.watch(agent)
        agent.run()
        result = agent.outcome()
    except Exception as error:  # the supervisor learns of the error only from the outcome
        sentence = f"the agent on host {host_name()} failed: {type(error).__name__}: {error}"
        record = FailureRecord("", traceback.format_exc() if not isinstance(error, NodeRendezvousError) else "")
        result = NodeOutcome([Failure(host=host_name(), node_failure=sentence, record=record)])
    write_line(outcome, result.to_json())
    if agent is not None:
        agent.leave()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_status(result.failures))
