"""FetchSchedule against a machine that carries out its answers and checks each of them.

Parameters of the worked examples have 10 elements each; an event is written u for ENTER of group u and ~u for LEAVE.
"""

import dataclasses
import random
from unittest import mock

import pytest
import torch

from zerolite.zero.stage3.fetch_schedule import Fetch, FetchLimits, FetchSchedule, plan_step
from zerolite.zero.step_observers import ScheduleAgreement

INFINITE = 10**9
NO_REUSE = FetchLimits(INFINITE, INFINITE, 0)


class Machine:
    """Carries out what a schedule answers, and asserts that it may be carried out."""

    def __init__(self, schedule, groups, numels, persistent, limits):
        self.schedule, self.numels, self.limits = schedule, numels, limits
        self.groups, self.persistent = [list(group) for group in groups], set(persistent)
        self.live, self.in_flight, self.held, self.open = set(), set(), [], []
        self.launched = 0  # elements
        self.fetches, self.releases = [], []
        self.touched = False  # from outside: then an ENTER makes room, not before

    def own(self, group):
        return {p for p in self.groups[group] if p not in self.persistent}

    def size(self, parameters):
        return sum(self.numels[p] for p in parameters)

    def needed(self):
        return set().union(*(self.own(group) for group in self.open), self.held)

    def start(self, parameters):
        assert parameters
        assert len(set(parameters)) == len(parameters)
        assert not set(parameters) & (self.live | self.in_flight | self.persistent), "launched while live or in flight"
        self.in_flight |= set(parameters)
        self.launched += self.size(parameters)

    def drop(self, parameters):
        assert set(parameters) <= self.live | self.in_flight, "released what is not there"
        assert len(set(parameters)) == len(parameters)
        assert not set(parameters) & self.needed(), "released what is needed"
        self.live -= set(parameters)
        self.in_flight -= set(parameters)
        self.releases.append(parameters)

    def check(self, entered=False):
        assert self.needed() <= self.live
        if entered or not self.touched:
            assert self.size(self.live | self.in_flight) <= max(self.limits.max_live_numel, self.size(self.needed()))

    def event(self, event):
        if event >= 0:
            fetch = self.schedule.enter(event)
            self.open.append(event)
            self.drop(fetch.release)
            if fetch.launch:
                self.start(fetch.launch)
            if fetch.prefetch:
                # Overshot by the last group only; where the group itself has none, the first one is not ahead.
                largest = max(self.size(self.own(group)) for group in range(len(self.groups)))
                over = max(largest if self.own(event) else 2 * largest, 1)
                ahead = self.size(self.in_flight - self.own(event))
                assert ahead < self.limits.prefetch_numel > ahead + self.size(set(fetch.prefetch)) - over
                self.start(fetch.prefetch)
            assert set(fetch.launch) <= set(fetch.wait) <= self.in_flight
            assert set(fetch.wait) == self.own(event) & self.in_flight
            self.in_flight -= set(fetch.wait)
            self.live |= set(fetch.wait)
            self.fetches.append(fetch)
        else:
            self.close(~event)
            self.drop(self.schedule.leave(~event))
        self.check(entered=event >= 0)

    def close(self, group):
        if group in self.open:  # its innermost use
            del self.open[len(self.open) - 1 - self.open[::-1].index(group)]

    def hold(self, parameters):
        self.touched = True
        held = [p for p in parameters if p not in self.persistent]
        self.schedule.pin([p for p in held if p not in self.held])  # holds nest: the outermost counts
        self.held += held
        self.live |= set(parameters) - self.persistent
        self.in_flight -= set(parameters)

    def unhold(self, parameters):
        for p in set(parameters) - self.persistent:
            self.held.remove(p)
        self.drop(self.schedule.unpin([p for p in parameters if p not in {*self.held, *self.persistent}]))
        self.check()

    def end(self, forget=False):
        self.open = []
        self.drop(self.schedule.forget() if forget else self.schedule.end_step())
        assert self.live | self.in_flight == set(self.held)

    def step(self, order, kind="train", adopt=True):
        """A whole step; gives the elements it launched."""
        before = self.launched
        self.schedule.begin_step(kind)
        for event in order:
            self.event(event)
        self.end()
        if adopt and self.schedule.candidate_hash:
            self.schedule.adopt()
        return self.launched - before


def machine(groups, numels, persistent=(), limits=NO_REUSE):
    return Machine(FetchSchedule(groups, numels, persistent, limits), groups, numels, persistent, limits)


def random_order(rng, groups, events=40):
    """Nested uses; a second use of an open group may begin only as its innermost one, as recomputation does."""
    order, stack = [], []
    while len(order) < events:
        closed = [u for u in range(len(groups)) if u not in stack]
        again = [u for u in stack if stack.count(u) == 1]
        if stack and (rng.random() < 0.5 or not closed):
            order.append(~stack.pop())
        elif again and rng.random() < 0.1:
            group = rng.choice(again)
            order += [group, ~group]
        else:
            stack.append(rng.choice(closed))
            order.append(stack[-1])
    if rng.random() < 0.8:  # otherwise leaves are missing
        order += [~group for group in reversed(stack)]
    return order


