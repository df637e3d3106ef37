"""Watchdog thread: end a job whose ranks wait for each other in vain, with a message that says why.

Each rank has one thread. It looks, a few times in `desync_timeout_s`, how long its process has waited for the others (a
clock that every wait for a collective starts: zerolite.comm.flight_recorder), and says in the rendezvous' store which
step it is in. The first rank that has waited too long asks a question there: every rank answers where its training
thread stands (position.py); the asker compares the answers (diagnosis.py) and sets the verdict; every rank prints it
and ends with status 76. A rank that does not answer is dead, or stuck where no Python thread runs.

A rank that finds out by itself that the ranks launched different collectives, or whose collective has timed out, asks
in the thread that trains, and raises the verdict instead. There is one question for all of that.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import re
import select
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from zerolite.comm import SharedStore, keep_track
from zerolite.comm.flight_recorder import WAIT, Mismatch
from zerolite.comm.ranks import name_ranks
from zerolite.diagnostics.diagnosis import Absent, diagnose
from zerolite.diagnostics.last_words import LastWords, describe_end, lost_peer
from zerolite.diagnostics.position import WATCHDOG, EngineView, Position, position_of
from zerolite.utils import failure_record
from zerolite.utils.finalizers import finalize_before_exit

if TYPE_CHECKING:
    from zerolite.zero.outcomes import StepCounters

logger = logging.getLogger("zerolite")

EXIT_STATUS = 76
"""Exit status of a process that its watchdog ends: EX_PROTOCOL of sysexits.h, a breach of the protocol."""

_LONGEST_PERIOD_S = 5.0
_LATE_S = 1.0  # how late the thread may come to a look because others have the processor
_ANSWER_S = 3.0  # beyond two periods: how long a rank's answer may take
_EXITED_S = 10.0  # how long to wait for ranks of which one has exited with status 0
_RAISE_S = 10.0  # how long a rank that was asked about a mismatch may take to find out by itself
_LEAVE_S = 3.0  # how long ranks wait for the others to have read the verdict
_FAREWELL_S = 2 * _LEAVE_S  # how long the process may take to print it and to leave with the others
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|remote process exited|"
    r"remote error|connection lost|no route to host",
    re.IGNORECASE,
)
_IN_VAIN = re.compile("timed out waiting", re.IGNORECASE)


class TimedOut(RuntimeError):
    """A collective has failed because the other ranks did not come within the process group's timeout."""


