"""Stage 3 gathers when its plan says so, within its limits, on all ranks alike; where no plan fits it takes no harm."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.configs import ADAMW, config
from tests.distributed.test_parity import assert_same_bits
from tests.pool import Pools
from zerolite.zero.stage3.fetch_schedule import FetchLimits, plan_step

CASES = "tests.distributed.cases.stage3_schedule"
SHORT = {
    "stage3_param_persistence_threshold": 0,
    "stage3_module_granularity_threshold": 0,
    "stage3_max_reuse_distance": 0,
}
# The tower's units have 104, 154, 60 and 18 elements; the root, unit 0, has none.
FORWARD = [0, 1, ~1, 2, ~2, 3, ~3, 4, ~4, ~0]
BACKWARD = [0, 4, ~4, 3, ~3, 2, ~2, 1, ~1, ~0]
LARGEST = 154


def limited(prefetch: int, live: int, reuse: int) -> dict[str, Any]:
    limits = {
        "stage3_prefetch_bucket_size": prefetch,
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": reuse,
    }
    return {**SHORT, **limits}


def watched(pools: Pools, world: int, zero: dict[str, Any], model: str = "Tower", **sizes: Any) -> list[dict[str, Any]]:
    """Return the actions of every rank's coordinator, which must be the same."""
    setting = config(3, "fp32", 1, 0.4, ADAMW, zero=zero)
    ranks = pools(world).run(f"{CASES}:events_of_steps", {"config": setting, "model": model, "sizes": sizes})
    for result in ranks:
        assert result["windows"] == ranks[0]["windows"]
        assert result["following"] == [False, False, True, True]
    return ranks


def told_and_launched(window: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [event for event in window if event[0] in ("enter", "leave", "launch")]


def as_planned(result: dict[str, Any], trace: list[int], limits: FetchLimits) -> list[tuple[str, Any]]:
    """The events that a plan of ``trace`` asks for."""
    plan = plan_step(trace, result["units"], result["numels"], limits)
    events: list[tuple[str, Any]] = []
    for event, fetch in zip(trace, plan.fetches, strict=True):
        events.append(("enter", event) if event >= 0 else ("leave", ~event))
        for launch in (fetch.launch, fetch.prefetch):
            if launch:
                events.append(("launch", tuple(result["names"][index] for index in launch)))
    return events


# Prefetching: nothing, a unit ahead, two, everything. Kept: nothing, the last units, everything.
LIMITS = [(0, 10**6, 0), (1, 10**6, 0), (150, 400, 0), (10**6, 10**6, 0), (60, 250, 400), (10**6, 10**6, 10**6)]


@pytest.mark.slow
@pytest.mark.parametrize("numbers", LIMITS, ids=lambda numbers: "-".join(map(str, numbers)))
@pytest.mark.parametrize("world", [2, 3])
def test_launches_are_those_of_the_plan(pools: Pools, world: int, numbers: tuple[int, int, int]) -> None:
    result = watched(pools, world, limited(*numbers))[0]
    assert [sum(result["numels"][i] for i in unit) for unit in result["units"]] == [0, 104, 154, 60, 18]
    expected = as_planned(result, FORWARD + BACKWARD, FetchLimits(*numbers))
    for window in result["windows"][2:]:
        assert told_and_launched(window) == expected
    # Without a plan: at every use, its own.
    for window in result["windows"][:2]:
        at_hand = [("enter", event) if event >= 0 else ("leave", ~event) for event in FORWARD + BACKWARD]
        found = told_and_launched(window)
        assert [event for event in found if event[0] != "launch"] == at_hand
        for index, (kind, names) in enumerate(found):
            if kind == "launch":
                unit = found[index - 1][1]
                assert found[index - 1][0] == "enter"
                assert names == tuple(result["names"][i] for i in result["units"][unit])


def test_prefetches_precede_the_module_that_needs_them(pools: Pools) -> None:
    result = watched(pools, 2, limited(1, 10**6, 0))[0]
    window = result["windows"][-1]
    places = {event: index for index, event in reversed(list(enumerate(window)))}  # of the first such event
    # The root has no parameters: the first layer, and the one ahead of it, travel together.
    first = ("launch", tuple(f"layers.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")))
    assert places[first] < places["module", "layers.0"]
    for layer in (2, 3):
        launch = ("launch", (f"layers.{layer}.weight", f"layers.{layer}.bias"))
        # Under way before the layer in front of it begins to compute.
        assert places[launch] < places["module", f"layers.{layer - 1}"] < places["module", f"layers.{layer}"]
    backward = window[window.index(("leave", 0)) + 1 :]
    places = {event: index for index, event in reversed(list(enumerate(backward)))}
    for layer in (0, 1):
        launch = ("launch", (f"layers.{layer}.weight", f"layers.{layer}.bias"))
        assert places[launch] < places["gradient", f"layers.{layer}"] < places["enter", layer + 1]


