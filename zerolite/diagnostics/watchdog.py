"""Watchdog thread: end a job whose ranks wait for each other in vain, with a message that says why.

Each rank's thread looks, a few times in `desync_timeout_s`, how long its process has waited for the others (a clock
that every wait for a collective starts: zerolite.comm.flight), and says in the rendezvous' store which step it is in.
The first rank that has waited too long asks: every rank's thread puts down where its main thread stands
(position.py); the asker compares (diagnosis.py) and puts down the verdict; every rank prints it and ends with status
76. A rank that does not answer is dead, or stuck where no Python thread runs.

Ranks that find out by themselves that they launched different collectives ask at once, and raise the verdict instead.
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
from zerolite.comm.flight import WAIT, Mismatch
from zerolite.comm.ranks import name_ranks
from zerolite.diagnostics.diagnosis import Absent, diagnose
from zerolite.diagnostics.position import WATCHDOG, EngineView, Position, position_of
from zerolite.utils import failure_record

if TYPE_CHECKING:
    from zerolite.zero.step_outcome import StepCounters

logger = logging.getLogger("zerolite")

EXIT_STATUS = 76
"""Of a process that its watchdog ends (EX_PROTOCOL of sysexits.h: the other side did not keep to the protocol)."""

_LONGEST_PERIOD_S = 5.0
_LATE_S = 1.0  # how late the thread may come to a look because others have the processor
_ANSWER_S = 3.0  # beyond two periods: how long a rank's answer may take
_EXITED = "exited with status 0"
_EXITED_S = 10.0  # how long to wait for ranks of which one has exited with status 0
_RAISE_S = 10.0  # how long a rank that was asked about a mismatch may take to find out by itself
_SILENT_S = 30.0  # how long the store may take to answer
_LEAVE_S = 3.0  # how long ranks wait for the others to have read the verdict
_FAREWELL_S = 2 * _LEAVE_S  # how long the process may take to print it and to leave with the others
_QUOTED = 300  # characters of an exception in the last words
_ENDINGS = 8  # ranks whose last words are read: what has ended later is a consequence
_NOTE_S = 1.5  # how long a rank that has lost another waits for that one's last words
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|remote process exited|"
    r"remote error|connection lost|no route to host",
    re.IGNORECASE,
)
_IN_VAIN = re.compile("timed out waiting", re.IGNORECASE)


class TimedOut(RuntimeError):
    """A collective has failed because the other ranks did not come within the process group's timeout."""


class PeerLost(RuntimeError):
    """A collective has failed because another process has gone."""


