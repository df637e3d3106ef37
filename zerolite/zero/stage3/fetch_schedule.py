"""Schedule of gathers, prefetches and releases at stage 3, from ids and element counts. Standard library only.

A *group* is the parameters of a module or a subtree; an *execution* is one forward or backward of a group. The
*execution order* is the events of a step: ENTER group, LEAVE group. The first step of a kind ("train", "eval", ...) is
served on demand and recorded. Once all ranks are known to have the same order it becomes a plan: one answer per event,
computed beforehand, so that following it is a comparison and a look-up. A step that departs from its plan goes on on
demand and is recorded anew.

Sizes are in elements. Persistent parameters are always there: they are neither counted nor ever part of an answer.
"""

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from zerolite.zero.stage3.fetch_plan import NO_PLAN, Fetch, FetchLimits, FetchPlan, Residency, plan_step

logger = logging.getLogger("zerolite")

_LONGEST = 1 << 20  # events that are recorded: forwards that no backward follows never end their step
_HASHES = (1 << 20) - 3  # a prime: hashes travel in floating point numbers


class FetchSchedule:
    """Schedule that answers the events of a step; see the module.

    Args:
        groups: the parameter ids of each group, by group id; a parameter may belong to several.
        numels: elements of each parameter, by parameter id.
        persistent: ids of the parameters that always stay whole.

    Equal events give equal answers, so ranks whose events agree launch the same collectives in the same order. Every
    rank calls, in this order: begin_step, then enter and leave for each execution, then end_step; afterwards, where
    `candidate_hash` is not 0, the ranks compare it and all of them call adopt, or all of them reject. Events outside of
    a step are served on demand and not recorded.
    """

    def __init__(
        self, groups: Sequence[Sequence[int]], numels: Sequence[int], persistent: Collection[int], limits: FetchLimits
    ) -> None:
        self._numels = tuple(numels)
        self._persistent = frozenset(persistent)
        self._limits = limits
        self._on_disk: dict[int, int] = {}
        self.groups = [tuple(dict.fromkeys(p for p in group if p not in self._persistent)) for group in groups]
        self._plans: dict[str, FetchPlan] = {}
        self._candidates: dict[str, tuple[int, ...]] = {}
        self._serial = 0  # plans adopted so far
        self.on_demand_only = False  # after `reject`
        self._paused = False
        self._plan = NO_PLAN  # that is followed
        self._position = 0
        self.following = False  # the events of this step agree with its plan; between steps, all of the last one did
        # The state on demand; empty while a plan is followed.
        self._state = Residency(self.groups, self._numels, limits.max_live_numel)
        self._kind: str | None = None  # of this step; None: outside of a step
        self._recording = False  # the order of this step may become a plan
        self._order: list[int] = []  # events of this step, while no plan is followed
        self._dropped = 0  # events before those, of a step that is too long
        self.steps = 0  # begun so far
        self.gathers = 0  # a hash of all gathers so far

    def set_on_disk(self, on_disk: Mapping[int, int]) -> None:
        """The elements of this rank's shards that are on disk, by parameter id: plans made from now on say ahead of a
        gather what to read for it. Called by all ranks, with the same numbers."""
        self._on_disk = dict(on_disk)

    def enter(self, group: int) -> Fetch:
        """An execution of `group` begins: what to release, launch, prefetch and wait for, in this order."""
        plan, position = self._plan, self._position
        if plan.events[position] == group:
            self._position = position + 1
            return plan.fetches[position]
        self._depart()
        self._note(group)
        return self._state.enter(group)

    def leave(self, group: int) -> tuple[int, ...]:
        """The latest open execution of `group` ends: what to release. Nothing if it has none."""
        plan, position = self._plan, self._position
        if plan.events[position] == ~group:
            self._position = position + 1
            return plan.releases[position]
        self._depart()
        self._note(~group)
        return self._state.release(self._state.end_execution(group))

    def _note(self, event: int) -> None:
        if len(self._order) == _LONGEST:
            self._recording = False
            self._dropped += _LONGEST
            self._order.clear()
        self._order.append(event)

    def note_gather(self, first: int, count: int) -> None:
        """``count`` parameters are gathered in one launch, the first of them ``first``. Called by all ranks for every
        gather of the model's parameters."""
        self.gathers = hash((self.gathers, first, count))  # of integers: the same in every process

    def begin_step(self, kind: str) -> None:
        """Begin a step, before its first event. Every kind of step has an order and a plan of its own.

        A step that begins with something live (held, or left by a step that was not ended) is served on demand.
        """
        self.steps += 1
        if self._plan is not NO_PLAN:
            self._depart()
        self._reset(kind)
        self.following = False
        self._follow()

    def end_step(self) -> tuple[int, ...]:
        """The step is over, open executions too: what to release, everything that is neither persistent nor held."""
        plan = self._plan
        if self.plan_progress[1]:
            if self._kind is not None:
                self._candidates.pop(self._kind, None)  # the step that departed was an exception
            self._plan, self._position = NO_PLAN, 0
            self._reset(None)
            return plan.final
        self._depart()
        order = tuple(self._order)
        if self._kind is not None and self._recording and order:
            known = self._plans.get(self._kind)
            if known is None or known.order != order:
                self._candidates[self._kind] = order
        self._reset(None)
        return self._state.end_all()

    def forget(self) -> tuple[int, ...]:
        """Values changed, or an exception ended the step: ends all executions and gives what to release, everything
        that is neither persistent nor held. What follows in this step is served on demand and not adopted."""
        self._depart()
        if self._kind is not None:
            self.following = False
        self._recording = False
        return self._state.end_all()

    def _reset(self, kind: str | None) -> None:
        self._kind, self._order, self._dropped, self._recording = kind, [], 0, False

    def _follow(self) -> None:
        """Start on this kind's plan if nothing has happened in the step and nothing is live, or record the step."""
        state = self._state
        if self._kind is None or self._order or self._plan is not NO_PLAN:
            return
        # What runs inside the user's gather context may run on one rank alone, so it is no order for all.
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
        self._order = list(plan.order[:position])

    def _replay(self, plan: FetchPlan, position: int) -> Residency:
        """The state before event `position` of a plan."""
        state = Residency(self.groups, self._numels, self._limits.max_live_numel)
        for event, fetch, releases in zip(plan.order[:position], plan.fetches, plan.releases, strict=False):
            state.release(fetch.release)
            for launch in (fetch.launch, fetch.prefetch):
                state.start(launch)
            state.settle(fetch.wait)
            if event >= 0:
                state.begin_execution(event)
            else:
                state.end_execution(~event)
            state.release(releases)
        return state

    def hold(self, parameters: Sequence[int]) -> None:
        """Keep parameters that the caller has gathered, or found gathered, and that are not held yet: nothing releases
        them before `unhold`. Departs from the plan."""
        if parameters:
            self._depart()
        for p in parameters:
            self._state.held.add(p)
            self._state.make_live(p)

    def unhold(self, parameters: Sequence[int]) -> tuple[int, ...]:
        """End holds: what to release, the parameters that no open execution needs."""
        state = self._state
        state.held.difference_update(parameters)
        released = state.release([p for p in parameters if not state.needs[p]])
        self._follow()
        return released

    def add_parameter(self, group: int, parameter: int) -> None:
        """An external parameter of `group` was found. Drops all plans and candidates; records the rest of the step.

        If an execution of the group is open, the caller gathers the parameter: it is live, and released when that ends.
        """
        if parameter in self._persistent or parameter in self.groups[group]:
            return
        self._depart()
        self._plans.clear()
        self._candidates.clear()
        self.groups[group] = (*self.groups[group], parameter)
        open_executions = self._state.open.count(group)
        if open_executions:
            self._state.needs[parameter] += open_executions
            self._state.make_live(parameter)

    @property
    def plan_progress(self) -> tuple[int, bool]:
        """The serial number of the plan that this step has followed so far, the same on all ranks, 0 if none; and
        whether the step has reached its end."""
        return self._plan.serial, self._plan is not NO_PLAN and self._position == len(self._plan.order)

    @property
    def held(self) -> Collection[int]:
        """The parameters that are held."""
        return self._state.held

    @property
    def candidate_hash(self) -> int:
        """20 bits over the orders that wait for adoption and the groups they speak of; 0 if none waits."""
        if not self._candidates:
            return 0
        text = repr((self._waiting(), self.groups))
        digest = hashlib.blake2b(text.encode(), digest_size=5).digest()
        return int.from_bytes(digest, "big") % _HASHES + 1

    def adopt(self) -> None:
        """All ranks have the same `candidate_hash`: their orders become plans, from the next step of their kind on.
        Called by all ranks."""
        for kind, order in self._waiting():
            self._serial += 1
            plan = plan_step(order, self.groups, self._numels, self._limits, self._on_disk)
            self._plans[kind] = replace(plan, serial=self._serial)
            del self._candidates[kind]

    def _waiting(self) -> list[tuple[str, tuple[int, ...]]]:
        """The candidates to compare next: training's alone, if it has one, since evaluations may differ every time."""
        found = sorted(self._candidates.items())
        return [item for item in found if item[0] == "train"] or found

    def reject(self) -> None:
        """The ranks' orders differ: from now on everything is served on demand. Called by all ranks."""
        self._depart()
        self._plans.clear()
        self._candidates.clear()
        self._recording = False
        self.on_demand_only = True

    def pause(self) -> None:
        """Until :meth:`resume` all steps are served on demand and none is recorded; what waits for adoption is dropped.
        Called by all ranks, some of which have no steps from here on."""
        self._depart()
        self._candidates.clear()
        self._recording = False
        self.following, self._paused = False, True

    def resume(self) -> None:
        """End a pause, if there is one. Called by all ranks."""
        self._paused = False

    def events(self) -> tuple[str, int, tuple[int, ...]]:
        """For messages: the kind of the step, the number from 1 of the first event given, and the events of the step
        from there: a group that is entered, or ~group when it is left. May be called by another thread."""
        plan, position, order, dropped = self._plan, self._position, tuple(self._order), self._dropped
        if plan is not NO_PLAN:
            return self._kind or "", 1, plan.order[:position]
        return self._kind or "", dropped + 1, order


