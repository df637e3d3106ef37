"""Recorded traffic: neither a collective nor a byte more than the stage needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, config
from tests.toolkit.pool import Pools
from tests.toolkit.traffic import (
    gathered,
    plain_calls,
    stage3_engine,
    stage3_loss,
)
from tests.toolkit.training import engine_window, make_engine, snapshot
from zerolite.comm import NullCommunicator, host_group, use_communicator


def calls_per_step(config: dict[str, Any], model: str = "OddModel") -> dict[str, Any]:
    """The collectives of the third window and of reading its norm, and the number of trained elements."""
    engine = make_engine(config, model)
    for step in range(3):
        with zerolite.comm.record() as recorder:
            engine_window(engine, model, step, config["gradient_accumulation_steps"])
            engine.get_global_grad_norm()
            engine.module  # noqa: B018 waits for the gathers that are still in flight
    trained = [p.numel() for p in engine.module.parameters() if p.requires_grad]
    return {"calls": plain_calls(recorder), "numel": sum(trained)}


def initial_sync(config: dict[str, Any], same: bool) -> dict[str, Any]:
    """Build with one seed or with one seed per rank."""
    model = models.build(models.Buffered, seed=5 if same else 5 + dist.get_rank())
    mine = {name: value.clone() for name, value in model.state_dict().items()}
    with zerolite.comm.record() as recorder:
        engine = zerolite.initialize(model, config)
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    return {"mine": mine, "parameters": snapshot(engine), "buffers": buffers, "calls": plain_calls(recorder)}


def buffers_after_training(config: dict[str, Any], broadcast: bool) -> dict[str, Any]:
    engine = make_engine(config, "Buffered", broadcast_buffers=broadcast)
    with torch.no_grad():
        engine.module.offset.fill_(float(dist.get_rank()))
        engine.module.calls.fill_(10 * dist.get_rank())
    with zerolite.comm.record() as recorder:
        engine_window(engine, "Buffered", 0, 1)
    engine.eval()
    with zerolite.comm.record() as evaluation, torch.no_grad():
        engine(models.float_batch(0, 0, 0)[0])
    return {
        "offset": engine.module.offset.clone(),
        "calls": engine.module.calls.clone(),
        "broadcasts": recorder.count(tag="buffers"),
        "dtypes": len({buffer.dtype for buffer in engine.module.buffers()}),
        "in evaluation": len(evaluation.calls),
    }


def host_groups(config: dict[str, Any], directory: str) -> dict[str, list[str]]:
    """The purposes of the gloo groups that have been asked for after each of these."""
    asked: list[str] = []
    found, make = {}, host_group.second_group

    def note(parent: Any, backend: str, purpose: str) -> Any:
        asked.append(purpose)
        return make(parent, backend, purpose)

    host_group.second_group = note  # type: ignore[assignment]
    try:
        engine = make_engine(config)
        engine_window(engine, "OddModel", 0, 1)
        found["a step"] = list(asked)
        engine.save_checkpoint(directory)
        engine.save_checkpoint(directory)
        found["two checkpoints"] = list(asked)
        engine.full_optimizer_state_dict()
        found["whole states"] = asked[len(found["two checkpoints"]) :]
    finally:
        host_group.second_group = make
    return found


def different_models(config: dict[str, Any]) -> str:
    width = 5 + dist.get_rank()
    try:
        make_engine(config, "OddModel", {"width": width})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


# -------------------------------------------------------------------- stage 3


def what_moves(engine: Any) -> dict[str, Any]:
    """Padded elements: of each unit's and parameter's gather, of all that stays whole, of every bucket."""
    coordinator = engine.coordinator
    sizes = [handle.full.numel() for handle in coordinator.handles]
    units = [[sizes[index] for index in unit] for unit in coordinator.schedule.units]
    return {
        "units": {unit.name: (sum(numels), len(numels)) for unit, numels in zip(coordinator.units, units, strict=True)},
        "parameters": {handle.name: size for handle, size in zip(coordinator.handles, sizes, strict=True)},
        "persistent": sum(size for h, size in zip(coordinator.handles, sizes, strict=True) if h.persistent),
        "buckets": [bucket.numel for bucket in engine._reducer.layout.buckets],
    }


def stage3_calls(
    config: dict[str, Any],
    model: str = "Tower",
    sizes: dict[str, Any] | None = None,
    steps: int = 5,
    evaluate: bool = False,
) -> dict[str, Any]:
    """The collectives of every window, after which nothing may be left gathered; of an evaluation after each window
    (``evaluate``), and what the engine moves."""
    engine = stage3_engine(config, model, sizes)
    windows, evaluations, following = [], [], []
    for step in range(steps):
        with zerolite.comm.record() as recorder:
            for micro in range(config["gradient_accumulation_steps"]):
                engine.backward(stage3_loss(engine, model, step, micro))
                following.append(engine.coordinator.schedule.following)
                assert not gathered(engine), gathered(engine)
                engine.step()
        assert not gathered(engine), gathered(engine)
        pairs = zip(plain_calls(recorder), recorder.calls, strict=True)
        windows.append([(*call, entry.tensors) for call, entry in pairs])
        if evaluate:
            with zerolite.comm.record() as recorder, torch.no_grad():
                engine(models.float_batch(step, 0, 0)[0])
            assert not gathered(engine), gathered(engine)
            evaluations.append(plain_calls(recorder))
    return {"windows": windows, "evaluations": evaluations, "following": following, **what_moves(engine)}


# -------------------------------------------------------------------- addresses


def unaligned(configs: Sequence[dict[str, Any]], world: int) -> list[dict[str, int]]:
    """For each config, as the last of ``world`` ranks that send nothing: how many collectives of each kind ran from
    `initialize` to the second step and a state dict, and how many of their buffers do not begin on 16 bytes."""
    found = []
    for settings in configs:
        with use_communicator(lambda rank, _: NullCommunicator(world - 1, world)), zerolite.comm.record() as recorder:
            engine = make_engine(settings | {"consistency_check_interval": 0})
            for step in range(3):
                engine_window(engine, "OddModel", step, 1)
            engine.full_state_dict()
        counts = Counter(call.op for call in recorder.calls)
        found.append({**counts, "unaligned": sum(call.unaligned for call in recorder.calls)})
    return found


# -------------------------------------------------------------------- the tests


BYTES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2, "torch.float64": 8}


@pytest.mark.fast("2-1-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_collectives_and_bytes_of_a_step(pools: Pools, world: int, accumulation: int, precision: str) -> None:
    for stage in (0, 1, 2):
        setting = config(stage, precision, accumulation, 0.4, ADAMW)
        for result in pools(world).run(calls_per_step, {"config": setting}):
            calls = result["calls"]
            gradients = [call for call in calls if call[4] == "gradients"]
            parameters = [call for call in calls if call[4] == "parameters"]
            others = [call for call in calls if call[4] not in ("gradients", "parameters")]
            passes = accumulation if stage == 2 else 1
            buckets = len(gradients) // passes
            assert buckets >= 3, "the test needs several buckets"
            assert Counter(call[0] for call in gradients) == {
                ("all_reduce" if stage == 0 else "reduce_scatter"): buckets * passes
            }
            assert Counter(call[0] for call in parameters) == ({} if stage == 0 else {"all_gather": buckets})
            assert [(call[0], call[4]) for call in others] == [("all_reduce", "stats")]
            assert others[0][3] < 1000
            # Each slot of a bucket is padded to 32 elements, a bucket to 32 × world: what is left is the model, once
            # per pass and phase.
            padding = 32 * (16 + buckets * world)
            sent = sum(call[1] for call in gradients) / passes
            assert result["numel"] <= sent <= result["numel"] + padding
            if stage:
                assert sum(call[1] for call in parameters) == sent
            for call in calls:
                assert call[3] == call[1] * BYTES[call[2]]
            dtype = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]
            assert {call[2] for call in parameters} <= {dtype}
            # Stages 0 and 1 sum several 16-bit gradients in fp32 before they send them; a single one travels as it is.
            if accumulation == 1 or stage == 2:
                assert {call[2] for call in gradients} == {dtype}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_process_sends_nothing(pools: Pools, stage: int) -> None:
    assert pools(1).run(calls_per_step, {"config": config(stage)})[0]["calls"] == []


@pytest.mark.fast("fp32-1")
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rank_0s_values_become_everyones(pools: Pools, stage: int, precision: str) -> None:
    ranks = pools(3).run(initial_sync, {"config": config(stage, precision), "same": False})
    assert not torch.equal(ranks[0]["mine"]["net.first.weight"], ranks[1]["mine"]["net.first.weight"])
    for result in ranks:
        for name, value in result["parameters"].items():
            assert torch.equal(value, ranks[0]["mine"][name].to(value.dtype)), name
        assert_same_bits(result["buffers"], {name: ranks[0]["mine"][name] for name in result["buffers"]}, "buffers")
        assert {name: buffer.dtype for name, buffer in result["buffers"].items()} == {
            "offset": torch.float32,
            "calls": torch.int64,
            "wide": torch.float64,
        }


def test_equal_models_are_checked_and_not_sent(pools: Pools) -> None:
    for stage in (0, 2):
        for result in pools(3).run(initial_sync, {"config": config(stage), "same": True}):
            assert not [call for call in result["calls"] if call[0] == "broadcast"]
            assert sum(call[3] for call in result["calls"]) < 1000
            for name, value in result["parameters"].items():
                assert torch.equal(value, result["mine"][name])


def test_different_models_are_refused_on_all_ranks(pools: Pools) -> None:
    for message in pools(2).run(different_models, {"config": config(1)}):
        assert "different models" in message


def test_buffers_are_sent_before_each_training_forward_if_asked(pools: Pools) -> None:
    for rank, result in enumerate(pools(2).run(buffers_after_training, {"config": config(1), "broadcast": True})):
        assert torch.equal(result["offset"], torch.zeros(3)), rank
        assert result["calls"] == 2  # one training and one evaluation forward, from rank 0's zero
        assert result["broadcasts"] == result["dtypes"]
        assert result["in evaluation"] == 0
    for rank, result in enumerate(pools(2).run(buffers_after_training, {"config": config(1), "broadcast": False})):
        assert torch.equal(result["offset"], torch.full((3,), float(rank)))
        assert result["calls"] == 10 * rank + 2
        assert result["broadcasts"] == 0


@pytest.mark.fast("2", "6")
@pytest.mark.parametrize("world", [2, 3, 6])
def test_every_buffer_of_a_collective_begins_on_16_bytes(pools: Pools, world: int) -> None:
    """From other addresses NCCL takes a slow path. Sizes are odd, parameters 0-dim, empty, tied and frozen."""
    zero = {0: {}, "moving": MOVING, "some stay": {**MOVING, "stage3_param_persistence_threshold": 30}}
    settings = [
        config(stage, precision, 1, 0.4, ADAMW, zero=keys)
        for stage, kinds in ((1, (0,)), (2, (0,)), (3, ("moving", "some stay")))
        for keys in (zero[kind] for kind in kinds)
        for precision in ("fp32", "bf16")
    ]
    for found in pools(1).run(unaligned, {"configs": settings, "world": world})[0]:
        assert found["all_gather"] >= 9 and found["reduce_scatter"] >= 6
        assert found["unaligned"] == 0, found


# -------------------------------------------------------------------- stage 3

PLANNED = 2  # the first step that follows a plan
STEPS = 5  # the plan of the first step is adopted in the second, or in the third with an evaluation in between
SIZES = (7, 13, 11, 5, 3)
MOVING = {  # no prefetch: a gather for each unit
    "stage3_param_persistence_threshold": 0,
    "stage3_module_granularity_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
}
SHORT = {**MOVING, "stage3_max_reuse_distance": 0}  # released after every use
Call = tuple[str, int, str, int, str, int]


def whole(numel: int, world: int) -> int:
    """Elements of a gather: equal parts, which begin on 16 bytes in every dtype."""
    return math.ceil(numel / world / 16) * 16 * world if world > 1 else numel


def tower_units(world: int) -> list[int]:
    """Elements of each layer's gather."""
    return [whole(a * b, world) + whole(b, world) for a, b in zip(SIZES, SIZES[1:], strict=False)]