def random_case(seed):
    rng = random.Random(seed)
    numels = [rng.choice([0, 1, 5, 10, rng.randrange(100)]) for _ in range(rng.randrange(1, 12))]
    ids = range(len(numels))
    groups = [rng.sample(ids, rng.randrange(min(4, len(ids)) + 1)) for _ in range(rng.randrange(1, 8))]
    persistent = [p for p in ids if rng.random() < 0.15]
    limits = FetchLimits(*(rng.choice([0, 20, 100, 300, INFINITE]) for _ in range(3)))
    return rng, groups, numels, persistent, limits


def chain(layers):
    """Forward and backward through groups 1 to `layers`, with a parameter each, inside of group 0 which has none."""
    forward = [event for u in range(1, layers + 1) for event in (u, ~u)]
    backward = [event for u in range(layers, 0, -1) for event in (u, ~u)]
    return [0, *forward, ~0, *backward]


def chain_case(layers):
    """Groups and numels of the chain."""
    return [[], *([u] for u in range(layers))], [10] * layers


def entered(layers, limits, disk=()):
    """The fetches of a plan of the chain at each ENTER."""
    fetches = plan_step(chain(layers), *chain_case(layers), limits, dict(disk)).fetches
    return [fetch for event, fetch in zip(chain(layers), fetches, strict=True) if event >= 0]


# ---------------------------------------------------------------------------------------------------------- properties


def check_plan(seed):
    rng, groups, numels, persistent, limits = random_case(seed)
    order = random_order(rng, groups)
    one = machine(groups, numels, persistent, limits)
    on_demand = one.step(order)
    assert not one.schedule.following
    by_plan = []
    for _ in range(2):
        one.schedule.begin_step("train")
        before = one.launched
        for event in order:
            one.event(event)
            assert one.schedule.following
        one.end()
        assert one.schedule.following
        assert one.schedule.candidate_hash == 0
        by_plan.append(one.launched - before)
    assert by_plan[0] == by_plan[1]
    if limits.max_reuse_distance == 0:
        assert by_plan[0] == on_demand
    elif limits.prefetch_numel == 0:
        assert by_plan[0] <= on_demand


def check_departure(seed):
    rng, groups, numels, persistent, limits = random_case(seed)
    first = random_order(rng, groups)
    one = machine(groups, numels, persistent, limits)
    one.step(first)
    cut = rng.randrange(len(first))
    second = first[:cut] + random_order(rng, groups)[: rng.randrange(40)]
    one.step(second)
    assert one.schedule.following == (second == first)
    if second:
        one.step(second)
        assert one.schedule.following
    one.step(first[:cut])  # ends early, or departs from another plan
    one.step(first, kind="eval")
    one.step(first, kind="eval")
    assert one.schedule.following


def check_outside(seed):
    rng, groups, numels, persistent, limits = random_case(seed)
    order = random_order(rng, groups)
    one = machine(groups, numels, persistent, limits)
    holds = []
    for _ in range(6):
        one.schedule.begin_step("train")
        for event in order:
            chance = rng.random()
            if chance < 0.03:
                holds.append(rng.sample(range(len(numels)), rng.randrange(min(3, len(numels)) + 1)))
                one.hold(holds[-1])
            elif chance < 0.08 and holds:
                one.unhold(holds.pop(rng.randrange(len(holds))))
            elif chance < 0.09:
                one.end(forget=True)
            elif chance < 0.1 and rng.random() < 0.3:
                add_parameter(one, rng.randrange(len(groups)), rng.randrange(len(numels)))
            one.event(event)
        one.end()
        if one.schedule.candidate_hash:
            one.schedule.adopt()
    while holds:
        one.unhold(holds.pop())
    assert not one.live | one.in_flight
    one.step(order)
    one.step(order)
    assert one.schedule.following


def add_parameter(one, group, parameter):
    one.touched = True
    one.schedule.add_parameter(group, parameter)
    if parameter not in one.persistent and parameter not in one.groups[group]:
        one.groups[group].append(parameter)
        if group in one.open:  # the caller gathers it
            one.in_flight.discard(parameter)
            one.live.add(parameter)


@pytest.mark.fast("*-0")
@pytest.mark.parametrize("first", range(0, 120, 40))
@pytest.mark.parametrize("check", [check_plan, check_departure, check_outside])
def test_random_orders_are_served_on_demand_and_by_plan_and_survive_departures_and_users(check, first):
    for seed in range(first, first + 40):
        check(seed)


def test_a_chain_prefetches_one_layer_ahead_and_never_over_the_turn():
    assert entered(3, FetchLimits(1, INFINITE, 0)) == [
        Fetch((), (), (0, 1), ()),  # group 0: without parameters, starts the first layer, and the one ahead with it
        Fetch((), (), (), (0,)),
        Fetch((), (), (2,), (1,)),
        Fetch((), (), (), (2,)),  # the turn: the next use is of the same layer, which is released before
        Fetch((), (2,), (1,), (2,)),
        Fetch((), (), (0,), (1,)),
        Fetch((), (), (), (0,)),
    ]