@pytest.mark.slow
def test_no_prefetch_without_overlap(pools: Pools) -> None:
    for reuse in (0, 10**6):
        zero = {**limited(10**6, 10**6, reuse), "overlap_comm": False}
        result = watched(pools, 2, zero)[0]
        expected = as_planned(result, FORWARD + BACKWARD, FetchLimits(0, 10**6, reuse))
        for window in result["windows"][2:]:
            assert told_and_launched(window) == expected
        overlapping = watched(pools, 2, {**limited(10**6, 10**6, reuse), "overlap_comm": True})[0]
        assert overlapping["windows"][-1] != result["windows"][-1]
        assert_same_bits(overlapping["parameters"], result["parameters"], f"reuse {reuse}")


@pytest.mark.fast("300-Checkpointed")
@pytest.mark.parametrize("model", ["Tower", "Lora", "Checkpointed", "Reentrant"])
@pytest.mark.parametrize("live", [1, 160, 230, 300])
def test_live_parameters_stay_below_their_limit(pools: Pools, live: int, model: str) -> None:
    sizes = {"reentrant": model == "Reentrant"} if model in ("Checkpointed", "Reentrant") else {}
    name = "Checkpointed" if sizes else model
    result = watched(pools, 2, limited(10**6, live, 10**6), name, **sizes)[0]
    for found, needed in result["peaks"]:
        assert found <= max(live, needed)
    highest = max(found for found, _ in result["peaks"])
    assert highest >= min(LARGEST, live)
    unlimited = watched(pools, 2, limited(10**6, 10**6, 10**6), name, **sizes)[0]
    assert max(found for found, _ in unlimited["peaks"]) > max(live, LARGEST)
    assert_same_bits(result["parameters"], unlimited["parameters"], "limited")


# -------------------------------------------------------------------- traces that do not fit


@pytest.mark.slow
@pytest.mark.parametrize(
    "zero", [SHORT, limited(60, 100, 10**6), limited(10**6, 10**6, 10**6)], ids="short few all".split()
)
def test_a_departure_is_served_and_traced_anew(pools: Pools, zero: dict[str, Any]) -> None:
    steps = [["012"]] * 3 + [["021"]] * 4 + [["0"], ["01"], ["0120"]] + [["10"]] * 3
    case = {"model": "Ways", "steps": steps}
    plain = pools(2).run(f"{CASES}:ways", {"config": config(2, "fp32", 1, 0.4, ADAMW), **case})
    ranks = pools(2).run(f"{CASES}:ways", {"config": config(3, "fp32", 1, 0.4, ADAMW, zero=zero), **case})
    known = [False, False, True]  # recorded, agreed upon, followed
    for result, reference in zip(ranks, plain, strict=True):
        assert result["following"] == [*known, *known, True, False, False, False, *known]
        assert result["losses"] == reference["losses"]
        assert_same_bits(result["parameters"], reference["parameters"], "stage 3")
        assert result["collectives"] == ranks[0]["collectives"]
        assert not result["warnings"]
        assert not result["on demand only"]


def test_a_backward_that_departs_from_the_plan_may_bring_late_gradients(pools: Pools) -> None:
    """The forward is that of the plan, and the backward goes through layer 0 once more, whose bucket has been sent."""
    case = {"model": "Ways", "steps": [["0|02"]] * 4 + [["002"]] * 2}
    zero = {**limited(10**6, 10**6, 10**6), "reduce_bucket_size": 1}
    plain = pools(2).run(f"{CASES}:ways", {"config": config(2, "fp32", 1, 0.4, ADAMW), **case})
    ranks = pools(2).run(f"{CASES}:ways", {"config": config(3, "fp32", 1, 0.4, ADAMW, zero=zero), **case})
    for result, reference in zip(ranks, plain, strict=True):
        assert result["losses"] == reference["losses"]
        assert_same_bits(result["parameters"], reference["parameters"], "stage 3")
        assert result["collectives"] == ranks[0]["collectives"]