class Watchdog:
    """One per process and default process group; see the module. One process alone never waits, and only listens to
    SIGUSR1."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._rank, self._world_size = store.rank, store.world_size
        self._timeout_s = 0.0
        self._engines: weakref.WeakValueDictionary[int, EngineView] = weakref.WeakValueDictionary()  # in this order
        self._watched = 0  # engines so far
        self._counters: dict[int, StepCounters] = {}  # theirs, for a thread that must never be the last to hold one
        self._epoch = 0  # questions so far
        self._consulting = threading.Lock()
        self._heard = ""  # a verdict that the thread has got, and that the main thread may raise
        self._raising = False  # the main thread raises the verdict
        self._told = False  # it has raised one since initialize; what follows in its clean-up is a consequence
        self._ending = False  # the process is about to end with the verdict
        self._beaten = 0  # what was said last: backwards so far
        self._closed = False
        self._alone = False  # the process that held the store has gone
        self._steps = 0  # done, as far as this thread has seen
        self._looked = time.monotonic()  # when the thread was last done with the store
        self._process = os.getpid()
        self._local_ranks = _local_ranks()
        self._trains: int | None = None  # the thread that has called initialize
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        self._signalled = _listen(self._woken)
        self._thread = threading.Thread(target=self._run, name=WATCHDOG, daemon=True)
        self._guard = threading.Thread(target=self._watch_the_thread, name=WATCHDOG, daemon=True)
        self._stop = threading.Event()

    def start(self, timeout_s: float) -> None:
        """timeout_s: how long a rank may wait for the others, 0 for ever; of several engines that are alive, the
        shortest holds. Called on all ranks, when ``initialize`` begins."""
        self._told = False
        self._trains = threading.get_ident()
        others = [self._timeout_s] if self._counters else []
        self._timeout_s = min((t for t in (timeout_s, *others) if t), default=0.0)
        WAIT.explain = self.explain
        if self._thread.is_alive():
            self._nudge()
            return
        if self._local_ranks[1]:
            self._store.set(f"process/{self._rank}", json.dumps([self._process, _pid_namespace()]))
        self._thread.start()
        if not self._store.alone:
            self._guard.start()

    def watch(self, engine: EngineView) -> None:
        """Positions are those of ``engine`` from now on. Called when ``initialize`` has made it."""
        self._watched += 1
        self._engines[self._watched] = engine
        self._counters[id(engine)] = engine.parts.counters
        weakref.finalize(engine, self._retire, id(engine)).atexit = False

    def _retire(self, engine: int) -> None:
        self._steps = max(self._steps, self._counters.pop(engine).global_steps)
        if not self._counters:
            WAIT.forget()

    @property
    def usable(self) -> bool:
        """Whether it is open, and its process group is the default one."""
        return not self._closed and self._store.belongs_to_default_group()

    def close(self, how: str = "") -> None:
        """The process group is about to end: in good order, as ``how`` says, or because of the exception that is on its
        way through a ``finally``. Called in the main thread."""
        if self._closed or os.getpid() != self._process:
            return
        self._say_ended(how or _how(sys.exc_info()[1]))
        self._closed = True
        WAIT.forget()
        self._stop.set()
        self._nudge()
        if WAIT.explain == self.explain:
            WAIT.explain = lambda error: None
        if self._signalled and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # no handler came after this one
            faulthandler.unregister(signal.SIGUSR1)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * _LONGEST_PERIOD_S)
        if not self._thread.is_alive():
            self._store.close()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._woken, b"\0")

    # ---------------------------------------------------------------- the thread

    @property
    def _period(self) -> float | None:
        """How often the thread looks, in seconds; None: only when it is woken."""
        if self._store.alone or not self._timeout_s:
            return None
        return min(_LONGEST_PERIOD_S, self._timeout_s / 10)

    @property
    def _pause_s(self) -> float:
        """Between two looks of a rank at a key that all wait for: the store answers some 10 000 a second of all."""
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
            if self._alone:
                self._look_alone()
                continue
            try:
                self._look()
            except Exception as error:  # the store has gone, for the most part
                logger.debug("the ranks cannot be asked any more", exc_info=error)
                self._alone = True
            self._looked = time.monotonic()
        for descriptor in (self._wake, self._woken):
            os.close(descriptor)

    def _watch_the_thread(self) -> None:
        """Ends the process if the thread cannot: a store on a host that is cut off does not answer for many minutes."""
        while not self._stop.wait(self._period or _LONGEST_PERIOD_S):
            if self._period and time.monotonic() - self._looked > _SILENT_S + self._period and not self._ending:
                self._look_alone()

    def _look(self) -> None:
        self._beat()
        waited, epoch = self._waited(), self._epoch
        too_long = waited > self._timeout_s
        exited = self._exited_members() if waited > _EXITED_S and not too_long else []
        asked = self._store.add(f"{epoch}/asked", 0)
        if not (asked or too_long or exited) or self._closed:
            return
        longer = f"longer than desync_timeout_s ({self._timeout_s:g} s)"
        reason = (
            f"zerolite: rank {self._rank} has waited {waited:.0f} s for the other ranks, "
            f"{f'of which {name_ranks(exited)} exited with status 0' if exited else longer}, so the job is ended."
        )
        fatal = json.loads(self._store.get(f"{epoch}/fatal")) if asked else True
        verdict = self._consult(reason, True, epoch)
        if verdict is None:
            return
        deadline = time.monotonic() + (0 if fatal else _RAISE_S)
        while not self._raising and time.monotonic() < deadline:
            time.sleep(0.05)
        if not self._raising:
            self._end(verdict)
        self._raising, self._heard = False, ""

    def _exited_members(self) -> list[int]:
        """The ranks that have exited with status 0, if every collective needs all ranks: in initialize, and in engines
        without parallel dimensions besides data."""
        trivial = all(engine.topology.trivial for engine in list(self._engines.values()))
        return self._store.exited() if trivial else []

    def _waited(self) -> float:
        return WAIT.look(2 * (self._period or 0.0) + _LATE_S)

    def _beat(self) -> None:
        """One small write for each step at most."""
        counters = list(self._counters.values())
        self._steps = max((counter.global_steps for counter in counters), default=self._steps)
        beat = sum(counter.micro_steps for counter in counters)
        if beat != self._beaten:
            self._store.set(f"beat/{self._rank}", json.dumps([self._steps + 1, time.time()]))
            self._beaten = beat

    def _look_alone(self) -> None:
        """Nobody can be asked any more."""
        if not self._closed and self._waited() > self._timeout_s:
            own = self._position()
            reason = (
                f"zerolite: rank {self._rank} has waited {own.waits_s:.0f} s for the other ranks, and the store of the "
                "rendezvous does not answer: the process that holds it (rank 0, or the launcher) has gone or is stuck."
            )
            self._end(diagnose(reason, [own], {}))

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
        """Whoever ends first may take the store, or be the launcher's reason to end the others."""
        store, question = self._store, self._epoch - 1
        if question < 0 or not store.has(f"{question}/answered"):
            return
        store.add(f"{question}/read", 1)
        answered = json.loads(store.get(f"{question}/answered"))
        deadline = time.monotonic() + _LEAVE_S
        while store.add(f"{question}/read", 0) < answered and time.monotonic() < deadline:
            time.sleep(self._pause_s)
        if self._rank == 0 and not store.held_by_launcher:
            time.sleep(0.3)  # the others are reading the counter in this process's store

    # ---------------------------------------------------------------- question and verdict

    def _consult(self, reason: str, fatal: bool, seen: int | None = None) -> str | None:
        """Ask all ranks where they stand, or answer the question that is open. Gives the verdict, the same on all
        ranks, which begins with the asker's ``reason``, if there is one. ``fatal``: whether those that answer are to
        end. ``seen``: the question that the thread has seen; None if the main thread has answered it meanwhile."""
        with self._consulting:
            if seen is None and self._heard:
                return self._heard
            if seen not in (None, self._epoch):
                return None
            epoch, self._epoch = self._epoch, self._epoch + 1
            own = self._position()
            first = self._store.add(f"{epoch}/asked", 1) == 1
            if first:
                self._store.set(f"{epoch}/fatal", json.dumps(fatal))
            self._store.set(f"{epoch}/at/{self._rank}", own.to_json())
            verdict = self._judge(epoch, reason) if first else self._await_verdict(epoch, own, reason)
            self._heard = verdict if seen is not None else ""
            return verdict

    def _judge(self, epoch: int, reason: str) -> str:
        store = self._store
        missing = list(range(self._world_size))
        deadline = time.monotonic() + 2 * (self._period or _LONGEST_PERIOD_S) + _ANSWER_S
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not store.has(f"{epoch}/at/{rank}")]
            time.sleep(0.02 if missing else 0)
        there = [rank for rank in range(self._world_size) if rank not in missing]
        positions = [Position.from_json(store.get(f"{epoch}/at/{rank}")) for rank in there]
        verdict = diagnose(reason, positions, {rank: self._last_of(rank) for rank in missing})
        store.set(f"{epoch}/answered", json.dumps(len(there)))
        store.set(f"{epoch}/verdict", verdict)
        return verdict

    def _await_verdict(self, epoch: int, own: Position, reason: str) -> str:
        store = self._store
        deadline = time.monotonic() + 2 * (2 * (self._period or _LONGEST_PERIOD_S) + _ANSWER_S)
        while not store.has(f"{epoch}/verdict"):
            if time.monotonic() > deadline:
                gone = "zerolite: the rank that asked where the others stand has gone."
                return diagnose(f"{reason} {gone}".strip(), [own], {})
            time.sleep(self._pause_s)
        return store.get(f"{epoch}/verdict")

    def _last_of(self, rank: int) -> Absent:
        store = self._store
        ended = store.get(f"ended/{rank}") if store.has(f"ended/{rank}") else ""
        if not ended:
            ended = _EXITED if rank in store.exited() else self._under_torchrun(rank)
        last = ""
        if store.has(f"beat/{rank}"):
            step, when = json.loads(store.get(f"beat/{rank}"))
            last = f"in step {step}, {max(0.0, time.time() - when):.0f} s ago"
        return Absent(ended, last)

    def _under_torchrun(self, rank: int) -> str:
        """How a rank has ended whose process, a child of the torchrun that runs this one, is gone. torchrun says
        nothing of it, but ends the job within a second after any status other than 0."""
        first, count = self._local_ranks
        if not first <= rank < first + count or not self._store.has(f"process/{rank}"):
            return ""
        process, namespace = json.loads(self._store.get(f"process/{rank}"))
        with contextlib.suppress(OSError):
            if namespace == _pid_namespace():
                os.kill(process, 0)
            return ""
        return f"{_EXITED} (process {process} is gone, and torchrun ends the job after any other status)"

    # ---------------------------------------------------------------- errors of collectives

    def explain(self, error: RuntimeError) -> RuntimeError | None:
        """A better error than that of a collective which has failed in the main thread, or None."""
        if self._ending:
            time.sleep(2 * _LEAVE_S)  # the thread ends this process
        if self._store.alone or self._closed or not self._timeout_s:
            return None
        try:
            if isinstance(error, Mismatch):
                if self._told:
                    return None
                self._raising = self._told = True
                verdict = self._consult("", fatal=False)
                self._raising = bool(self._heard)  # then the thread waits for it
                return Mismatch(f"{error}\n\n{verdict}")
            if _IN_VAIN.search(str(error)):
                reason = (
                    f"zerolite: rank {self._rank} has waited for the other ranks until the process group's timeout, "
                    f"which is shorter than desync_timeout_s ({self._timeout_s:g} s), so the job is ended."
                )
                return TimedOut(f"{self._consult(reason, fatal=True)}\n\n({error})")
            if _LOST.search(str(error)):
                return PeerLost(self._without_peer(error))
        except (RuntimeError, OSError) as failed:
            self._raising = False
            logger.debug("no diagnosis: %s", failed)
        return None

    def _last_words(self) -> dict[int, Absent]:
        """Of ranks that have ended, as soon as there is one."""
        store = self._store
        deadline = time.monotonic() + _NOTE_S
        ended: dict[int, Absent] = {}
        with contextlib.suppress(RuntimeError):  # the process that held the store has gone
            while not ended and time.monotonic() < deadline:
                numbers = range(1, min(store.add("endings", 0), _ENDINGS) + 1)  # all ranks ask for them at once
                ranks = [int(store.get(f"endings/{n}")) for n in numbers if store.has(f"endings/{n}")]
                ranks = [rank for rank in ranks if store.has(f"ended/{rank}")] or store.exited()
                ended = {rank: self._last_of(rank) for rank in ranks}
                time.sleep(0 if ended else 0.05)
            if not ended:
                first, count = self._local_ranks
                said = {rank: self._under_torchrun(rank) for rank in range(first, first + count)}
                ended = {rank: Absent(text) for rank, text in said.items() if text}
        return ended

    def _without_peer(self, error: RuntimeError) -> str:
        own = self._position()
        ended = self._last_words()
        said = "; ".join(f"{name_ranks([rank])} {known.ended}" for rank, known in ended.items())
        advice = "its process died: see its output, and the last lines of the launcher"
        if not ended:
            advice += (
                "; if it was aborted by gloo for the size of a message, the ranks launched different collectives here, "
                'and "check_collectives": true names them'
            )
        elif all("normally" in known.ended for known in ended.values()):
            advice = (
                f"uneven batches? {name_ranks(list(ended))} left while this rank still had work; put the loop in `with "
                "engine.join():`, or give all ranks as many batches. (It may also have called sys.exit: see its output)"
            )
        elif all(known.ended.startswith(_EXITED) for known in ended.values()):
            advice = (
                f"the others still needed {name_ranks(list(ended))}, which left without Python's clean-up: it has "
                "called os._exit, or a library has. See its output, and let all ranks end their loops alike"
            )
        return (
            f"rank {self._rank} has lost another rank, in {own.place()}: {said or 'it said nothing before it went'}. "
            f"{advice[0].upper()}{advice[1:]}. ({error})"
        )

    def _say_ended(self, how: str) -> None:
        """Last words, for those who still wait."""
        if self._store.alone or self._alone:
            return
        steps = max((engine.global_steps for engine in list(self._engines.values())), default=self._steps)
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"ended/{self._rank}", f"ended {how or 'normally'} after step {steps}")
            self._store.set(f"endings/{self._store.add('endings', 1)}", str(self._rank))

    def _position(self) -> Position:
        """This rank's; what cannot be told of it is left out, since the message must come."""
        try:
            return position_of(self._rank, dict(self._engines.items()), self._trains)
        except Exception as error:
            logger.debug("the position cannot be told in full", exc_info=error)
            return position_of(self._rank, {}, self._trains)

    # ---------------------------------------------------------------- SIGUSR1

    def _read_signal(self) -> None:
        """faulthandler has written all threads' stacks into the pipe: print them behind the position."""
        time.sleep(0.05)  # until it has written all
        text = os.read(self._wake, 1 << 20).decode(errors="replace").strip("\0")
        if not text or self._closed:
            return
        own = self._position()
        waits = f", waits for {own.waits_for} since {own.waits_s:.0f} s" if own.waits_for else ""
        print(
            f"zerolite: SIGUSR1: rank {self._rank} stands in {own.place()}{waits}\n{text}", file=sys.stderr, flush=True
        )


