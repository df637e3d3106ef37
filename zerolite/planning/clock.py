"""Time of a step: what a dry run has done, played on a simulated clock.

::

    compute      |#####|##########|##...|#####|      products, and passes of the engine over its memory
    gathers        |===|  |=====|     |===|          collectives of one communicator run one after another; those of
    reductions          |====|   |========|          several share the wires
                                     ^
                                     wait: the compute stream is exposed to communication

:class:`Trace` notes in order what the engine did: operations, launches, and waits. Nothing here knows stages, buckets
or schedules. The host is taken to be ahead of the device.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from zerolite.comm import Recorder
from zerolite.comm.recorder import CollectiveCall
from zerolite.planning.fake_backend import DryPlatform
from zerolite.planning.result import Machine, StepTime
from zerolite.planning.tracker import MemoryTracker
from zerolite.planning.wire import Cost, Wires


class Compute(NamedTuple):
    """Operations of the model, and bytes that passes of the engine read and write."""

    flops: int
    nbytes: int


class Launch(NamedTuple):
    """Launch of a collective. It begins when ``after`` has ended, if there is one."""

    call: CollectiveCall
    after: CollectiveCall | None = None


class Wait(NamedTuple):
    """Wait of the compute stream for a collective."""

    call: CollectiveCall


Event = Compute | Launch | Wait


class Trace(Recorder):
    """Record of operations, launches and waits of an engine, in order, by steps.

    Attributes:
        steps: the events of each step.
    """

    def __init__(self, tracker: MemoryTracker, platform: DryPlatform, overlaps: bool) -> None:
        """
        Args:
            tracker: counts operations and passes.
            platform: knows what runs on a stream beside that of the model, and what kernels would have passed over.
            overlaps: gathers of updated parameters outlive the step, until :meth:`on_use`. A dry run itself ends them,
                because its parameters cannot be hidden.
        """
        super().__init__()
        self._tracker, self._platform, self._overlaps = tracker, platform, overlaps
        self._in_flight: dict[int, CollectiveCall] = {}  # gathers by key
        self._ended: CollectiveCall | None = None  # the last one for which the side stream has waited
        self._seen = Compute(0, 0)
        self.steps: list[list[Event]] = []

    def end_step(self) -> None:
        """End the last step."""
        self._note_compute()

    def begin_step(self) -> None:
        """Begin a step, after the one before."""
        if self.steps:
            self.end_step()
        self._tracker.count_anew()
        self._seen, self._platform.skipped = Compute(0, 0), 0
        self.steps.append([])

    def on_launch(self, call: CollectiveCall) -> None:
        self._note_compute()
        if self._overlaps and call.tag == "parameters":
            self.on_use(call.key)  # unused since the last update
        self.steps[-1].append(Launch(call, self._ended if self._platform.is_beside else None))

    def on_wait(self, call: CollectiveCall) -> None:
        self._note_compute()
        if self._platform.is_beside:
            self._ended = call
        elif self._overlaps and call.tag == "parameters":
            self._in_flight[call.key] = call
        else:
            self.steps[-1].append(Wait(call))

    def on_use(self, key: int) -> None:
        """Note that the model is about to use parameters that are gathered with this key."""
        if key in self._in_flight:
            self._note_compute()
            self.steps[-1].append(Wait(self._in_flight.pop(key)))

    def on_update(self, nbytes: int) -> None:
        """Note an update, which reads and writes ``nbytes``."""
        self._note_compute()
        self.steps[-1].append(Compute(0, nbytes))

    def _note_compute(self) -> None:
        flops, nbytes = self._tracker.counted
        now = Compute(flops, nbytes + self._platform.skipped)
        more = Compute(now.flops - self._seen.flops, now.nbytes - self._seen.nbytes)
        self._seen = now
        if any(more):
            self.steps[-1].append(more)


class _Collective:
    """One collective on its way. ``end``: when it has ended; None before."""

    def __init__(self, cost: Cost, after: _Collective | None) -> None:
        self.latency, self.transfer, self.between = cost
        self.after = after
        self.end: float | None = None


class _Network:
    """The collectives in flight. Those of one communicator run one after another, and all share the wires evenly.

    NCCL's next collective begins when the one before has ended. Messages follow each other without a gap, so latencies
    overlap.
    """

    def __init__(self, messages: bool) -> None:
        self._messages, self._now = messages, 0.0
        self._queues: dict[tuple[str, bool], deque[_Collective]] = {}

    def launch(self, at: float, queue: tuple[str, bool], collective: _Collective) -> None:
        self._advance(at)
        self._queues.setdefault(queue, deque()).append(collective)

    def end_of(self, collective: _Collective) -> float:
        """Return when ``collective`` ends. All that can delay it has been launched before."""
        self._advance(math.inf, collective)
        assert collective.end is not None
        return collective.end

    def _advance(self, until: float, ends: _Collective | None = None) -> None:
        """Play until that time, or until a collective has ended."""
        while self._now < until and (ends is None or ends.end is None):
            heads = [(queue[0], queue) for queue in self._queues.values() if queue]
            active = [(one, queue) for one, queue in heads if one.after is None or one.after.end is not None]
            if not active:
                break
            # A collective of NCCL first takes its latency. Messages have theirs at the end, while others are sent.
            late = [one for one, _ in active if one.latency and not self._messages]
            sharers = Counter(one.between for one, _ in active if one not in late)
            left = [one.latency if one in late else one.transfer * sharers[one.between] for one, _ in active]
            step = min(*left, until - self._now) if until < math.inf else min(left)
            self._now += step
            for (one, queue), remaining in zip(active, left, strict=True):
                if remaining <= step:
                    if one in late:
                        one.latency = 0.0
                        continue
                    one.end = self._now + one.latency
                    queue.popleft()
                elif one in late:
                    one.latency -= step
                else:
                    one.transfer -= step / sharers[one.between]
        if until < math.inf:
            self._now = max(self._now, until)


def step_time(steps: Sequence[Sequence[Event]], machine: Machine, wires: Wires) -> StepTime:
    """Return the time of the last step: from the end of the one before it, if there is one, to its own."""
    network, launched, now = _Network(wires.messages), dict[int, _Collective](), 0.0
    copies: dict[int, float] = {}
    for step in steps:
        begin, products, passes = now, 0.0, 0.0
        for event in step:
            if isinstance(event, Compute):
                times = machine.seconds(*event)
                products, passes, now = products + times[0], passes + times[1], now + sum(times)
            elif isinstance(event, Wait):
                now += copies.pop(id(event.call), 0.0)
                collective = launched.pop(id(event.call), None)
                if collective is not None:
                    now = max(now, network.end_of(collective))
            else:
                call, after = event
                cost = wires.cost(call)
                if wires.messages and not cost.between:
                    # The ranks of a node copy from each other's memory themselves, while they wait.
                    copies[id(call)] = cost.latency + cost.transfer
                    continue
                collective = _Collective(cost, None if after is None else launched[id(after)])
                launched[id(call)] = collective
                network.launch(now, (call.dimension, call.tag == "parameters"), collective)
    return StepTime(step=now - begin, products=products, passes=passes, exposed=now - begin - products - passes)
