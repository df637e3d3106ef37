"""Schedule of gathers, prefetches and releases at stage 3, from ids and element counts. Standard library only.

A *unit* is a module (or a subtree) with its parameters; a *use* is one execution of one unit, forward or backward; a
*trace* is the events of a step in order: ENTER unit, LEAVE unit. The first step of a kind ("train", "eval", ...) is
served on demand and recorded. Once all ranks are known to have the same trace it becomes a plan: one answer per event,
computed beforehand, so that following it is a comparison and a look-up. A step that departs from its plan goes on on
demand and is recorded anew.

Sizes are in elements. Persistent parameters are always there: they are neither counted nor ever part of an answer.
"""

import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from zerolite.zero.stage3.fetch_plan import NO_PLAN, Fetch, FetchLimits, FetchPlan, Residency, plan_step

logger = logging.getLogger("zerolite")

_LONGEST = 1 << 20  # events that are recorded: forwards that no backward follows never end their step


class FetchSchedule:
    """Schedule that answers the events of a step; see the module.

    Args:
        units: the parameter ids of each unit, by unit id; a parameter may belong to several.
        numels: elements of each parameter, by parameter id.
        persistent: ids of the parameters that always stay whole.

    Raises ValueError for an id without an entry in `numels`.

    Equal events give equal answers, so ranks whose events agree launch the same collectives in the same order. Every
    rank calls, in this order: begin_step, then enter and leave for each use, then end_step; afterwards, where
    `candidate_hash` is not 0, the ranks compare it and all of them call adopt, or all of them reject. Events outside of
    a step are served on demand and not recorded.
    """

    def __init__(
        self, units: Sequence[Sequence[int]], numels: Sequence[int], persistent: Collection[int], limits: FetchLimits
    ) -> None:
        self._numels = tuple(numels)
        self._persistent = frozenset(persistent)
        self._limits = limits
        self._on_disk: dict[int, int] = {}
        for unit, parameters in enumerate(units):
            for p in parameters:
                self._check(p, f"unit {unit}")
        self.units = [tuple(dict.fromkeys(p for p in unit if p not in self._persistent)) for unit in units]
        self._plans: dict[str, FetchPlan] = {}
        self._candidates: dict[str, tuple[int, ...]] = {}
        self._serial = 0  # plans adopted so far
        self.on_demand_only = False  # after `reject`
        self._paused = False
        self._plan = NO_PLAN  # that is followed
        self._position = 0
        self.following = False  # the events of this step agree with its plan; between steps, all of the last one did
        # The state on demand; empty while a plan is followed.
        self._state = Residency(self.units, self._numels, limits.max_live_numel)
        # The events of this step, on demand.
        self._kind: str | None = None  # None: outside of a step
        self._recording = False
        self._trace: list[int] = []
        self._count = 0
        self._last: int | None = None
        self.steps = 0  # begun so far
        self.gathers = 0  # a hash of all gathers so far

    def set_on_disk(self, on_disk: Mapping[int, int]) -> None:
        """The elements of this rank's shards that are on disk, by parameter id: plans made from now on say ahead of a
        gather what to read for it. Called by all ranks, with the same numbers."""
        self._on_disk = dict(on_disk)

    def _check(self, parameter: int, place: str) -> None:
        if not 0 <= parameter < len(self._numels):
            last = len(self._numels) - 1
            raise ValueError(
                f"{place}: expected parameter ids from 0 to {last}, one per entry of numels; got {parameter}."
            )

    def enter(self, unit: int) -> Fetch:
        """A use of `unit` begins: what to release, launch, prefetch and wait for, in this order."""
        plan, position = self._plan, self._position
        if plan.events[position] == unit:
            self._position = position + 1
            return plan.fetches[position]
        self._depart()
        self._note(unit)
        return self._state.enter(unit)

    def leave(self, unit: int) -> tuple[int, ...]:
        """The latest open use of `unit` ends: what to release. Without an open use of it nothing happens."""
        plan, position = self._plan, self._position
        if plan.events[position] == ~unit:
            self._position = position + 1
            return plan.releases[position]
        self._depart()
        self._note(~unit)
        return self._state.release(self._state.end_use(unit))

    def _note(self, event: int) -> None:
        self._count += 1
        self._last = event
        if self._recording:
            self._trace.append(event)
            if self._count > _LONGEST:
                self._recording, self._trace = False, []

    def note_gather(self, first: int, count: int) -> None:
        """``count`` parameters are gathered in one launch, the first of them ``first``. Called by all ranks for every
        gather of the model's parameters."""
        self.gathers = hash((self.gathers, first, count))  # of integers: the same in every process

    def begin_step(self, kind: str) -> None:
        """Begin a step, before its first event. Every kind of step has a trace and a plan of its own.

        A step that begins with something live (held, or left by a step that was not ended) is served on demand.
        """
        self.steps += 1
        if self._plan is not NO_PLAN:
            self._depart()
        self._reset(kind)
        self.following = False
        self._follow()

    def end_step(self) -> tuple[int, ...]:
        """The step is over, open uses too: what to release, everything that is neither persistent nor held."""
        plan = self._plan
        if self.plan_progress[1]:
            if self._kind is not None:
                self._candidates.pop(self._kind, None)  # the step that departed was an exception
            self._plan, self._position = NO_PLAN, 0
            self._reset(None)
            return plan.final
        self._depart()
        trace = tuple(self._trace)
        if self._kind is not None and self._recording and trace:
            known = self._plans.get(self._kind)
            if known is None or known.trace != trace:
                self._candidates[self._kind] = trace
        self._reset(None)
        return self._state.end_all()

    def forget(self) -> tuple[int, ...]:
        """Values changed, or an exception ended the step: closes all uses and gives what to release, everything that is
        neither persistent nor held. What follows in this step is served on demand, and its trace is not adopted."""
        self._depart()
        if self._kind is not None:
            self.following = False
        self._recording, self._trace = False, []
        return self._state.end_all()

    def _reset(self, kind: str | None) -> None:
        self._kind, self._trace, self._count, self._last, self._recording = kind, [], 0, None, False

    def _follow(self) -> None:
        """Start on this kind's plan if nothing has happened in the step and nothing is live, or record the step."""
        state = self._state
        if self._kind is None or self._count or self._plan is not NO_PLAN:
            return
        # What runs inside the user's gather context may run on one rank alone, so it is no trace for all.
        self._recording = not (self.on_demand_only or self._paused or state.open or state.held)
        if self._recording and not state.live and not state.in_flight and self._kind in self._plans:
            self._plan, self._position = self._plans[self._kind], 0
            self.following = True

    def _depart(self) -> None:
        """Leaves the plan, if one is followed: from here on this step is served on demand and recorded."""
        plan, position = self._plan, self._position
        if plan is NO_PLAN:
            return
        self._state = self._replay(plan, position)
        self._plan, self._position = NO_PLAN, 0
        self.following = False
        self._trace = list(plan.trace[:position])
        self._count = position
        self._last = self._trace[-1] if self._trace else None

    def _replay(self, plan: FetchPlan, position: int) -> Residency:
        """The state before event `position` of a plan."""
        state = Residency(self.units, self._numels, self._limits.max_live_numel)
        for event, fetch, releases in zip(plan.trace[:position], plan.fetches, plan.releases, strict=False):
            state.release(fetch.release)
            for launch in (fetch.launch, fetch.prefetch):
                state.start(launch)
            state.settle(fetch.wait)
            if event >= 0:
                state.begin_use(event)
            else:
                state.end_use(~event)
            state.release(releases)
        return state

    def hold(self, parameters: Iterable[int]) -> None:
        """Pins parameters that the caller has gathered, or found gathered: they are live from now on, and nothing
        releases them before `unhold`. Holds are counted. Departs from the plan."""
        held = [p for p in parameters if p not in self._persistent]
        for p in held:
            self._check(p, "hold")
        if held:
            self._depart()
        for p in held:
            self._state.held[p] = self._state.held.get(p, 0) + 1
            self._state.make_live(p)

    def unhold(self, parameters: Iterable[int]) -> tuple[int, ...]:
        """Ends a hold: what to release, the parameters that no other hold and no open use needs.

        Raises ValueError for a parameter that is not held.
        """
        state, ended = self._state, []
        for p in parameters:
            if p in self._persistent:
                continue
            if p not in state.held:
                raise ValueError(f"unhold: expected a parameter that is held, got {p}; call hold before unhold.")
            state.held[p] -= 1
            if not state.held[p]:
                del state.held[p]
                ended.append(p)
        released = state.release([p for p in ended if not state.needs[p]])
        self._follow()
        return released

    def add_parameter(self, unit: int, parameter: int) -> None:
        """An external parameter of `unit` was found. Drops all plans and candidates; records the rest of the step.

        If a use of the unit is open, the caller gathers the parameter: it is live, and released when that use ends.
        """
        self._check(parameter, f"unit {unit}")
        if parameter in self._persistent or parameter in self.units[unit]:
            return
        self._depart()
        self._plans.clear()
        self._candidates.clear()
        self.units[unit] = (*self.units[unit], parameter)
        uses = self._state.open.count(unit)
        if uses:
            self._state.needs[parameter] += uses
            self._state.make_live(parameter)

    @property
    def plan_progress(self) -> tuple[int, bool]:
        """The serial number of the plan that this step has followed so far, the same on all ranks, 0 if none; and
        whether the step has reached its end."""
        return self._plan.serial, self._plan is not NO_PLAN and self._position == len(self._plan.trace)

    @property
    def held(self) -> Mapping[int, int]:
        """Number of holds of each parameter that is held."""
        return self._state.held

    @property
    def candidate_hash(self) -> int:
        """40 bits over the traces that wait for adoption and the units they speak of; 0 if no trace waits."""
        if not self._candidates:
            return 0
        text = repr((self._waiting(), self.units))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "big") or 1

    def adopt(self) -> None:
        """All ranks have the same `candidate_hash`: their traces become plans, from the next step of their kind on.
        Called by all ranks."""
        for kind, trace in self._waiting():
            self._serial += 1
            plan = plan_step(trace, self.units, self._numels, self._limits, self._on_disk)
            self._plans[kind] = replace(plan, serial=self._serial)
            del self._candidates[kind]

    def _waiting(self) -> list[tuple[str, tuple[int, ...]]]:
        """The candidates to compare next: training's alone, if it has one, since evaluations may differ every time."""
        found = sorted(self._candidates.items())
        return [item for item in found if item[0] == "train"] or found

    def reject(self) -> None:
        """The ranks' traces differ: from now on everything is served on demand. Called by all ranks."""
        self._depart()
        self._plans.clear()
        self._candidates.clear()
        self._recording, self._trace = False, []
        self.on_demand_only = True

    def pause(self) -> None:
        """Until :meth:`resume` all steps are served on demand and none is recorded; what waits for adoption is dropped.
        Called by all ranks, some of which have no steps from here on."""
        self._depart()
        self._candidates.clear()
        self._recording, self._trace = False, []
        self.following, self._paused = False, True

    def resume(self) -> None:
        """End a pause, if there is one. Called by all ranks."""
        self._paused = False

    def events(self) -> tuple[str, int, tuple[int, ...]]:
        """For messages: the kind of the step, the number from 1 of the first event given, and the events of the step
        from there: a unit that is entered, or ~unit when it is left. The latest alone where no trace is kept. May be
        called by another thread."""
        plan, position, trace, count, last = self._plan, self._position, tuple(self._trace), self._count, self._last
        if plan is not NO_PLAN:
            return self._kind or "", 1, plan.trace[:position]
        if len(trace) == count:
            return self._kind or "", 1, trace
        return self._kind or "", count, () if last is None else (last,)

    def where(self) -> str:
        """Describe the position of this rank, for messages: the event, counted from 1, and the open uses, outermost
        first."""
        count, last, open_uses = self._count, self._last, self._state.open
        if self._plan is not NO_PLAN:
            count = self._position
            last = self._plan.trace[count - 1] if count else None
            open_uses = self._replay(self._plan, count).open
        step = "outside of a step" if self._kind is None else f"of step kind {self._kind!r}"
        event = f"before the first event {step}"
        if last is not None:
            use = f"unit {last} entered" if last >= 0 else f"unit {~last} left"
            event = f"event {count} {step}: {use}"
        return f"{event}; open uses: {', '.join(map(str, open_uses)) or 'none'}"