class ScheduleAgreement:
    """Comparison of the ranks' recorded execution orders, so that all ranks adopt the same plan in the same update.

    A hash of the order travels in a step's statistics. When the host reads statistics is each rank's own affair; the
    next update, which all ranks call, acts on what they have said. If the hashes matched, all ranks know it.
    """

    def __init__(self, schedule: FetchSchedule, says: bool) -> None:
        """says: this rank logs."""
        self.schedule, self._says = schedule, says
        self._collected = 0  # hash in the statistics that were collected last
        self._compared = 0  # hash in the statistics that an update has used
        self._match = True

    def schedule_hash(self) -> int:
        """Return the hash that travels in the statistics that are being collected: from 1 to 2^20, 0 for none."""
        self._collected = self.schedule.candidate_hash
        return self._collected

    def note(self, schedules_match: bool) -> None:
        """The statistics of the last update have been read."""
        self._match = schedules_match

    def begin_update(self) -> None:
        """Adopt the order that the update before has compared, or drop it. Called on all ranks, at the same place of
        every update, before its statistics are collected: they compare what is left."""
        match, self._match = self._match, True
        compared, self._compared = self._compared, 0
        if not match:
            self.schedule.reject()
            if self._says:
                logger.warning("stage 3: the ranks run their modules in different orders; nothing is prefetched")
        elif compared and self.schedule.candidate_hash == compared:
            self.schedule.adopt()

    def compare(self) -> None:
        """The update uses the statistics with the latest hash. Only these count: clipping may have collected them
        before :meth:`begin_update`."""
        self._compared = self._collected