def bucket(numels: list[int], world: int) -> int:
    """Elements of the reduction of some parameters."""
    return sum(whole(numel, world) for numel in numels)


def tower_buckets(world: int) -> list[int]:
    """Elements of each reduction: the last two layers have at most reduce_bucket_size together."""
    *large, third, fourth = ([a * b, b] for a, b in zip(SIZES, SIZES[1:], strict=False))
    return [*(bucket(numels, world) for numels in large), bucket([*third, *fourth], world)]


def stage3(pools: Pools, world: int, zero: dict[str, Any], accumulation: int = 1, **case: Any) -> dict[str, Any]:
    """Return what :func:`stage3_calls` saw on rank 0, having been the same on all ranks."""
    precision = case.pop("precision", "fp32")
    setting = config(3, precision, accumulation, 0.4, ADAMW, zero=zero)
    results = pools(world).run(stage3_calls, {"config": setting, "steps": STEPS, **case})
    for result in results[1:]:
        assert result["windows"] == results[0]["windows"]
    assert results[0]["following"][-accumulation:] == [True] * accumulation
    return results[0]


def gathers(window: list[Call]) -> list[int]:
    return [call[1] for call in window if (call[0], call[4]) == ("all_gather", "parameters")]


def reductions(window: list[Call]) -> list[int]:
    return [call[1] for call in window if (call[0], call[4]) == ("reduce_scatter", "gradients")]


