"""Watchdog thread: end a job whose ranks wait for each other in vain, with a message that says why.

Each rank has one such thread. A few times in `desync_timeout_s` it looks how long its process has waited for the
others, and writes its step into the rendezvous store. zerolite.comm.flight_recorder notes every wait. The first rank
that has waited too long asks a question through the store. Every rank answers with its stack report (stack_report.py).
The asker compares the answers (diagnosis.py) and writes the verdict; every rank prints it and ends with status 76. A
rank that does not answer is dead, or stuck in native code.

A rank may find out by itself: its collective has timed out, or differs from that of the others. Then the training
thread asks the same question and raises the verdict. There is one question for all of these cases.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from typing import TYPE_CHECKING

from zerolite.comm import SharedStore, collective, keep_track
from zerolite.comm.flight_recorder import EVENTS, WAIT, CollectiveFailed, Mismatch, nothing_to_say
from zerolite.diagnostics.diagnosis import EXITED, Absent, PeerLost, diagnose, lost_peer
from zerolite.diagnostics.stack_report import WATCHDOG_THREAD, StackReport, make_stack_report
from zerolite.utils import failure_record
from zerolite.utils.module_hook import finalize_before_exit
from zerolite.utils.text import name_ranks

if TYPE_CHECKING:
    from zerolite.zero.engine_parts import EngineParts

logger = logging.getLogger("zerolite")

EXIT_STATUS = 76
"""Exit status of a process that its watchdog ends: EX_PROTOCOL of sysexits.h, a breach of the protocol."""

_LONGEST_PERIOD_S = 5.0
_LATE_S = 1.0  # delay of a look that is still normal on a busy processor
_ANSWER_S = 3.0  # beyond two periods: how long a rank's answer may take
_EXITED_S = 10.0  # how long to wait after a rank has exited with status 0
_RAISE_S = 10.0  # how long the training thread may take to notice a mismatch by itself
_LEAVE_S = 3.0  # how long ranks wait for the others to have read the verdict
_FAREWELL_S = 2 * _LEAVE_S  # how long the process may take to print it and to leave with the others
_QUOTED = 300  # characters of an exception in an exit message
_READ = 64  # exit messages that are read, in the order in which ranks ended: later ones are consequences of the first
_PATIENCE_S = 1.5  # how long a rank that has lost another waits for its exit message
# Texts of gloo, NCCL and torch's stores: they raise RuntimeError with nothing but a text to tell the cases apart.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|remote process exited|"
    r"remote error|connection lost|no route to host",
    re.IGNORECASE,
)
_IN_VAIN = re.compile("timed out waiting", re.IGNORECASE)


class Watchdog:
    """The watchdog of one process and its default process group; see the module.

    In a job of one process, which never waits, it has no thread.
    """

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._rank, self._world_size = store.rank, store.world_size
        self._timeout_s = 0.0
        self._engines: dict[int, EngineParts] = {}  # parts of living engines, in this order
        self._watched = 0  # engines so far
        # Counters of the engines, for the heartbeat. If this thread held the last reference to an engine, the engine
        # would be freed here and not in the thread that trains.
        self._steps = 0  # steps done, when this thread last looked
        self._beaten = 0  # backwards so far, at the last heartbeat
        self._question = 0  # number of the question: one more after each verdict that the user's code has survived
        self._consulting = threading.RLock()
        self._verdict = ""  # about the question, the same on all ranks
        self._fatal = True  # the verdict ends the ranks that read it
        self._raised = False  # the training thread raises the verdict, or has: later errors are consequences
        self._ending = False  # the process is about to end with the verdict
        self._closed = False
        self._alone = False  # the store does not answer any more
        self._process = os.getpid()
        self._trains: int | None = None  # identifies the thread that has called initialize
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=WATCHDOG_THREAD, daemon=True)

    @collective
    def start(self, timeout_s: float) -> None:
        """Start to watch, or change the timeout. Called when ``initialize`` begins.

        Args:
            timeout_s: time that a rank may wait for the others, 0 for ever. The shortest of all living engines is used.
        """
        with self._consulting:
            if self._raised:  # all ranks have raised the verdict and come by, so all begin a new question
                self._question, self._verdict, self._raised = self._question + 1, "", False
        self._trains = threading.get_ident()
        others = [self._timeout_s] if self._engines else []
        self._timeout_s = min((t for t in (timeout_s, *others) if t), default=0.0)
        EVENTS.clear()
        WAIT.explain = self.explain
        self._woken.set()
        if self._period is not None and not self._thread.is_alive():
            self._thread.start()

    def watch(self, engine: object, parts: EngineParts) -> None:
        """Watch ``engine``, which ``initialize`` has just made: reports are about its ``parts`` from now on."""
        self._watched += 1
        self._engines[self._watched] = parts
        finalize_before_exit(engine, self._retire, self._watched)

    def _retire(self, number: int) -> None:
        self._steps = max(self._steps, self._engines.pop(number).pipeline.state.global_steps)
        if not self._engines:
            WAIT.forget()

    @property
    def usable(self) -> bool:
        """True while the watchdog is open and its process group is the default one."""
        return not self._closed and self._store.belongs_to_default_group()

    def close(self, how: str = "") -> None:
        """End, because the process group is about to end. Called in the main thread.

        Args:
            how: how the process ends; default: by the exception that is being handled, if there is one, else normally.
        """
        if self._closed or os.getpid() != self._process:  # a forked worker has a copy of this object
            return
        self._leave_exit_message(how or _describe_end(sys.exc_info()[1]))
        self._closed = True
        WAIT.forget()
        self._woken.set()
        if WAIT.explain == self.explain:  # no later watchdog explains
            WAIT.explain = nothing_to_say
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * _LONGEST_PERIOD_S)
        if not self._thread.is_alive():
            self._store.close()

    def _leave_exit_message(self, how: str) -> None:
        if self._store.alone or self._alone:
            return
        engines = list(self._engines.values())
        steps = max((parts.pipeline.state.global_steps for parts in engines), default=self._steps)
        with contextlib.suppress(RuntimeError, OSError):
            # The counter gives every message its own key, so two ranks may end at once.
            key = f"endings/{self._store.add('endings', 1)}"
            self._store.set(key, json.dumps([self._rank, f"ended {how} after step {steps}"]))

    def _ended_ranks(self) -> dict[int, str]:
        """Return how the first ranks have ended, by rank, as far as it is known now: by their messages, or else by the
        launcher."""
        store = self._store
        keys = [f"endings/{number}" for number in range(1, min(store.add("endings", 0), _READ) + 1)]
        messages = [json.loads(store.get(key)) for key in keys if store.has(key)]
        return {**dict.fromkeys(store.exited(), EXITED), **dict(messages)}

    def _await_ended_ranks(self) -> dict[int, str]:
        """Wait shortly for a message after a connection has broken: it breaks before the rank, or its launcher, can
        have written the message."""
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(RuntimeError):  # the process that hosts the store may be the one that has gone
            while not (ended := self._ended_ranks()) and time.monotonic() < deadline:
                time.sleep(0.05)
            return ended
        return {}

    # ---------------------------------------------------------------- the thread

    @property
    def _period(self) -> float | None:
        """Time between two looks of the thread, in seconds; None if there is nothing to look at."""
        if self._store.alone or not self._timeout_s:
            return None
        return min(_LONGEST_PERIOD_S, self._timeout_s / 10)

    @property
    def _answer_s(self) -> float:
        """Longest time that a rank's answer to a question may take, in seconds: it looks once in a period."""
        return 2 * (self._period or _LONGEST_PERIOD_S) + _ANSWER_S

    @property
    def _pause_s(self) -> float:
        """Pause between two looks at a key for which all ranks wait, in seconds.

        It grows with the number of ranks: the store answers about 10,000 requests a second, from all ranks together.
        """
        return min(0.02 + self._world_size / 4000, 1.0)

    def _run(self) -> None:
        while True:
            self._woken.wait(self._period)
            self._woken.clear()
            if self._closed:
                return
            if self._period is None:
                continue
            try:
                waited = WAIT.look(2 * self._period + _LATE_S)
                if not self._alone:
                    self._look(waited)
                elif waited > self._timeout_s:
                    self._end_alone(waited)
            except Exception as error:  # the store has gone, or its host is cut off
                logger.debug("the ranks cannot be asked any more", exc_info=error)
                self._alone = True

    def _look(self, waited: float) -> None:
        """Send a heartbeat, and answer or ask the question.

        Args:
            waited: seconds since this process began to wait for other ranks.
        """
        self._beat()
        with self._consulting:  # the training thread must not ask meanwhile
            asked = self._store.has(f"{self._question}/asker")
            cause = self._waits_in_vain(waited)
            if self._closed or not (asked or cause):
                return
            reason = f"zerolite: rank {self._rank} has waited {waited:.0f} s for the other ranks, {cause}."
            if self._raised:
                if waited > self._timeout_s:  # the user's code caught the error and waits again, for ranks that ended
                    self._end(f"{reason} Before that:\n\n{self._verdict}")
                return
            verdict = self._consult(reason, fatal=True)
        # After a mismatch every rank raises the verdict in its training thread, which gives a better traceback. If the
        # training thread raises nothing in time, this thread ends the process.
        deadline = time.monotonic() + (0 if self._fatal else _RAISE_S)
        while not self._raised and time.monotonic() < deadline:
            time.sleep(0.05)
        if not self._raised:
            self._end(verdict)

    def _waits_in_vain(self, waited: float) -> str:
        """Return why it is in vain to wait any longer, as half a sentence; "" if it may still be worth it."""
        if waited > self._timeout_s:
            return f"longer than desync_timeout_s ({self._timeout_s:g} s), so the job is ended"
        # In initialize, and with data parallelism alone, every collective needs all ranks. If one has exited, no
        # collective can end any more, and there is no need to wait for the timeout.
        if waited > _EXITED_S and all(parts.topology.trivial for parts in list(self._engines.values())):
            exited = self._store.exited()
            return f"of which {name_ranks(exited)} exited with status 0, so the job is ended" if exited else ""
        return ""

    def _beat(self) -> None:
        """Write the step into the store, at most once in each backward, so that others can say when this rank was last
        seen."""
        counters = [parts.pipeline.state.counters for parts in list(self._engines.values())]
        self._steps = max((counter.global_steps for counter in counters), default=self._steps)
        beat = sum(counter.micro_steps for counter in counters)
        if beat != self._beaten:
            self._store.set(f"beat/{self._rank}", json.dumps([self._steps + 1, time.time()]))
            self._beaten = beat

    def _end_alone(self, waited: float) -> None:
        """End the process if no rank can be asked."""
        reason = (
            f"zerolite: rank {self._rank} has waited {waited:.0f} s for the other ranks, and the store of the "
            "rendezvous does not answer: the process that holds it (rank 0, or the launcher) has gone or is stuck."
        )
        self._end(diagnose(reason, [self._report()], {}))

    def _end(self, verdict: str) -> None:
        """Print the verdict and end the process at once, without Python's clean-up: its main thread may never
        return."""
        self._ending = True
        if not verdict.startswith("zerolite"):
            verdict = f"zerolite: the ranks launched different collectives, so the job is ended.\n\n{verdict}"
        failure_record.write(verdict, "")
        farewell = threading.Thread(target=self._print_verdict, args=(verdict,), name=WATCHDOG_THREAD, daemon=True)
        with contextlib.suppress(RuntimeError):  # where the interpreter is ending
            farewell.start()
            # In a thread with a limit: neither the store nor the terminal has to answer, and the process must end.
            farewell.join(_FAREWELL_S)
        os._exit(EXIT_STATUS)

    def _print_verdict(self, verdict: str) -> None:
        with contextlib.suppress(Exception):
            print(verdict, file=sys.stderr, flush=True)
            sys.stdout.flush()
        with contextlib.suppress(RuntimeError, OSError):
            self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Wait until all ranks have read the verdict, but not for long.

        If the first rank to end hosts the store, the others cannot read it any more. And its end makes the launcher end
        them.
        """
        store, question = self._store, self._question
        if self._alone or not store.has(f"{question}/verdict"):
            return
        store.add(f"{question}/read", 1)
        answered, _ = json.loads(store.get(f"{question}/verdict"))
        deadline = time.monotonic() + _LEAVE_S
        while store.add(f"{question}/read", 0) < answered and time.monotonic() < deadline:
            time.sleep(self._pause_s)
        if self._rank == 0 and not store.held_by_launcher:
            time.sleep(0.3)  # the others may be reading the counter, whose store this process hosts

    # ---------------------------------------------------------------- question and verdict

    def _consult(self, reason: str, fatal: bool) -> str:
        """Return the verdict, after asking or answering the question. Raises RuntimeError if the store is lost.

        Args:
            reason: first sentence of the verdict, if this rank is the first to ask.
            fatal: ranks that only answer end with the verdict; used if this rank is the first to ask.
        """
        with self._consulting:
            if not self._verdict:
                store, question = self._store, self._question
                report = self._report()
                # The first rank to claim this key asks; all others read its claim.
                asker, self._fatal = json.loads(store.claim(f"{question}/asker", json.dumps([self._rank, fatal])))
                store.set(f"{question}/at/{self._rank}", report.to_json())
                if asker == self._rank:
                    store.set(f"{question}/verdict", json.dumps(self._diagnose(reason)))
                self._verdict = self._await_verdict(report, reason)
            return self._verdict

    def _diagnose(self, reason: str) -> tuple[int, str]:
        """Collect the reports of all ranks. Returns the number of ranks that have answered, and the verdict."""
        store = self._store
        answers = [f"{self._question}/at/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + self._answer_s
        while not store.has(*answers) and time.monotonic() < deadline:
            time.sleep(self._pause_s)
        answered = [rank for rank, key in enumerate(answers) if store.has(key)]
        reports = [StackReport.from_json(store.get(answers[rank])) for rank in answered]
        missing = [rank for rank in range(self._world_size) if rank not in answered]
        ended = self._ended_ranks() if missing else {}
        absent = {rank: Absent(ended.get(rank, ""), self._last_seen(rank)) for rank in missing}
        return len(answered), diagnose(reason, reports, absent)

    def _await_verdict(self, report: StackReport, reason: str) -> str:
        """Wait for the verdict of the rank that asked; if that rank has gone, diagnose from this rank's own report."""
        key, deadline = f"{self._question}/verdict", time.monotonic() + 2 * self._answer_s
        while not self._store.has(key):
            if time.monotonic() > deadline:
                gone = "zerolite: the rank that asked for the reports has gone."
                return diagnose(f"{reason} {gone}".strip(), [report], {})
            time.sleep(self._pause_s)
        return str(json.loads(self._store.get(key))[1])

    def _last_seen(self, rank: int) -> str:
        if not self._store.has(f"beat/{rank}"):
            return ""
        step, when = json.loads(self._store.get(f"beat/{rank}"))
        return f"in step {step}, {max(0.0, time.time() - when):.0f} s ago"

    def _report(self) -> StackReport:
        """Return this rank's report. If part of it cannot be read, that part is left out, because the message must
        come."""
        try:
            return make_stack_report(self._rank, dict(self._engines), self._trains)
        except Exception as error:
            logger.debug("the stack report is incomplete", exc_info=error)
            return make_stack_report(self._rank, {}, self._trains)

    # ---------------------------------------------------------------- errors of collectives

    def explain(self, error: RuntimeError) -> RuntimeError | None:
        """Return a better error for a collective that has failed in the training thread, or None."""
        if self._ending:
            # The watchdog's thread is ending this process: do not let the training thread print another error first.
            time.sleep(2 * _LEAVE_S)
        if self._store.alone or self._closed or not self._timeout_s:
            return None
        differs, in_vain = isinstance(error, Mismatch), _IN_VAIN.search(str(error))
        try:
            if (differs or in_vain) and not self._raised:
                self._raised = True
                if differs:
                    return Mismatch(f"{error}\n\n{self._consult('', fatal=False)}")
                reason = (
                    f"zerolite: rank {self._rank} has waited for the other ranks until the process group's timeout, "
                    f"which is shorter than desync_timeout_s ({self._timeout_s:g} s), so the job is ended."
                )
                verdict = self._consult(reason, fatal=True)
                self._wait_for_readers()
                return CollectiveFailed(f"{verdict}\n\n({error})")
            if _LOST.search(str(error)):
                return lost_peer(error, self._rank, self._report().summary(), self._await_ended_ranks())
        except (RuntimeError, OSError) as failed:
            logger.debug("no diagnosis: %s", failed)
        return None


def _describe_end(error: BaseException | None) -> str:
    """Describe how a process ends, from the exception that ends it, or None."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "normally"
    if isinstance(error, PeerLost):
        return "because it had lost another rank"
    first = str(error).partition("\n")[0][:_QUOTED]
    return f"with {type(error).__name__}: {first}"


# -------------------------------------------------------------------- the watchdog of this process

_current: Watchdog | None = None
_starts = 0


def start_watchdog(timeout_s: float) -> Watchdog:
    """Return this process's watchdog, started. ``initialize`` calls this on all ranks, in the same order."""
    global _current, _starts
    if _current is None or not _current.usable:
        if _current is not None:
            _current.close()
        # Ranks start their watchdogs equally often, so this number gives all of them the same fresh keys in the store.
        _starts += 1
        _current = Watchdog(SharedStore(f"zerolite/watchdog/{_starts}"))
        keep_track(_current)
    _current.start(timeout_s)
    return _current


def _at_exit() -> None:
    if _current is not None:
        _current.close(_describe_end(getattr(sys, "last_value", None)))


atexit.register(_at_exit)
