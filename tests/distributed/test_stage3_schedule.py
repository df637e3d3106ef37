"""Stage 3 gathers when its plan says so, within its limits, on all ranks alike; where no plan fits it takes no harm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import ADAMW, PARTITIONED, at, config
from tests.toolkit.faults import Warnings
from tests.toolkit.ranks import on_ranks
from tests.toolkit.stage3_cases import left_gathered
from tests.toolkit.traffic import Tower
from tests.toolkit.training import loss_of, snapshot


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


class Twins(Ways):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight


def ways(
    stage: int,
    zero: dict[str, Any],
    steps: Sequence[Sequence[str]],
    model: type[nn.Module] = Ways,
    evaluate: bool = False,
) -> dict[str, Any]:
    """Train with ``steps[step][rank]`` (or ``[0]``) as the way through the model."""
    engine = zerolite.initialize(models.build(model), config(stage, "fp32", 1, 0.4, ADAMW, zero=zero))
    schedule = engine._parts.coordinator.schedule if engine._parts.coordinator is not None else None
    following, losses = [], []
    with Warnings() as warnings:
        for step, choices in enumerate(steps):
            way = choices[engine.rank % len(choices)]
            generator = torch.Generator().manual_seed(100 * step + engine.rank)
            x = torch.randn(4, 6, generator=generator)
            loss = engine(x, way).square().mean()
            engine.backward(loss)
            following.append(schedule is not None and schedule.following)
            engine.step()
            losses.append(loss.item())
            assert not left_gathered(engine), left_gathered(engine)
            if evaluate:
                with torch.no_grad():
                    losses.append(engine(x, way[::-1]).square().mean().item())
    values = snapshot(engine)
    assert_same_on_ranks(values)
    return {
        "following": following,
        "losses": losses,
        "warnings": warnings.messages,
        "parameters": values,
        "on demand only": schedule is not None and schedule.on_demand_only,
    }


SHORT = PARTITIONED["moving"]


def limited(prefetch: int, live: int, reuse: int) -> dict[str, Any]:
    names = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
    return {**SHORT, **dict(zip(names, (prefetch, live, reuse), strict=True))}


@on_ranks(2)
def test_prefetches_precede_the_module_that_needs_them() -> None:
    """Events are the begin of modules' forward ("module") and backward ("gradient"), and launches of gathers."""
    made = config(3, "fp32", 1, 0.4, ADAMW, zero=limited(1, 10**6, 0))
    engine = zerolite.initialize(models.build(Tower), made)
    events: list[tuple[str, Any]] = []
    for name, module in engine.module.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda *_, name=name: events.append(("module", name)))
            module.register_full_backward_pre_hook(lambda *_, name=name: events.append(("gradient", name)))
    issue_all_gather = engine._parts.coordinator.context.issue_all_gather

    def noted(members: Sequence[Any]) -> None:
        issue_all_gather(members)
        events.append(("launch", tuple(member.name for member in members)))

    with mock.patch.object(engine._parts.coordinator.context, "issue_all_gather", noted):
        for step in range(3):
            start = len(events)
            engine.backward(loss_of(engine, step))
            engine.step()
    assert engine._parts.coordinator.schedule.following and not left_gathered(engine)
    window = events[start:]
    assert_same_on_ranks({"events": window})
    places = {event: index for index, event in reversed(list(enumerate(window)))}  # of the first such event
    # The root has no parameters: the first layer, and the one ahead of it, travel together.
    first = ("launch", tuple(f"layers.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")))
    assert places[first] < places["module", "layers.0"]
    for layer in (2, 3):
        launch = ("launch", (f"layers.{layer}.weight", f"layers.{layer}.bias"))
        # Under way before the layer in front of it begins to compute.
        assert places[launch] < places["module", f"layers.{layer - 1}"] < places["module", f"layers.{layer}"]
    backward = window[window.index(("gradient", "layers.3")) :]
    places = {event: index for index, event in reversed(list(enumerate(backward)))}
    for layer in (0, 1):
        launch = ("launch", (f"layers.{layer}.weight", f"layers.{layer}.bias"))
        assert places[launch] < places["gradient", f"layers.{layer}"]


# -------------------------------------------------------------------- traces that do not fit


