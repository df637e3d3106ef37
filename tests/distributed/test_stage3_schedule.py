"""Stage 3 gathers when its plan says so, within its limits, on all ranks alike; where no plan fits it takes no harm."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits, everywhere_equal
from tests.toolkit.configs import ADAMW, config
from tests.toolkit.pool import Pools
from tests.toolkit.traffic import gathered, stage3_engine, stage3_loss
from zerolite.zero import GatheredParameters, ZeroParamStatus
from zerolite.zero.stage3.fetch_schedule import FetchLimits, plan_step

Event = tuple[str, Any]


class Watch:
    """Everything that the coordinator of ``engine`` does, in order: ("enter" | "leave", unit) as its schedule is told,
    ("launch", names), ("module", name) when a module's forward begins, ("gradient", name) when its backward does.

    ``peaks``: after each launch, elements that are live or in flight, and how many the open uses need.
    """

    def __init__(self, engine: Any) -> None:
        self.coordinator = engine.coordinator
        self.events: list[Event] = []
        self.peaks: list[tuple[int, int]] = []
        for name, module in engine.module.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda module, args, name=name: self._note("module", name))
                module.register_full_backward_pre_hook(lambda module, grads, name=name: self._note("gradient", name))
        schedule = self.coordinator.schedule
        self._enter, self._leave = schedule.enter, schedule.leave
        schedule.enter = self._on_enter
        schedule.leave = self._on_leave

    def _note(self, kind: str, what: Any) -> None:
        self.events.append((kind, what))

    def _on_enter(self, unit: int) -> Any:
        self._note("enter", unit)
        return self._enter(unit)

    def _on_leave(self, unit: int) -> Any:
        self._note("leave", unit)
        return self._leave(unit)

    @contextlib.contextmanager
    def launches(self) -> Iterator[None]:
        """Note launches inside."""
        group = self.coordinator.group
        original = group.all_gather

        def launch(members: Sequence[Any]) -> None:
            original(members)
            self._note("launch", tuple(member.name for member in members))
            self.peaks.append((self._live(), self._needed()))

        group.all_gather = launch
        try:
            yield
        finally:
            del group.all_gather

    def _live(self) -> int:
        return sum(h.numel for h in self.coordinator.handles if h.status is not ZeroParamStatus.NOT_AVAILABLE)

    def _needed(self) -> int:
        uses = [*self.coordinator._stack, *self.coordinator._backward]
        wanted = {index for use in uses for index in self.coordinator.schedule.units[use.unit.index]}
        return sum(self.coordinator.handles[index].numel for index in wanted)

    def unhook(self) -> None:
        """The schedule's own methods again."""
        del self.coordinator.schedule.enter, self.coordinator.schedule.leave


def events_of_steps(
    config: dict[str, Any], model: str = "Tower", sizes: dict[str, Any] | None = None, steps: int = 4
) -> dict[str, Any]:
    """The events of every step, and what a plan for them needs: units, elements, names."""
    engine = stage3_engine(config, model, sizes)
    watch = Watch(engine)
    schedule = engine.coordinator.schedule
    windows, following = [], []
    with watch.launches():
        for step in range(steps):
            start = len(watch.events)
            engine.backward(stage3_loss(engine, model, step))
            windows.append(watch.events[start:])
            following.append(schedule.following)
            engine.step()
            assert not gathered(engine), gathered(engine)
    watch.unhook()
    return {
        "windows": windows,
        "following": following,
        "peaks": watch.peaks,
        "names": [handle.name for handle in engine.coordinator.handles],
        "unit names": [unit.name for unit in engine.coordinator.units],
        "units": [list(unit) for unit in schedule.units],
        "numels": [handle.numel for handle in engine.coordinator.handles],
        "parameters": whole_values(engine),
    }


def whole_values(engine: Any) -> dict[str, Tensor]:
    """The parameters by name, whole, copied."""
    with GatheredParameters(engine.module):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


class Ways(nn.Module):
    """Layers of different sizes that a string of digits calls in any order: each maps [B, 6] to [B, 6]. A "|" keeps
    gradients from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 6)) for hidden in (3, 5, 7)
        )

    def forward(self, x: Tensor, way: str) -> Tensor:
        for digit in way:
            x = x.detach() if digit == "|" else x + self.layers[int(digit)](x)
        return x


class Twins(nn.Module):
    """Two modules with one weight; ``way`` says which is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.left = nn.Linear(6, 6, bias=False)
        self.right = nn.Linear(6, 6, bias=False)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor, way: str) -> Tensor:
        x = torch.tanh(self.first(x))
        for digit in way:
            x = torch.tanh([self.left, self.right][int(digit)](x))
        return x


KINDS = {"Ways": Ways, "Twins": Twins}


def ways(config: dict[str, Any], model: str, steps: Sequence[Sequence[str]], evaluate: bool = False) -> dict[str, Any]:
    """Train with ``steps[step][rank]`` (or ``[0]``) as the way through the model; at any stage."""
    engine = zerolite.initialize(models.build(KINDS[model]), config)
    schedule = engine.coordinator.schedule if engine.coordinator is not None else None
    following, losses, collectives, warnings = [], [], [], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zerolite")
    logger.addHandler(handler)
    try:
        for step, choices in enumerate(steps):
            way = choices[engine.rank % len(choices)]
            generator = torch.Generator().manual_seed(100 * step + engine.rank)
            x = torch.randn(4, 6, generator=generator)
            with zerolite.comm.record() as recorder:
                loss = engine(x, way).square().mean()
                engine.backward(loss)
                following.append(schedule is not None and schedule.following)
                engine.step()
            losses.append(loss.item())
            collectives.append([(c.op, c.numel, c.tag) for c in recorder.calls])
            if schedule is not None:
                assert not gathered(engine), gathered(engine)
            if evaluate:
                with torch.no_grad():
                    losses.append(engine(x, way[::-1]).square().mean().item())
    finally:
        logger.removeHandler(handler)
    values = whole_values(engine)
    everywhere_equal_values(values)
    return {
        "following": following,
        "losses": losses,
        "collectives": collectives,
        "warnings": warnings,
        "parameters": values,
        "on demand only": schedule is not None and schedule.on_demand_only,
    }