class Watchdog:
    """One per process and default process group; see the module. One process alone never waits, and only listens to
    SIGUSR1."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._rank, self._world_size = store.rank, store.world_size
        self._last_words = LastWords(store)
        self._timeout_s = 0.0
        self._engines: weakref.WeakValueDictionary[int, EngineView] = weakref.WeakValueDictionary()  # in this order
        self._watched = 0  # engines so far
        self._counters: dict[int, StepCounters] = {}  # theirs, for a thread that must never be the last to hold one
        self._steps = 0  # done, as far as this thread has seen
        self._beaten = 0  # what was said last: backwards so far
        self._question = 0  # verdicts that were raised, and after which the ranks went on to another initialize
        self._consulting = threading.RLock()
        self._verdict = ""  # about the question, the same on all ranks
        self._fatal = True  # ranks that have heard it end
        self._raised = False  # the thread that trains raises it, or has; what follows is a consequence
        self._ending = False  # the process is about to end with it
        self._closed = False
        self._alone = False  # the store does not answer any more
        self._process = os.getpid()
        self._trains: int | None = None  # the thread that has called initialize
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        self._signalled = _listen(self._woken)
        self._thread = threading.Thread(target=self._run, name=WATCHDOG, daemon=True)

    def start(self, timeout_s: float) -> None:
        """timeout_s: how long a rank may wait for the others, 0 for ever; of several engines that are alive, the
        shortest holds. Called on all ranks, when ``initialize`` begins."""
        with self._consulting:
            if self._raised:  # on every rank that is still there
                self._question, self._verdict, self._raised = self._question + 1, "", False
        self._trains = threading.get_ident()
        others = [self._timeout_s] if self._counters else []
        self._timeout_s = min((t for t in (timeout_s, *others) if t), default=0.0)
        WAIT.explain_with(self.explain)
        if self._thread.is_alive():
            self._nudge()
        else:
            self._thread.start()

    def watch(self, engine: EngineView) -> None:
        """Positions are those of ``engine`` from now on. Called when ``initialize`` has made it."""
        self._watched += 1
        self._engines[self._watched] = engine
        self._counters[id(engine)] = engine.parts.counters
        finalize_before_exit(engine, self._retire, id(engine))

    def _retire(self, engine: int) -> None:
        self._steps = max(self._steps, self._counters.pop(engine).global_steps)
        if not self._counters:
            WAIT.forget()

    @property
    def usable(self) -> bool:
        """True while it is open, and its process group is the default one."""
        return not self._closed and self._store.belongs_to_default_group()

    def close(self, how: str = "") -> None:
        """The process group is about to end, as ``how`` says, or else because of the exception that is on its way
        through a ``finally``, if there is one. Called in the main thread."""
        if self._closed or os.getpid() != self._process:
            return
        self._say_ended(how or describe_end(sys.exc_info()[1]))
        self._closed = True
        WAIT.forget()
        self._nudge()
        WAIT.explain_without(self.explain)
        if self._signalled and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # no handler came after this one
            faulthandler.unregister(signal.SIGUSR1)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * _LONGEST_PERIOD_S)
        if not self._thread.is_alive():
            self._store.close()

    def _say_ended(self, how: str) -> None:
        if self._store.alone or self._alone:
            return
        steps = max((engine.global_steps for engine in list(self._engines.values())), default=self._steps)
        with contextlib.suppress(RuntimeError, OSError):
            self._last_words.say(f"ended {how} after step {steps}")

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._woken, b"\0")

    # ---------------------------------------------------------------- the thread

    @property
    def _period(self) -> float | None:
        """Time between two looks of the thread, in seconds; None: only when it is woken."""
        if self._store.alone or not self._timeout_s:
            return None
        return min(_LONGEST_PERIOD_S, self._timeout_s / 10)

    @property
    def _answer_s(self) -> float:
        """Longest time that a rank's answer to a question may take, in seconds."""
        return 2 * (self._period or _LONGEST_PERIOD_S) + _ANSWER_S

    @property
    def _pause_s(self) -> float:
        """Pause between two looks of a rank at a key that all wait for: the store answers some 10 000 a second of
        all."""
        return min(0.02 + self._world_size / 4000, 1.0)

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._wake], [], [], self._period)
            if self._closed:
                break
            if ready:
                self._read_signal()
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
        for descriptor in (self._wake, self._woken):
            os.close(descriptor)

    def _look(self, waited: float) -> None:
        """Say what is to be said, and answer or ask the question. waited: in vain, in seconds."""
        self._beat()
        with self._consulting:  # no other question begins meanwhile
            asked = self._store.has(f"{self._question}/asker")
            cause = self._waits_in_vain(waited)
            if self._closed or not (asked or cause):
                return
            reason = f"zerolite: rank {self._rank} has waited {waited:.0f} s for the other ranks, {cause}."
            if self._raised:
                if waited > self._timeout_s:  # for ranks that went on, or have ended
                    self._end(f"{reason} Before that:\n\n{self._verdict}")
                return
            verdict = self._consult(reason, fatal=True)
        deadline = time.monotonic() + (0 if self._fatal else _RAISE_S)
        while not self._raised and time.monotonic() < deadline:
            time.sleep(0.05)
        if not self._raised:
            self._end(verdict)

    def _waits_in_vain(self, waited: float) -> str:
        """Half a sentence that says why waiting so long is in vain; "" where it may not be."""
        if waited > self._timeout_s:
            return f"longer than desync_timeout_s ({self._timeout_s:g} s), so the job is ended"
        # Every collective needs all ranks in initialize, and in engines without parallel dimensions besides data.
        if waited > _EXITED_S and all(engine.topology.trivial for engine in list(self._engines.values())):
            exited = self._store.exited()
            return f"of which {name_ranks(exited)} exited with status 0, so the job is ended" if exited else ""
        return ""

    def _beat(self) -> None:
        """One small write for each step at most."""
        counters = list(self._counters.values())
        self._steps = max((counter.global_steps for counter in counters), default=self._steps)
        beat = sum(counter.micro_steps for counter in counters)
        if beat != self._beaten:
            self._store.set(f"beat/{self._rank}", json.dumps([self._steps + 1, time.time()]))
            self._beaten = beat

    def _end_alone(self, waited: float) -> None:
        """End the process where no rank can be asked."""
        reason = (
            f"zerolite: rank {self._rank} has waited {waited:.0f} s for the other ranks, and the store of the "
            "rendezvous does not answer: the process that holds it (rank 0, or the launcher) has gone or is stuck."
        )
        self._end(diagnose(reason, [self._position()], {}))

    def _end(self, verdict: str) -> None:
        """The process, at once: its main thread may never wake."""
        self._ending = True
        if not verdict.startswith("zerolite"):
            verdict = f"zerolite: the ranks launched different collectives, so the job is ended.\n\n{verdict}"
        failure_record.write(verdict, "")
        farewell = threading.Thread(target=self._say_farewell, args=(verdict,), name=WATCHDOG, daemon=True)
        with contextlib.suppress(RuntimeError):  # where the interpreter is ending
            farewell.start()
            farewell.join(_FAREWELL_S)  # neither the store nor the terminal need answer
        os._exit(EXIT_STATUS)

    def _say_farewell(self, verdict: str) -> None:
        with contextlib.suppress(Exception):
            print(verdict, file=sys.stderr, flush=True)
            sys.stdout.flush()
        with contextlib.suppress(RuntimeError, OSError):
            self._leave_together()

    def _leave_together(self) -> None:
        """Wait until all have the verdict: the end of the first may take the store, or be the launcher's reason to end
        the others."""
        store, question = self._store, self._question
        if self._alone or not store.has(f"{question}/verdict"):
            return
        store.add(f"{question}/read", 1)
        answered, _ = json.loads(store.get(f"{question}/verdict"))
        deadline = time.monotonic() + _LEAVE_S
        while store.add(f"{question}/read", 0) < answered and time.monotonic() < deadline:
            time.sleep(self._pause_s)
        if self._rank == 0 and not store.held_by_launcher:
            time.sleep(0.3)  # the others are reading the counter in this process's store

    # ---------------------------------------------------------------- question and verdict

    def _consult(self, reason: str, fatal: bool) -> str:
        """Return the verdict. The first rank to ask begins it with its ``reason``, if there is one, and says whether it
        is ``fatal``: whether ranks that only answer are to end. Raises RuntimeError if the store is lost."""
        with self._consulting:
            if not self._verdict:
                store, question = self._store, self._question
                own = self._position()
                asker, self._fatal = json.loads(store.claim(f"{question}/asker", json.dumps([self._rank, fatal])))
                store.set(f"{question}/at/{self._rank}", own.to_json())
                if asker == self._rank:
                    store.set(f"{question}/verdict", json.dumps(self._judge(reason)))
                self._verdict = self._hear(own, reason)
            return self._verdict

    def _judge(self, reason: str) -> tuple[int, str]:
        """Return how many ranks have answered, and the verdict."""
        store = self._store
        answers = [f"{self._question}/at/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + self._answer_s
        while not store.has(*answers) and time.monotonic() < deadline:
            time.sleep(self._pause_s)
        there = [rank for rank, key in enumerate(answers) if store.has(key)]
        positions = [Position.from_json(store.get(answers[rank])) for rank in there]
        missing = [rank for rank in range(self._world_size) if rank not in there]
        ended = self._last_words.known() if missing else {}
        absent = {rank: Absent(ended.get(rank, ""), self._last_seen(rank)) for rank in missing}
        return len(there), diagnose(reason, positions, absent)

    def _hear(self, own: Position, reason: str) -> str:
        key, deadline = f"{self._question}/verdict", time.monotonic() + 2 * self._answer_s
        while not self._store.has(key):
            if time.monotonic() > deadline:
                gone = "zerolite: the rank that asked where the others stand has gone."
                return diagnose(f"{reason} {gone}".strip(), [own], {})
            time.sleep(self._pause_s)
        return str(json.loads(self._store.get(key))[1])

    def _last_seen(self, rank: int) -> str:
        if not self._store.has(f"beat/{rank}"):
            return ""
        step, when = json.loads(self._store.get(f"beat/{rank}"))
        return f"in step {step}, {max(0.0, time.time() - when):.0f} s ago"

    def _position(self) -> Position:
        """Return this rank's position. What cannot be told of it is left out, since the message must come."""
        try:
            return position_of(self._rank, dict(self._engines.items()), self._trains)
        except Exception as error:
            logger.debug("the position cannot be told in full", exc_info=error)
            return position_of(self._rank, {}, self._trains)

    # ---------------------------------------------------------------- errors of collectives

    def explain(self, error: RuntimeError) -> RuntimeError | None:
        """A better error than that of a collective which has failed in the thread that trains, or None."""
        if self._ending:
            time.sleep(2 * _LEAVE_S)  # the thread ends this process
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
                self._leave_together()
                return TimedOut(f"{verdict}\n\n({error})")
            if _LOST.search(str(error)):
                return lost_peer(error, self._rank, self._position().place(), self._last_words.awaited())
        except (RuntimeError, OSError) as failed:
            logger.debug("no diagnosis: %s", failed)
        return None

    # ---------------------------------------------------------------- SIGUSR1

    def _read_signal(self) -> None:
        """faulthandler has written all threads' stacks into the pipe: print them behind the position."""
        time.sleep(0.05)  # until it has written all
        text = os.read(self._wake, 1 << 20).decode(errors="replace").strip("\0")
        if not text or self._closed:
            return
        own = self._position()
        waits = f", waits for {own.waits_for} since {WAIT.seconds():.0f} s" if own.waits_for else ""
        print(
            f"zerolite: SIGUSR1: rank {self._rank} stands in {own.place()}{waits}\n{text}", file=sys.stderr, flush=True
        )


def _listen(pipe: int) -> bool:
    """Have SIGUSR1 write all stacks into ``pipe``, also while the main thread is in native code; False where other code
    else handles that signal."""
    handled = 0
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text().splitlines()
        caught = next(line for line in status if line.startswith("SigCgt"))
        handled = int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1
    if handled or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return False
    faulthandler.register(signal.SIGUSR1, file=pipe, all_threads=True)
    return True


# -------------------------------------------------------------------- the one of this process

_current: Watchdog | None = None
_starts = 0


def start_watchdog(timeout_s: float) -> Watchdog:
    """Return this process's watchdog, started. Called on all ranks by ``initialize``, in the same order."""
    global _current, _starts
    if _current is None or not _current.usable:
        if _current is not None:
            _current.close()
        _starts += 1
        _current = Watchdog(SharedStore(f"zerolite/watchdog/{_starts}"))
        keep_track(_current)
    _current.start(timeout_s)
    return _current


def _at_exit() -> None:
    if _current is not None:
        _current.close(describe_end(getattr(sys, "last_value", None)))


atexit.register(_at_exit)