@on_ranks(2)
def test_a_backward_that_departs_from_the_plan_may_bring_late_gradients() -> None:
    """The forward is that of the plan, and the backward goes through layer 0 once more, whose bucket has been sent."""
    steps = [["0|02"]] * 4 + [["002"]] * 2
    zero = {**limited(10**6, 10**6, 10**6), "reduce_bucket_size": 1}
    plain, found = ways(2, {}, steps), ways(3, zero, steps)
    assert found["losses"] == plain["losses"]
    assert_same_bits(found["parameters"], plain["parameters"], "stage 3")


class Borrowing(nn.Module):
    """Two layers; ``borrow``: then a product with the first one's weight, read from outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, borrow: bool) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return x @ self.first.weight if borrow else x


@pytest.mark.slow
@pytest.mark.parametrize("between", ["an evaluation", "a backward"])
@on_ranks(2)
def test_a_weight_that_is_read_while_it_is_kept_comes_back_for_the_readers_backward(between: str) -> None:
    """A plan keeps it for the backward of its own module; what comes between ends the step, and releases it."""
    found = []
    for stage in ("2", "3 kept"):
        engine = zerolite.initialize(models.build(Borrowing), at(stage))
        for step in range(5):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + engine.rank))
            loss = engine(x, step == 4).square().mean()
            if step == 4 and between == "an evaluation":
                with torch.no_grad():
                    engine(x, False)
            elif step == 4:
                engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            assert step != 3 or engine._parts.coordinator is None or engine._parts.coordinator.schedule.following
            engine.step()
        found.append(snapshot(engine))
    assert_same_bits(*found, "stages 2 and 3")


@pytest.mark.slow
@on_ranks(2)
def test_evaluation_has_a_plan_of_its_own() -> None:
    plain, found = (ways(*at, [["012"]] * 6, evaluate=True) for at in ((2, {}), (3, limited(60, 250, 0))))
    assert found["following"][-2:] == [True, True] and found["losses"] == plain["losses"]


@on_ranks(2)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_ranks_with_different_traces_train_without_a_plan(shared_memory: bool) -> None:
    os.environ["ZEROLITE_SHARED_MEMORY"] = str(int(shared_memory))
    # Two modules with one weight: the gathers are the same, the modules are not.
    settings = ((2, {}), (3, limited(10**6, 10**6, 10**6)))
    plain, found = (ways(*at, [["01", "10"]] * 5, Twins) for at in settings)
    assert found["on demand only"] and found["following"] == [False] * 5
    assert len(found["warnings"]) == (dist.get_rank() == 0)
    assert all("different order" in warning for warning in found["warnings"])
    assert found["losses"] == plain["losses"]
    assert_same_bits(found["parameters"], plain["parameters"], "stage 3")


@on_ranks(2)
@pytest.mark.parametrize("after", [0, 4], ids=["on-demand", "planned"])
def test_ranks_that_differ_are_told_where_they_stand(after: int) -> None:
    """From step ``after`` on rank 1 calls the layers in another order."""
    rank = dist.get_rank()
    engine = zerolite.initialize(models.build(Ways), config(3, zero=SHORT))
    for _ in range(after):
        engine.backward(engine(torch.ones(4, 6), "012").square().mean())
        engine.step()
    with pytest.raises(RuntimeError, match="This rank was in the forward of") as caught:
        engine.backward(engine(torch.ones(4, 6), "021" if rank else "012").square().mean())
        engine.step()
    assert f"rank {rank}: the ranks launched different collectives" in str(caught.value)
    if after == 0:
        assert f"layers.{1 + rank}.0" in str(caught.value).split("This rank was in")[1]


@pytest.mark.slow
@on_ranks(2)
def test_unused_parameters_hold_back_no_reduction() -> None:
    model = models.build(Tower)
    model.spare = nn.Linear(6, 13)
    engine = zerolite.initialize(model, config(3, zero={**SHORT, "reduce_bucket_size": 1}))  # a bucket for each layer
    buckets = {bucket.slots[0].name.split(".")[0]: bucket.index for bucket in engine._parts.buffer.layout.buckets}
    for step in range(4):
        early: list[int] = []
        with zerolite.comm.record() as recorder:
            first = engine.module.layers[0].weight
            handle = first.register_hook(lambda _, e=early, r=recorder: e.append(r.count(tag="gradients")))
            engine.backward(loss_of(engine, step))
            handle.remove()
            engine.step()
        order = [call.key - 1 for call in recorder.select(tag="gradients")]
        assert order[-1] == buckets["spare"] and len(set(order)) == len(order) == 5
        assert max(early) == 3  # all but the unused layer's and that of the first, whose gradient is just coming