def others(window: list[Call]) -> list[tuple[str, str]]:
    mine = {("all_gather", "parameters"), ("reduce_scatter", "gradients")}
    return [(call[0], call[4]) for call in window if (call[0], call[4]) not in mine]


@pytest.mark.fast("2-1-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_stage_3_gathers_twice_and_reduces_once(pools: Pools, world: int, accumulation: int, precision: str) -> None:
    result = stage3(pools, world, SHORT, accumulation, precision=precision)
    units, buckets = tower_units(world), tower_buckets(world)
    for number, window in enumerate(result["windows"]):
        # Forward and backward of every micro-batch; one launch with the weight and the bias of a layer.
        assert gathers(window) == (units + units[::-1]) * accumulation
        assert {call[5] for call in window if call[4] == "parameters"} == {2}
        assert reductions(window) == buckets[::-1] * accumulation
        # Until the first backward that follows the plan, ranks agree at the end of each on what to reduce when.
        agreements = accumulation if number < PLANNED else int(number == PLANNED)
        assert others(window) == [("all_reduce", "stats")] * (agreements + 1)
        dtype = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]
        assert {call[2] for call in window if call[4] in ("parameters", "gradients")} == {dtype}
        for call in window:
            assert call[3] == call[1] * BYTES.get(call[2], 8)