class TraceAgreement:
    """Every rank's vote is a number for the trace that it has recorded. Votes travel in a step's statistics, and the
    next update, which all ranks call, lets the schedule follow the trace or drop it: when the host reads statistics is
    each rank's own affair.

    Whether the votes agreed is the same on all ranks, and while they agree the votes are, so all adopt the same traces.
    """

    def __init__(self, schedule: FetchSchedule, says: bool) -> None:
        """says: this rank logs."""
        self.schedule, self._says = schedule, says
        self._sent = 0
        self._last = 0
        self._agreed = True

    def vote(self) -> int:
        """Return this rank's vote, which travels in the statistics that are being collected."""
        self._sent = self._of_candidate()
        return self._sent

    def _of_candidate(self) -> int:
        """A number from 1 to 2^20 for a trace that waits to be compared; 0 if there is none."""
        waiting = self.schedule.candidate_hash
        return waiting % 1_048_573 + 1 if waiting else 0

    def cast(self) -> None:
        """An update begins that uses the statistics with the last :meth:`vote`. Only this counts: clipping may have
        collected them before the vote of the step before was decided on."""
        self._last = self._sent

    def note(self, agreed: bool) -> None:
        """The statistics have been read. agreed: all ranks gave the same vote."""
        self._agreed = agreed

    def decide(self) -> None:
        """Follow the trace of the last vote, or drop it. Called on all ranks, in the same place of every step."""
        agreed, self._agreed = self._agreed, True
        vote, self._last = self._last, 0
        if agreed and not vote:
            return
        if not agreed:
            self.schedule.reject()
            if self._says:
                logger.warning("stage 3: the ranks run their modules in different orders; nothing is prefetched")
        elif self._of_candidate() == vote:
            self.schedule.adopt()
