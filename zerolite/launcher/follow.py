"""Control of all nodes from the host that started the job: end of a node, and signals."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from zerolite.launcher.parts import Part
from zerolite.launcher.plan import JobPlan
from zerolite.launcher.supervisor import INTERRUPT_S, say

SIGN_OF_LIFE_S = 1.0
LOOK_S = 0.05

OWN_END_S = 7.0
"""Nodes end by themselves when one has failed; those that have not by then are ended."""

LOST_END_S = 1.0
"""As above, where a connection was lost: the nodes cannot know so soon."""

CLOSED_END_S = 8.0
"""A connection whose node has not ended for so long after its input was closed is cut."""


class Signals:
    """Notes the signals that this process gets within a `with`, to be handed to the nodes.

    Attributes:
        received: in the order in which they came.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))


def follow_parts(job: JobPlan, parts: Sequence[Part], signals: Signals) -> int:
    """Wait for all nodes, end all when one fails, and return the job's exit status."""
    passed = 0
    ending = Ending(parts)
    next_sign = time.monotonic()
    known: set[str] = set()
    try:
        while not have_ended(parts):
            for number in signals.received[passed:]:
                passed += 1
                for part in parts:
                    part.pass_on(number)
                gently = number is signal.SIGINT and passed == 1
                ending.within(INTERRUPT_S + OWN_END_S if gently else OWN_END_S)
            for part in parts:
                if part.status is not None and part.name not in known:
                    known.add(part.name)
                    if not signals.received:
                        handle_end(job, part, parts, ending)
            if time.monotonic() >= next_sign:
                next_sign = time.monotonic() + SIGN_OF_LIFE_S
                for part in parts:
                    part.give_sign_of_life()
            ending.go_on()
            time.sleep(LOOK_S)
    finally:
        for part in parts:
            part.kill()
    return 128 + signals.received[0] if signals.received else job_status(job, parts)


def have_ended(parts: Sequence[Part]) -> bool:
    """Look at all, and return whether none runs any more."""
    return sum(part.look() for part in parts) == len(parts)


def handle_end(job: JobPlan, part: Part, parts: Sequence[Part], ending: Ending) -> None:
    """Decide what the end of a node means for the others."""
    if part.status == 0:
        return
    if not part.lost:
        ending.within(OWN_END_S)
        return
    left = len([other for other in parts if not other.lost])
    what = f"the connection to {part.name} is lost (ssh ended with status {part.status})"
    if may_go_on(job, parts):
        say(f"{what}; the job goes on with {left} of {len(parts)} hosts, and needs {job.min_nodes}")
    else:
        say(f"{what}; the job ends on all hosts")
        ending.within(LOST_END_S)


def may_go_on(job: JobPlan, parts: Sequence[Part]) -> bool:
    """True if an elastic job still has the first host, which keeps the nodes together, and enough others."""
    left = [part for part in parts if not part.lost]
    return job.may_lose and len(left) >= job.min_nodes and parts[0] in left


def job_status(job: JobPlan, parts: Sequence[Part]) -> int:
    """The status of the first node, which knows the first failure; else of another that failed by itself; else 1."""
    if may_go_on(job, parts):
        parts = [part for part in parts if not part.lost]
    own = [part.status for part in parts if part.status and not part.lost and not part.closed]
    if own:
        return own[0]
    return 1 if any(part.status for part in parts) else 0


class Ending:
    """Ends the nodes in two steps: they are told, and cut off if that does not help."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._close_at = float("inf")
        self._kill_at = float("inf")

    def within(self, seconds: float) -> None:
        """Tell the nodes after this time, or earlier if that was decided before."""
        self._close_at = min(self._close_at, time.monotonic() + seconds)

    def go_on(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if now >= self._close_at:
            self._close_at = float("inf")
            self._kill_at = min(self._kill_at, now + CLOSED_END_S)
            for part in self._parts:
                part.end()
        if now >= self._kill_at:
            for part in self._parts:
                part.kill()