def test_stage_3_prefetches_of_one_answer_are_one_launch(pools: Pools) -> None:
    # The root has no parameters: at its begin all layers are asked for, in forward and in backward.
    result = stage3(pools, 2, {**SHORT, "stage3_prefetch_bucket_size": 10**6})
    assert gathers(result["windows"][0]) == tower_units(2) + tower_units(2)[::-1], "on demand"
    assert gathers(result["windows"][-1]) == [sum(tower_units(2))] * 2


def test_stage_3_on_one_process_sends_nothing(pools: Pools) -> None:
    result = stage3(pools, 1, SHORT)
    assert result["windows"] == [[]] * STEPS


@pytest.mark.slow
def test_stage_3_what_is_kept_is_not_gathered_again(pools: Pools) -> None:
    units = tower_units(2)
    result = stage3(pools, 2, MOVING, accumulation=2)
    assert gathers(result["windows"][0]) == (units + units[::-1]) * 2  # nothing is known yet
    assert gathers(result["windows"][-1]) == units * 2  # kept from forward to backward
    # Between a layer's two uses lie those of the layers after it, twice.
    for kept in range(1, len(SIZES)):
        exact = [a * b + b for a, b in zip(SIZES, SIZES[1:], strict=False)]
        distance = 2 * sum(exact[-kept + 1 :]) if kept > 1 else 1
        result = stage3(pools, 2, {**MOVING, "stage3_max_reuse_distance": distance})
        assert gathers(result["windows"][-1]) == units + units[::-1][kept:]


@pytest.mark.slow
def test_stage_3_what_stays_whole_is_gathered_once_per_step(pools: Pools) -> None:
    # Biases stay whole: 13, 11, 5 and 3 elements.
    result = stage3(pools, 2, {**SHORT, "stage3_param_persistence_threshold": 13}, accumulation=3)
    weights = [whole(a * b, 2) for a, b in zip(SIZES, SIZES[1:], strict=False)]
    biases = sum(whole(b, 2) for b in SIZES[1:])
    assert result["persistent"] == biases
    for window in result["windows"]:
        assert gathers(window) == [*(weights + weights[::-1]) * 3, biases]
        assert [call[5] for call in window if call[4] == "parameters"][-1] == 1, "they lie side by side"
    # Their gradients are reduced with those of the layer that backward leaves last. The last two weights are small.
    first, second, *last = [[a * b] for a, b in zip(SIZES, SIZES[1:], strict=False)]
    expected = [bucket(sum(last, []), 2), bucket(second, 2), bucket([*first, *SIZES[1:]], 2)]
    assert [reductions(window) for window in result["windows"]] == [expected * 3] * STEPS
    # Everything stays whole: the parameters move when they change, and never else; a bucket has at most 100 elements.
    result = stage3(pools, 2, {"stage3_param_persistence_threshold": 1000}, accumulation=3)
    for window in result["windows"]:
        assert gathers(window) == [bucket([11, 55, 5, 15, 3], 2) + bucket([91, 13, 143], 2)]
        assert len(reductions(window)) % 3 == 0


