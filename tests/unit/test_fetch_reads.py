"""Reads from disk ahead of gathers: random traces, and worked examples with units of 10 elements."""

import pytest

from tests.unit.test_fetch_schedule import INFINITE, Machine, chain, chain_case, random_case, random_trace
from zerolite.zero.stage3.fetch_plan import FetchLimits, plan_step
from zerolite.zero.stage3.fetch_schedule import FetchSchedule


def on_disk(rng, numels, persistent):
    """Put a part of some parameters on disk, as on one of three ranks."""
    return {p: -(-numel // 3) for p, numel in enumerate(numels) if p not in persistent and numel and rng.random() < 0.7}


def replay(plan, limit, disk):
    """Checks that a plan's reads fit its gathers; gives the number of shards that were gathered, and how many of them
    had to be read on demand, after the first ENTER."""
    ahead, in_flight = [], []  # parameters read for gathers to come, in order; gathers that are not waited for
    gathered = on_demand = 0
    for index, (event, fetch, released) in enumerate(zip(plan.trace, plan.fetches, plan.releases, strict=True)):
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


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_reads_fit_the_gathers_and_the_limit(first):
    for seed in range(first, first + 25):
        check_reads(seed)


def check_reads(seed):
    rng, units, numels, persistent, limits = random_case(seed)
    trace = random_trace(rng, units)
    disk = on_disk(rng, numels, persistent)
    units = [[p for p in unit if p not in persistent] for unit in units]
    for limit in (0, 10, 40, 100, INFINITE):
        few = FetchLimits(limits.prefetch_numel, limits.max_live_numel, limits.max_reuse_distance, limit)
        plan = plan_step(trace, units, numels, few, disk)
        gathered, on_demand = replay(plan, limit, disk)
        if limit == 0:
            assert not any(fetch.read for fetch in plan.fetches)
        if limit == INFINITE:
            assert on_demand == 0
        if limits.max_reuse_distance == 0:  # gathered as often as without a disk
            assert gathered == replay(plan_step(trace, units, numels, few), limit, disk)[0]


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_plans_with_a_disk_can_be_carried_out(first):
    for seed in range(first, first + 25):
        check_steps(seed)


def check_steps(seed):
    rng, units, numels, persistent, limits = random_case(seed)
    first, second = random_trace(rng, units), random_trace(rng, units)
    limits = FetchLimits(limits.prefetch_numel, limits.max_live_numel, limits.max_reuse_distance, rng.choice([20, 200]))
    schedule = FetchSchedule(units, numels, persistent, limits)
    schedule.set_on_disk(on_disk(rng, numels, persistent))
    one = Machine(schedule, units, numels, persistent, limits)
    one.step(first)
    one.step(first)
    assert one.schedule.following
    one.step(first[: len(first) // 2] + second)
    one.step(first[: len(first) // 2] + second)


def reads(layers, limits, disk):
    units, numels, _ = chain_case(layers, limits)
    fetches = plan_step(chain(layers), units, numels, limits, disk).fetches
    return [(fetch.read, fetch.prefetch) for event, fetch in zip(chain(layers), fetches, strict=True) if event >= 0]


def test_reads_run_ahead_by_as_much_as_the_buffers_hold():
    disk = dict.fromkeys(range(3), 5)
    entered = reads(3, FetchLimits(0, INFINITE, 0, 10), disk)
    # Forward 0 1 2, backward 2 1 0; what is gathered is in hand until it has been waited for.
    assert [read for read, _ in entered] == [(0, 1), (), (2,), (2,), (1,), (0,), ()]
    assert [read for read, _ in reads(3, FetchLimits(0, INFINITE, 0, 4), disk)] == [()] * 7
    assert [read for read, _ in reads(3, FetchLimits(0, INFINITE, 0, INFINITE), disk)][0] == (0, 1, 2, 2, 1, 0)
