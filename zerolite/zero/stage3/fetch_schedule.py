"""Schedule of gathers, prefetches and releases at stage 3, from ids and element counts. Standard library only.

- A *group* is a parameter group: the parameters of a module or of a subtree of modules.
- An *execution* is one forward or backward of a group.
- The *execution order* of a step is its events: ENTER group, LEAVE group.

The first step of a kind ("train", "eval", ...) is served on demand and recorded. When all ranks are known to have the
same order, the order becomes a plan with one answer per event, computed in advance. Following a plan is then a
comparison and a look-up. A step that departs from its plan continues on demand and is recorded anew.

Sizes are in elements. Persistent parameters are always gathered: they are not counted, and no answer contains them.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from zerolite.zero.stage3.fetch_plan import NO_PLAN, Fetch, FetchLimits, FetchPlan, FetchState, plan_step

_LONGEST = 1 << 20  # most events of a recording: forwards without a backward never end their step
_HASHES = (1 << 20) - 3  # a prime below 2^20: hashes are exchanged as floating point numbers


class StepMode(Enum):
    """Way in which the events of a step are answered. Between steps it is that of the last step."""

    ON_DEMAND = "on demand"
    RECORDED = "on demand, and the order may become a plan"
    PLANNED = "from the plan, with which all events so far agree"


class FetchSchedule:
    """Schedule that answers the events of a step; see the module.

    Equal events give equal answers, so ranks whose events agree launch the same collectives in the same order.

    Every rank calls :meth:`begin_step`, then :meth:`enter` and :meth:`leave` for each execution, then
    :meth:`end_step`. If :attr:`candidate_hash` is then not 0, the ranks compare it, and all of them call :meth:`adopt`
    or all of them call :meth:`reject`. Events outside a step are served on demand and not recorded.

    Args:
        groups: parameter ids of each group, by group id; a parameter may belong to several groups.
        numels: elements of each parameter, by parameter id.
        persistent: ids of the persistent parameters.
        limits: limits of the plans.

    Attributes:
        state: parameters that are live, in flight, needed or pinned in a step without a plan; empty while a plan is in
            use.
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
        self.on_demand_only = False  # after `reject`
        self._mode = StepMode.ON_DEMAND
        self._plan = NO_PLAN  # the plan in use
        self._position = 0  # of the next event in the plan
        self.state = FetchState(self.groups, self._numels, limits.max_live_numel)
        self._step_kind: str | None = None  # kind of this step; None outside a step
        self._order: list[int] = []  # events of this step, while no plan is in use
        self._dropped = 0  # number of events before those, in a step that is too long
        self.steps = 0  # steps begun so far
        self.gathers = 0  # hash of all gathers so far

    def set_on_disk(self, on_disk: Mapping[int, int]) -> None:
        """Let plans from now on read shards from disk ahead of their gather. Called by all ranks, with equal arguments.

        Args:
            on_disk: elements of this rank's shards that are on disk, by parameter id.
        """
        self._on_disk = dict(on_disk)

    def enter(self, group: int) -> Fetch:
        """Begin an execution of `group`. Return the parameters to release, launch, prefetch and wait for."""
        plan, position = self._plan, self._position
        if plan.events[position] == group:
            self._position = position + 1
            return plan.fetches[position]
        self._depart()
        self._note(group)
        return self.state.enter(group)

    def leave(self, group: int) -> tuple[int, ...]:
        """End the latest open execution of `group`, if there is one. Return the parameters to release."""
        plan, position = self._plan, self._position
        if plan.events[position] == ~group:
            self._position = position + 1
            return plan.releases[position]
        self._depart()
        self._note(~group)
        return self.state.release(self.state.end_execution(group))

    def _note(self, event: int) -> None:
        if len(self._order) == _LONGEST:
            self._mode = StepMode.ON_DEMAND
            self._dropped += _LONGEST
            self._order.clear()
        self._order.append(event)

    def note_gather(self, first: int, count: int) -> None:
        """Note a gather of ``count`` parameters in one launch, of which ``first`` is the first. Called by all ranks for
        every gather of the model's parameters."""
        self.gathers = hash((self.gathers, first, count))  # the hash of integers is the same in every process

    def begin_step(self, step_kind: str) -> None:
        """Begin a step, before its first event. Each kind of step has an order and a plan of its own.

        A step that begins with live parameters (pinned, or left by a step that did not end) is served on demand.
        """
        self.steps += 1
        if self._plan is not NO_PLAN:
            self._depart()
        self._reset(step_kind)
        self._choose_mode()

    def end_step(self) -> tuple[int, ...]:
        """End the step with all its executions. Return the parameters to release: all but persistent and pinned."""
        plan = self._plan
        if plan is not NO_PLAN and self._position == len(plan.order):
            # If an earlier step departed from the plan, its order is no candidate: this one did not.
            self._candidates.pop(self._step_kind or "", None)
            self._plan, self._position, self._step_kind = NO_PLAN, 0, None
            return plan.final
        self._depart()
        order = tuple(self._order)
        if self._step_kind is not None and self._mode is StepMode.RECORDED and order:
            known = self._plans.get(self._step_kind)
            if known is None or known.order != order:
                self._candidates[self._step_kind] = order
        self._reset(None)
        return self.state.end_all()

    def forget(self) -> tuple[int, ...]:
        """End all executions, because values have changed or an exception has ended the step. Return the parameters to
        release: all but persistent and pinned ones. The rest of the step is served on demand and not recorded."""
        self._depart()
        if self._step_kind is not None:
            self._mode = StepMode.ON_DEMAND
        return self.state.end_all()

    def _reset(self, step_kind: str | None) -> None:
        self._step_kind, self._order, self._dropped = step_kind, [], 0
        if self._mode is StepMode.RECORDED:
            self._mode = StepMode.ON_DEMAND

    def _choose_mode(self) -> None:
        """Begin the plan of this kind of step, or record the step, if nothing has happened in it so far."""
        state = self.state
        if self._step_kind is None or self._order or self._plan is not NO_PLAN:
            return
        # Inside the user's gather context a forward may run on one rank alone, so its order cannot become a plan.
        if self.on_demand_only or state.open or state.pinned:
            self._mode = StepMode.ON_DEMAND
        elif state.live or state.in_flight or self._step_kind not in self._plans:
            self._mode = StepMode.RECORDED
        else:
            self._mode = StepMode.PLANNED
            self._plan, self._position = self._plans[self._step_kind], 0

    def _depart(self) -> None:
        """Leave the plan, if one is in use: the rest of this step is served on demand and recorded."""
        plan, position = self._plan, self._position
        if plan is NO_PLAN:
            return
        self.state = self._replay(plan, position)
        self._plan, self._position = NO_PLAN, 0
        self._mode = StepMode.RECORDED
        self._order = list(plan.order[:position])

    def _replay(self, plan: FetchPlan, position: int) -> FetchState:
        """Return the state before event `position` of a plan."""
        state = FetchState(self.groups, self._numels, self._limits.max_live_numel)
        for event, fetch, releases in zip(plan.order[:position], plan.fetches, plan.releases, strict=False):
            state.release(fetch.release)
            for launch in (fetch.launch, fetch.prefetch):
                state.mark_in_flight(launch)
            state.mark_live(fetch.wait)
            if event >= 0:
                state.begin_execution(event)
            else:
                state.end_execution(~event)
            state.release(releases)
        return state

    def pin(self, parameters: Sequence[int]) -> None:
        """Keep gathered parameters until :meth:`unpin`, and depart from the plan. The caller has gathered them or
        found them gathered, and none of them is pinned yet."""
        if parameters:
            self._depart()
        for p in parameters:
            self.state.pinned.add(p)
            self.state.add_live(p)

    def unpin(self, parameters: Sequence[int]) -> tuple[int, ...]:
        """End pins. Return the parameters to release: those that no open execution needs."""
        state = self.state
        state.pinned.difference_update(parameters)
        released = state.release([p for p in parameters if not state.needs[p]])
        self._choose_mode()
        return released

    def add_parameter(self, group: int, parameter: int) -> None:
        """Add an external parameter to `group`. Drop all plans and candidates; record the rest of the step.

        If an execution of the group is open, the caller gathers the parameter, which is released when that ends.
        """
        if parameter in self._persistent or parameter in self.groups[group]:
            return
        self._depart()
        self._plans.clear()
        self._candidates.clear()
        self.groups[group] = (*self.groups[group], parameter)
        open_executions = self.state.open.count(group)
        if open_executions:
            self.state.needs[parameter] += open_executions
            self.state.add_live(parameter)

    @property
    def following(self) -> bool:
        """True if all events of this step agree with its plan; between steps, those of the last step."""
        return self._mode is StepMode.PLANNED

    @property
    def candidate_hash(self) -> int:
        """Hash of 20 bits of the orders that wait for adoption and of the groups; 0 if no order waits."""
        if not self._candidates:
            return 0
        text = repr((self._waiting(), self.groups))
        digest = hashlib.blake2b(text.encode(), digest_size=5).digest()
        return int.from_bytes(digest, "big") % _HASHES + 1

    def adopt(self) -> None:
        """Make plans of the orders that wait, for the next steps of their kinds. Called by all ranks, whose
        :attr:`candidate_hash` are equal."""
        for step_kind, order in self._waiting():
            self._plans[step_kind] = plan_step(order, self.groups, self._numels, self._limits, self._on_disk)
            del self._candidates[step_kind]

    def _waiting(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the candidates to compare next: only training's, if it has one, since evaluations may differ every
        time."""
        waiting = sorted(self._candidates.items())
        return [(step_kind, order) for step_kind, order in waiting if step_kind == "train"] or waiting

    def reject(self) -> None:
        """Serve all steps on demand from now on, because the orders of the ranks differ. Called by all ranks."""
        self._depart()
        self._plans.clear()
        self._candidates.clear()
        self._mode = StepMode.ON_DEMAND
        self.on_demand_only = True

    def events(self) -> tuple[str, int, tuple[int, ...]]:
        """Return the state of the step for messages; another thread may call it.

        Returns:
            The kind of the step; the number, from 1, of the first event that is returned; and the events from there on.
            An event is the group that is entered, or ~group when it is left.
        """
        plan, position, order, dropped = self._plan, self._position, tuple(self._order), self._dropped
        if plan is not NO_PLAN:
            return self._step_kind or "", 1, plan.order[:position]
        return self._step_kind or "", dropped + 1, order
