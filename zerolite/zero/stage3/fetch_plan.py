"""Plan of a stage 3 step: computes an answer for each event of an execution order. Standard library only.

fetch_schedule.py defines group, execution and event.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple


@dataclass(frozen=True)
class FetchLimits:
    """Limits in elements.

    Attributes:
        prefetch_numel: most elements in flight ahead of their execution.
        max_live_numel: most elements live or in flight at a time.
        max_reuse_distance: a parameter stays gathered between two executions if at most so many are gathered between.
        read_numel: most elements of this rank's shards that are read ahead from disk for their gather.
    """

    prefetch_numel: int
    max_live_numel: int
    max_reuse_distance: int
    read_numel: int = 0


class Fetch(NamedTuple):
    """Answer to an ENTER: parameter ids, and what to do with them in this order (`read` before `wait`)."""

    release: tuple[int, ...]  # release these first; one of them may still be in flight
    launch: tuple[int, ...]  # gather these now, in one launch
    prefetch: tuple[int, ...]  # then gather these ahead, in one launch, those that are needed sooner first
    wait: tuple[int, ...]  # wait for these, which are launched now or in flight
    read: tuple[int, ...] = ()  # start to read these from disk, for gathers of later answers


_NONE: Mapping[int, int] = MappingProxyType({})
NOTHING = Fetch((), (), (), ())
"""Answer to most events of a step whose parameters stay gathered."""

END = 1 << 62  # no group has this id, so it matches no event


@dataclass(frozen=True)
class FetchPlan:
    """Execution order with one answer per event. ENTER of group g is written g, LEAVE of it ~g.

    Attributes:
        order: the events.
        events: the events and an end mark.
        fetches: the answer to each ENTER.
        releases: the parameters that each LEAVE releases.
        final: the parameters that the end of the step releases.
    """

    order: tuple[int, ...]
    events: tuple[int, ...]
    fetches: tuple[Fetch, ...]
    releases: tuple[tuple[int, ...], ...]
    final: tuple[int, ...]


NO_PLAN = FetchPlan((), (END,), (), (), ())
"""Plan in use where there is none: no event agrees with it."""


class FetchState:
    """State of the schedule as events change it: which parameters are live, in flight, needed, or pinned."""

    def __init__(self, groups: Sequence[Sequence[int]], numels: Sequence[int], max_live_numel: int) -> None:
        self.groups, self.numels, self.max_live_numel = groups, numels, max_live_numel
        self.live: set[int] = set()
        self.in_flight: set[int] = set()
        self.total = 0  # elements live and in flight
        self.open: list[int] = []  # groups, outermost first
        self.needs = [0] * len(numels)  # open executions that need each parameter
        self.pinned: set[int] = set()
        self.kept_until: dict[int, int] = {}  # for a parameter that no execution needs now: index of the next ENTER

    def size(self, parameters: Iterable[int]) -> int:
        return sum(self.numels[p] for p in parameters)

    def enter(self, group: int) -> Fetch:
        """Begin an execution. Return the answer without prefetches."""
        wait = tuple(p for p in self.groups[group] if p not in self.live)
        launch = tuple(p for p in wait if p not in self.in_flight)
        self.begin_execution(group)
        release = self._make_room(self.size(launch))
        self.mark_in_flight(launch)
        self.mark_live(wait)
        return Fetch(release, launch, (), wait)

    def begin_execution(self, group: int) -> None:
        self.open.append(group)
        for p in self.groups[group]:
            self.needs[p] += 1

    def end_execution(self, group: int) -> tuple[int, ...]:
        """End the latest open execution of `group`, if it has one. Return its parameters that no execution needs."""
        if group not in self.open:
            return ()
        del self.open[len(self.open) - 1 - self.open[::-1].index(group)]
        for p in self.groups[group]:
            self.needs[p] -= 1
        return tuple(p for p in self.groups[group] if not self.needs[p])

    def mark_in_flight(self, parameters: Sequence[int]) -> None:
        self.in_flight.update(parameters)
        self.total += self.size(parameters)

    def mark_live(self, parameters: Sequence[int]) -> None:
        self.in_flight.difference_update(parameters)
        self.live.update(parameters)

    def add_live(self, parameter: int) -> None:
        """Note a parameter that the caller has gathered, or waited for if it was in flight."""
        if parameter not in self.live and parameter not in self.in_flight:
            self.mark_in_flight((parameter,))
        self.mark_live((parameter,))

    def release(self, parameters: Iterable[int]) -> tuple[int, ...]:
        """Release those that are live or in flight and not pinned. Return them."""
        released = tuple(p for p in parameters if p not in self.pinned and (p in self.live or p in self.in_flight))
        self.live.difference_update(released)
        self.in_flight.difference_update(released)
        self.total -= self.size(released)
        return released

    def _make_room(self, size: int) -> tuple[int, ...]:
        """Release parameters that no open execution needs, those with the farthest next use first, until `size` more
        elements fit. Return them."""
        released: list[int] = []
        if self.total + size > self.max_live_numel:
            idle = [p for p in self.live | self.in_flight if not self.needs[p] and p not in self.pinned]
            for p in sorted(idle, key=lambda p: (-self.kept_until.get(p, 0), p)):
                if self.total + size <= self.max_live_numel:
                    break
                released.extend(self.release((p,)))
        return tuple(released)

    def end_all(self) -> tuple[int, ...]:
        """End all executions. Release and return all parameters that are not pinned."""
        self.open.clear()
        self.needs = [0] * len(self.numels)
        return self.release(sorted(self.live | self.in_flight))


class _Use(NamedTuple):
    """Use of one parameter by an ENTER of its group.

    Attributes:
        last_leave: event at which the parameter was last free: its latest LEAVE, -1 before the first use, this ENTER
            itself while another execution needs it.
        kept: True if it may stay gathered since then.
    """

    parameter: int
    last_leave: int
    kept: bool


class _LookAhead:
    """Future uses of parameters in an order.

    Attributes:
        uses: for each ENTER the uses of its parameters.
        next_use: (index of a LEAVE, parameter) -> index of the ENTER for which the parameter is kept gathered.
    """

    def __init__(
        self, order: Sequence[int], groups: Sequence[Sequence[int]], numels: Sequence[int], max_reuse_distance: int
    ) -> None:
        self.uses: list[tuple[_Use, ...]] = []
        self.next_use: dict[tuple[int, int], int] = {}
        sizes = [sum(numels[p] for p in group) for group in groups]
        entered = 0  # elements of all groups entered so far
        entered_at: list[int] = []
        open_executions = [0] * len(groups)
        needs = [0] * len(numels)
        left_at: dict[int, int] = {}
        for index, event in enumerate(order):
            entered_at.append(entered)
            uses = []
            if event >= 0:
                for p in groups[event]:
                    last_leave = index if needs[p] else left_at.get(p, -1)
                    kept = bool(needs[p])
                    if not kept and last_leave >= 0 and max_reuse_distance:
                        kept = entered - entered_at[last_leave] <= max_reuse_distance
                        if kept:
                            self.next_use[last_leave, p] = index
                    uses.append(_Use(p, last_leave, kept))
                    needs[p] += 1
                open_executions[event] += 1
                entered += sizes[event]
            elif open_executions[~event]:
                open_executions[~event] -= 1
                for p in groups[~event]:
                    needs[p] -= 1
                    left_at[p] = index
            self.uses.append(tuple(uses))


class _StepPlanner:
    """Planner that goes through an order event by event with the state of the schedule."""

    def __init__(
        self,
        order: Sequence[int],
        groups: Sequence[Sequence[int]],
        numels: Sequence[int],
        limits: FetchLimits,
        on_disk: Mapping[int, int],
    ) -> None:
        self.order, self.limits, self.on_disk = order, limits, on_disk
        self.look_ahead = _LookAhead(order, groups, numels, limits.max_reuse_distance)
        self.state = FetchState(groups, numels, limits.max_live_numel)
        self.frontier = 0  # every ENTER before this index is provided for

    def enter(self, index: int, group: int) -> Fetch:
        is_empty = not self.state.groups[group]
        return self.state.enter(group)._replace(prefetch=self._prefetch(index, is_empty))

    def leave(self, index: int, group: int) -> tuple[int, ...]:
        state = self.state
        released: list[int] = []
        for p in state.end_execution(group):
            next_use = self.look_ahead.next_use.get((index, p))
            if next_use is not None and state.total - state.size(state.in_flight) <= self.limits.max_live_numel:
                state.kept_until[p] = next_use
            else:
                released.extend(state.release((p,)))
        return tuple(released)

    def _prefetch(self, now: int, is_empty: bool) -> tuple[int, ...]:
        """Return the parameters of the ENTERs after `now` to launch now, up to the first ENTER that must wait.

        Args:
            now: index of the ENTER that is answered.
            is_empty: True if its group has no parameters. Then the next group is needed at once and is not ahead.
        """
        state = self.state
        started: list[int] = []
        ahead = state.size(state.in_flight)
        self.frontier = max(self.frontier, now + 1)
        while self.frontier < len(self.order) and ahead < self.limits.prefetch_numel:
            missing = self._missing(self.frontier, now)
            if missing is None:
                break
            if missing:
                size = state.size(missing)
                if state.total + size > self.limits.max_live_numel or not self._fits_read_buffers(missing, now):
                    break
                if started or not is_empty:
                    ahead += size
                state.mark_in_flight(missing)
                state.kept_until.update((p, self.frontier) for p in missing)
                started += missing
            self.frontier += 1
        return tuple(started)

    def _fits_read_buffers(self, parameters: Sequence[int], now: int) -> bool:
        """Return True if the shards of these that are on disk can have been read before `now`. Gathers in flight may
        use half of the buffers; later shards are read into the other half."""
        size = sum(self.on_disk.get(p, 0) for p in parameters)
        in_flight = sum(self.on_disk.get(p, 0) for p in self.state.in_flight) if size else 0
        return not size or (now > 0 and in_flight + size <= self.limits.read_numel // 2)

    def _missing(self, enter: int, now: int) -> tuple[int, ...] | None:
        """Return the parameters to gather for a later ENTER; None where it is too early for it, because a parameter
        will be released between `now` and then."""
        missing = []
        for p, last_leave, kept in self.look_ahead.uses[enter]:
            present = p in self.state.live or p in self.state.in_flight
            if last_leave > now and not (present and kept):
                return None
            if not present:
                missing.append(p)
        return tuple(missing)


def plan_step(
    order: Sequence[int],
    groups: Sequence[Sequence[int]],
    numels: Sequence[int],
    limits: FetchLimits,
    on_disk: Mapping[int, int] = _NONE,
) -> FetchPlan:
    """Plan a step.

    Args:
        order: its events, g for ENTER g and ~g for LEAVE g.
        groups: parameter ids of each group, without persistent parameters, each once.
        numels: elements of each parameter, by parameter id.
        limits: limits of the plan.
        on_disk: elements of this rank's shards that are on disk, by parameter id.
    """
    planner = _StepPlanner(order, groups, numels, limits, on_disk)
    fetches, releases = [], []
    for index, event in enumerate(order):
        fetches.append(planner.enter(index, event) if event >= 0 else NOTHING)
        releases.append(planner.leave(index, ~event) if event < 0 else ())
    if on_disk and limits.read_numel:
        fetches = _plan_reads(order, fetches, releases, limits.read_numel, on_disk)
    answers = tuple(NOTHING if fetch == NOTHING else fetch for fetch in fetches)
    return FetchPlan(tuple(order), (*order, END), answers, tuple(releases), planner.state.end_all())


def _plan_reads(
    order: Sequence[int],
    fetches: Sequence[Fetch],
    releases: Sequence[tuple[int, ...]],
    limit: int,
    on_disk: Mapping[int, int],
) -> list[Fetch]:
    """Return `fetches` with reads from disk. Shards are read in the order of their gathers, as early as the buffers of
    `limit` elements allow. A shard needs its buffer until its gather has been waited for."""
    gathers = [
        (index, needed)
        for index, fetch in enumerate(fetches)
        for launch in (fetch.launch, fetch.prefetch)
        if (needed := tuple(p for p in launch if p in on_disk))
    ]
    buffered = launched = read = 0  # elements; gathers launched, and read for, so far
    in_flight: set[int] = set()
    planned = []
    for index, (event, fetch) in enumerate(zip(order, fetches, strict=True)):
        while launched < len(gathers) and gathers[launched][0] == index:
            in_flight.update(gathers[launched][1])
            if read == launched:  # these have not been read before
                buffered += sum(on_disk[p] for p in gathers[launched][1])
                read += 1
            launched += 1
        now: list[int] = []
        while event >= 0 and read < len(gathers):
            size = sum(on_disk[p] for p in gathers[read][1])
            if buffered + size > limit:
                break
            now.extend(gathers[read][1])
            buffered += size
            read += 1
        ended = in_flight.intersection((*fetch.release, *fetch.wait, *releases[index]))
        in_flight -= ended
        buffered -= sum(on_disk[p] for p in ended)
        planned.append(fetch._replace(read=tuple(now)))
    return planned