@pytest.mark.slow
def test_evaluation_has_a_plan_of_its_own(pools: Pools) -> None:
    case = {"model": "Ways", "steps": [["012"]] * 6, "evaluate": True}
    plain = pools(2).run(f"{CASES}:ways", {"config": config(2, "fp32", 1, 0.4, ADAMW), **case})
    setting = config(3, "fp32", 1, 0.4, ADAMW, zero=limited(60, 250, 0))
    for result, reference in zip(pools(2).run(f"{CASES}:ways", {"config": setting, **case}), plain, strict=True):
        assert result["following"][-2:] == [True, True]
        assert result["losses"] == reference["losses"]


@pytest.mark.parametrize("transport", ["ways", "over_messages"], ids=["shared-memory", "messages"])
def test_ranks_with_different_traces_train_without_a_plan(pools: Pools, transport: str) -> None:
    # Two modules with one weight: the gathers are the same, the modules are not.
    steps = [["01", "10"]] * 5

    def run(stage: int, zero: dict[str, Any]) -> list[dict[str, Any]]:
        setting = config(stage, "fp32", 1, 0.4, ADAMW, zero=zero)
        case: dict[str, Any] = {"config": setting, "model": "Twins", "steps": steps}
        if transport == "over_messages":
            case = {"function": "ways", "kwargs": case}
        return pools(2).run(f"{CASES}:{transport}", case)

    plain = run(2, {})
    for rank, (result, reference) in enumerate(zip(run(3, limited(10**6, 10**6, 10**6)), plain, strict=True)):
        assert result["on demand only"]
        assert result["following"] == [False] * 5
        assert len(result["warnings"]) == (rank == 0)
        assert all("different order" in warning for warning in result["warnings"])
        assert result["losses"] == reference["losses"]
        assert_same_bits(result["parameters"], reference["parameters"], "stage 3")


@pytest.mark.parametrize("after", [0, 4], ids=["on-demand", "planned"])
def test_ranks_that_differ_are_told_where_they_stand(pools: Pools, after: int) -> None:
    case = {"config": config(3, zero=SHORT), "after": after}
    messages = [result["message"] for result in pools(2).run(f"{CASES}:different_orders", case)]
    for rank, message in enumerate(messages):
        assert f"rank {rank}: the ranks launched different collectives" in message
        assert "This rank stood at event" in message
    if after == 0:
        assert "layers.1.0" in messages[0].split("This rank stood at")[1]
        assert "layers.2.0" in messages[1].split("This rank stood at")[1]


# -------------------------------------------------------------------- reductions


def test_unused_parameters_hold_back_no_reduction(pools: Pools) -> None:
    apart = {**SHORT, "reduce_bucket_size": 1}  # a bucket for each layer
    for result in pools(2).run(f"{CASES}:launch_order", {"config": config(3, zero=apart)}):
        assert len(result["orders"][0]) == 6
        unused = next(bucket for bucket, name in result["buckets"].items() if name.startswith("spare"))
        for order, early in zip(result["orders"], result["early"], strict=True):
            assert order[-1] == unused
            assert sorted(order) == sorted(result["buckets"])
            assert early == 4  # all but the unused layer's and that of the first, whose gradient is just coming


@pytest.mark.fast("ranks0")
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_the_order_of_reductions_is_everyones(pools: Pools, ranks: list[int]) -> None:
    # All parameters stay whole, so that a rank may use a layer that another does not.
    zero = {**SHORT, "stage3_param_persistence_threshold": 1000}
    case = {"spare_on": ranks}
    results = pools(2).run(f"{CASES}:launch_order", {"config": config(3, "fp32", optimizer=ADAMW, zero=zero), **case})
    plain = pools(2).run(f"{CASES}:launch_order", {"config": config(2, "fp32", optimizer=ADAMW), **case})
    for result, reference in zip(results, plain, strict=True):
        assert result["orders"] == results[0]["orders"]
        assert_same_bits(result["parameters"], reference["parameters"], "stage 3")