def _local_ranks() -> tuple[int, int]:
    """The first of the ranks that torchrun has started on this host, and how many they are; 0, 0 without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 0
    numbers = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(number.isdecimal() for number in numbers):
        return 0, 0
    rank, local_rank, count = map(int, numbers)
    return rank - local_rank, count


def _pid_namespace() -> str:
    """Where numbers of processes mean the same; containers have their own."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _listen(pipe: int) -> bool:
    """Have SIGUSR1 write all stacks into ``pipe``, also while the main thread is in native code; False where somebody
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
    """This process's. Called on all ranks by ``initialize``, in the same order."""
    global _current, _starts
    if _current is None or not _current.usable:
        if _current is not None:
            _current.close()
        _starts += 1
        _current = Watchdog(SharedStore(f"zerolite/watchdog/{_starts}"))
        keep_track(_current)
    _current.start(timeout_s)
    return _current


def _how(error: BaseException | None) -> str:
    """How a process ends that ``error`` ends; "" for in good order."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    if isinstance(error, PeerLost):
        return "because it had lost another rank"
    first = str(error).partition("\n")[0][:_QUOTED]
    return f"with {type(error).__name__}: {first}"


def _at_exit() -> None:
    if _current is not None:
        _current.close(_how(getattr(sys, "last_value", None)))


atexit.register(_at_exit)