def test_hash_tells_orders_kinds_and_groups_apart():
    def hash_of(order, kind="train", groups=((0,), (1,))):
        one = machine(groups, [10, 10])
        one.step(order, kind=kind, adopt=False)
        return one.schedule.candidate_hash

    order = [0, ~0, 1, ~1]
    others = {hash_of([1, ~1, 0, ~0]), hash_of([0, 1, ~1, ~0]), hash_of(order, "eval")}
    others.add(hash_of(order, groups=((0,), (0, 1))))
    assert len(others) == 4 and hash_of(order) not in others
    assert hash_of(order) == 842206, "the same number in every process"


def test_an_order_is_adopted_only_if_it_is_the_one_that_was_compared():
    """The hash travels with statistics that a call before the update collects; then another order waits."""
    schedule = mock.Mock(gathers=0, candidate_hash=7)
    agreement = ScheduleAgreement(schedule, 0, 1, logs=False)
    numbers = torch.zeros(3)
    agreement.read_slice(agreement.write_slice(numbers), numbers)  # of a step before
    written = agreement.write_slice(numbers)  # this step's statistics
    schedule.candidate_hash = 9
    agreement.before_update()
    agreement.read_slice(written, numbers)
    agreement.before_update()
    assert schedule.adopt.call_count == 0
    agreement.read_slice(agreement.write_slice(numbers), numbers)
    agreement.before_update()
    assert schedule.adopt.call_count == 1 and schedule.reject.call_count == 0


# ------------------------------------------------------------------------------------ reads from disk, ahead of gathers


def on_disk(rng, numels, persistent):
    """Put a part of some parameters on disk, as on one of three ranks."""
    return {p: -(-numel // 3) for p, numel in enumerate(numels) if p not in persistent and numel and rng.random() < 0.7}


def replay(plan, limit, disk):
    """Checks that a plan's reads fit its gathers; gives the number of shards that were gathered, and how many of them
    had to be read on demand, after the first ENTER."""
    ahead, in_flight = [], []  # parameters read for gathers to come, in order; gathers that are not waited for
    gathered = on_demand = 0
    for index, (event, fetch, released) in enumerate(zip(plan.order, plan.fetches, plan.releases, strict=True)):
        in_flight = [p for p in in_flight if p not in fetch.release]
        for p in [p for launch in (fetch.launch, fetch.prefetch) for p in launch if p in disk]:
            gathered += 1
            if ahead:
                assert ahead.pop(0) == p, "gathered in another order than read"
            else:
                on_demand += index > 0
            in_flight.append(p)
        assert event >= 0 or not fetch.read
        ahead += fetch.read
        if fetch.read:
            assert sum(disk[p] for p in (*ahead, *in_flight)) <= limit
        in_flight = [p for p in in_flight if p not in (*fetch.wait, *released)]
    assert not ahead, "read and never gathered"
    return gathered, on_demand


def check_reads(seed):
    rng, groups, numels, persistent, limits = random_case(seed)
    order = random_order(rng, groups)
    disk = on_disk(rng, numels, persistent)
    groups = [[p for p in group if p not in persistent] for group in groups]
    for limit in (0, 10, 40, 100, INFINITE):
        plan = plan_step(order, groups, numels, dataclasses.replace(limits, read_numel=limit), disk)
        gathered, on_demand = replay(plan, limit, disk)
        if limit == 0:
            assert not any(fetch.read for fetch in plan.fetches)
        if limit == INFINITE:
            assert on_demand == 0
        if limits.max_reuse_distance == 0:  # gathered as often as without a disk
            assert gathered == replay(plan_step(order, groups, numels, limits), limit, disk)[0]


def check_steps(seed):
    rng, groups, numels, persistent, limits = random_case(seed)
    first, second = random_order(rng, groups), random_order(rng, groups)
    limits = dataclasses.replace(limits, read_numel=rng.choice([20, 200]))
    one = machine(groups, numels, persistent, limits)
    one.schedule.set_on_disk(on_disk(rng, numels, persistent))
    one.step(first)
    one.step(first)
    assert one.schedule.following
    for _ in range(2):
        one.step(first[: len(first) // 2] + second)


@pytest.mark.parametrize("first", range(0, 50, 25))
@pytest.mark.parametrize("check", [check_reads, check_steps])
def test_reads_from_disk_fit_the_gathers_and_the_limit_and_can_be_carried_out(check, first):
    for seed in range(first, first + 25):
        check(seed)


def test_reads_run_ahead_by_as_much_as_the_buffers_hold():
    def reads(limit):
        return [fetch.read for fetch in entered(3, FetchLimits(0, INFINITE, 0, limit), dict.fromkeys(range(3), 5))]

    # Forward 0 1 2, backward 2 1 0; what is gathered is in hand until it has been waited for.
    assert reads(10) == [(0, 1), (), (2,), (2,), (1,), (0,), ()]
    assert reads(4) == [()] * 7
    assert reads(INFINITE)[0] == (0, 1, 2, 2, 1, 0)