def everywhere_equal_values(values: dict[str, Tensor]) -> None:
    """The same bits on all ranks."""
    holder = nn.Module()
    for name, value in values.items():
        holder.register_parameter(name.replace(".", "_"), nn.Parameter(value.clone()))
    everywhere_equal(holder)


def different_orders(config: dict[str, Any], after: int) -> dict[str, Any]:
    """From step ``after`` on rank 1 calls the layers in another order: what each rank raises there."""
    engine = zerolite.initialize(models.build(Ways), config)
    for step in range(after + 1):
        way = "021" if step == after and dist.get_rank() == 1 else "012"
        try:
            engine.backward(engine(torch.ones(4, 6), way).square().mean())
            engine.step()
        except RuntimeError as error:
            assert step == after
            return {"message": str(error), "cause": str(error.__cause__)}
    raise AssertionError("nothing was raised")


class Towering(nn.Module):
    """A chain whose ``spare`` layer, registered last, gets a gradient only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 if not i else 8 + i, 9 + i) for i in range(5))
        self.spare = nn.Linear(6, 13)

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        hidden = x
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden + self.spare(x) if spare else hidden


def launch_order(config: dict[str, Any], spare_on: Sequence[int] = ()) -> dict[str, Any]:
    """Train a model with an unused layer; ``spare_on``: the ranks that use it from step 2 on. Of every step: the
    buckets in the order of their reductions, and how many of them were launched before the last gradient came."""
    engine = zerolite.initialize(models.build(Towering), config)
    orders, early = [], []
    for step in range(5):
        use = step >= 2 and engine.rank in spare_on
        with zerolite.comm.record() as recorder:
            seen: list[int] = []
            first = engine.module.layers[0].weight
            handle = first.register_hook(
                lambda gradient, recorder=recorder, seen=seen: seen.append(recorder.count(tag="gradients"))
            )
            generator = torch.Generator().manual_seed(10 * step + engine.rank)
            x = torch.randn(4, 6, generator=generator)
            engine.backward(engine(x, use).square().mean())
            handle.remove()
            engine.step()
        orders.append([call.key - 1 for call in recorder.select(tag="gradients")])
        early.append(max(seen))
    result = {"orders": orders, "early": early, "buckets": {}}
    for bucket in engine._reducer.layout.buckets:
        result["buckets"][bucket.index] = bucket.slots[0].name
    values = whole_values(engine)
    everywhere_equal_values(values)
    return result | {"parameters": values}


def over_messages(function: str, kwargs: dict[str, Any]) -> Any:
    """Another function of this module, without shared memory."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = "0"
    return globals()[function](**kwargs)


# -------------------------------------------------------------------- the tests


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
    ranks = pools(world).run(events_of_steps, {"config": setting, "model": model, "sizes": sizes})
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
    plain = pools(2).run(ways, {"config": config(2, "fp32", 1, 0.4, ADAMW), **case})
    ranks = pools(2).run(ways, {"config": config(3, "fp32", 1, 0.4, ADAMW, zero=zero), **case})
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
    plain = pools(2).run(ways, {"config": config(2, "fp32", 1, 0.4, ADAMW), **case})
    ranks = pools(2).run(ways, {"config": config(3, "fp32", 1, 0.4, ADAMW, zero=zero), **case})
    for result, reference in zip(ranks, plain, strict=True):
        assert result["losses"] == reference["losses"]
        assert_same_bits(result["parameters"], reference["parameters"], "stage 3")
        assert result["collectives"] == ranks[0]["collectives"]


@pytest.mark.slow
def test_evaluation_has_a_plan_of_its_own(pools: Pools) -> None:
    case = {"model": "Ways", "steps": [["012"]] * 6, "evaluate": True}
    plain = pools(2).run(ways, {"config": config(2, "fp32", 1, 0.4, ADAMW), **case})
    setting = config(3, "fp32", 1, 0.4, ADAMW, zero=limited(60, 250, 0))
    for result, reference in zip(pools(2).run(ways, {"config": setting, **case}), plain, strict=True):
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
        return pools(2).run(f"{__name__}:{transport}", case)

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
    messages = [result["message"] for result in pools(2).run(different_orders, case)]
    for rank, message in enumerate(messages):
        assert f"rank {rank}: the ranks launched different collectives" in message
        assert "This rank stood at event" in message
    if after == 0:
        assert "layers.1.0" in messages[0].split("This rank stood at")[1]
        assert "layers.2.0" in messages[1].split("This rank stood at")[1]


# -------------------------------------------------------------------- reductions


def test_unused_parameters_hold_back_no_reduction(pools: Pools) -> None:
    apart = {**SHORT, "reduce_bucket_size": 1}  # a bucket for each layer
    for result in pools(2).run(launch_order, {"config": config(3, zero=apart)}):
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
    results = pools(2).run(launch_order, {"config": config(3, "fp32", optimizer=ADAMW, zero=zero), **case})
    plain = pools(2).run(launch_order, {"config": config(2, "fp32", optimizer=ADAMW), **case})
    for result, reference in zip(results, plain, strict=True):
        assert result["orders"] == results[0]["orders"]
        assert_same_bits(result["parameters"], reference["parameters"], "stage 3")