def test_stage_3_small_subtrees_are_one_launch(pools: Pools) -> None:
    result = stage3(pools, 2, {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0})
    for window in result["windows"]:
        assert gathers(window) == [sum(tower_units(2))] * 2
        assert [call[5] for call in window if call[4] == "parameters"] == [8, 8]
        assert reductions(window) == [sum(tower_buckets(2))]


@pytest.mark.parametrize("zero", [SHORT, MOVING], ids=["released", "kept"])
def test_stage_3_evaluation_gathers_once(pools: Pools, zero: dict[str, Any]) -> None:
    result = stage3(pools, 2, zero, evaluate=True)
    for evaluation in result["evaluations"]:
        assert [call[:2] for call in evaluation] == [("all_gather", numel) for numel in tower_units(2)]


def test_stage_3_frozen_base(pools: Pools) -> None:
    result = stage3(pools, 2, SHORT, model="Lora")
    pairs = list(zip(SIZES, SIZES[1:], strict=False))
    units = [[whole(a * b, 2) + whole(b, 2), whole(2 * a, 2), whole(2 * b, 2)] for a, b in pairs]
    forward = [numel for unit in units for numel in unit]
    once = forward[0]  # no gradient comes to the first frozen layer: neither its weights nor its input need one
    thin = [2 * size for pair in pairs for size in pair]
    adapters = [bucket(thin[4:], 2), bucket(thin[:4], 2)]  # each of at most 100 elements
    for window in result["windows"]:
        assert gathers(window)[: len(forward)] == forward
        assert Counter(gathers(window)) == Counter(forward * 2) - Counter([once])
        assert reductions(window) == adapters


@pytest.mark.fast("tied")
@pytest.mark.parametrize("functional", [False, True], ids=["tied", "called"])
def test_stage_3_tied_weights_are_one(pools: Pools, functional: bool) -> None:
    weight, middle = whole(55, 2), whole(25, 2)
    result = stage3(pools, 2, MOVING, model="Tied", sizes={"functional": functional})
    assert gathers(result["windows"][-1]) == [weight, middle]
    for window in result["windows"]:
        assert reductions(window) == [bucket([25, 55], 2)]
    result = stage3(pools, 2, SHORT, model="Tied", sizes={"functional": functional})
    # Each use is a gather of its own, unless the root uses the weight: then it lives as long as the root's forward. The
    # backward of an embedding needs none.
    forward = [weight, middle] if functional else [weight, middle, weight]
    expected = forward * 2 if functional else [*forward, weight, middle]
    assert gathers(result["windows"][-1]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_stage_3_recomputation_gathers_as_planned(pools: Pools, reentrant: bool) -> None:
    units = tower_units(2)
    first, rest = units[0], units[1:]
    case = {"model": "Checkpointed", "sizes": {"reentrant": reentrant}}
    # Reentrant: the recomputation is a use, the backward another. Otherwise it runs inside the backward's use.
    times = 2 if reentrant else 1
    again = [numel for numel in rest[::-1] for _ in range(times)]
    result = stage3(pools, 2, SHORT, **case)
    for window in result["windows"]:
        assert gathers(window) == [*units, *again, first]
        assert reductions(window) == tower_buckets(2)[::-1]
    result = stage3(pools, 2, {**MOVING, "stage3_max_reuse_distance": 1}, **case)
    assert gathers(result["windows"][-1]) == [*units, *rest[-2::-1], first]
    result = stage3(pools, 2, MOVING, **case)
    assert gathers(result["windows"][-1]) == units


def test_the_hosts_meet_over_a_group_when_a_checkpoint_is_saved(pools: Pools, tmp_path: Path) -> None:
    """None is made in a job that saves none: each rank of gloo connects to all others. What is no checkpoint goes over
    another one: a save in the background may be using the first."""
    for asked in pools(2).run(host_groups, {"config": config(2), "directory": str(tmp_path)}):
        assert asked == {"a step": [], "two checkpoints": ["checkpoint"], "whole states": ["whole model"]}
