"""Recorded traffic: neither a collective nor a byte more than the stage needs."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, config
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.traffic import gathered, plain_calls, stage3_engine, stage3_loss
from tests.toolkit.training import engine_window, make_engine, snapshot
from zerolite.comm import NullCommunicator, use_communicator


def calls_of_a_step(config: dict[str, Any]) -> tuple[list[Any], int]:
    """The collectives of the third window and of reading its norm, and the number of trained elements."""
    engine = make_engine(config)
    for step in range(3):
        with zerolite.comm.record() as recorder:
            engine_window(engine, "OddModel", step, config["gradient_accumulation_steps"])
            engine.get_global_grad_norm()
            engine.module  # noqa: B018 waits for the gathers that are still in flight
    return plain_calls(recorder), sum(p.numel() for p in engine.module.parameters() if p.requires_grad)


# -------------------------------------------------------------------- stage 3


def what_moves(engine: Any) -> dict[str, Any]:
    """Padded elements: of each unit's and parameter's gather, of all that stays whole, of every bucket."""
    coordinator = engine.coordinator
    sizes = [handle.full.numel() for handle in coordinator.handles]
    units = [[sizes[index] for index in unit] for unit in coordinator.schedule.groups]
    return {
        "units": {
            unit.name: (sum(numels), len(numels)) for unit, numels in zip(coordinator.groups, units, strict=True)
        },
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
    """The collectives of every window, of an evaluation after each (``evaluate``), and what the engine moves. Nothing
    is left gathered."""
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


BYTES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2, "torch.float64": 8}


@pytest.mark.fast("1-bf16-2")
@on_ranks(2, 4)
@pytest.mark.parametrize(("accumulation", "precision"), [(1, "bf16"), (3, "fp32"), (3, "bf16")])
def test_collectives_and_bytes_of_a_step(accumulation: int, precision: str) -> None:
    for stage in (0, 1, 2):
        calls, numel = calls_of_a_step(config(stage, precision, accumulation, 0.4, ADAMW))
        gradients, parameters = ([call for call in calls if call[4] == tag] for tag in ("gradients", "parameters"))
        others = [call for call in calls if call[4] not in ("gradients", "parameters")]
        passes = accumulation if stage == 2 else 1
        buckets = len(gradients) // passes
        assert buckets >= 3, "the test needs several buckets"
        reduction = "all_reduce" if stage == 0 else "reduce_scatter"
        assert Counter(call[0] for call in gradients) == {reduction: buckets * passes}
        assert Counter(call[0] for call in parameters) == ({} if stage == 0 else {"all_gather": buckets})
        assert [(call[0], call[4]) for call in others] == [("all_reduce", "stats")] and others[0][3] < 1000
        # Each slot of a bucket is padded to 32 elements, a bucket to 32 × world: what is left is the model, once per
        # pass and phase.
        padding = 32 * (16 + buckets * dist.get_world_size())
        sent = sum(call[1] for call in gradients) / passes
        assert numel <= sent <= numel + padding
        assert not stage or sum(call[1] for call in parameters) == sent
        assert all(call[3] == call[1] * BYTES[call[2]] for call in calls)
        dtype = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]
        assert {call[2] for call in parameters} <= {dtype}
        # Stages 0 and 1 sum several 16-bit gradients in fp32 before they send them; a single one travels as it is.
        if accumulation == 1 or stage == 2:
            assert {call[2] for call in gradients} == {dtype}


@on_ranks(1)
def test_one_process_sends_nothing() -> None:
    for stage in range(4):
        assert calls_of_a_step(config(stage, zero=SHORT if stage == 3 else {}))[0] == []


@on_ranks(3)
@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (2, "fp32")])
def test_rank_0s_values_become_everyones(stage: int, precision: str) -> None:
    """Models that are equal are checked, and not sent."""
    first = models.build(models.Buffered, seed=5).state_dict()
    for same in (False, True):
        model = models.build(models.Buffered, seed=5 if same else 5 + dist.get_rank())
        with zerolite.comm.record() as recorder:
            engine = zerolite.initialize(model, config(stage, precision))
        found = snapshot(engine) | dict(engine.module.named_buffers())
        assert_same_bits(found, {name: first[name].to(value.dtype) for name, value in found.items()}, "values")
        dtypes = {name: buffer.dtype for name, buffer in engine.module.named_buffers()}
        assert dtypes == {"offset": torch.float32, "calls": torch.int64, "wide": torch.float64}
    assert not recorder.select("broadcast") and sum(call.nbytes for call in recorder.calls) < 1000


@on_ranks(1)
@pytest.mark.parametrize("ranks", [2, 6])
def test_every_buffer_of_a_collective_begins_on_16_bytes(ranks: int) -> None:
    """From other addresses NCCL takes a slow path. Sizes are odd, parameters 0-dim, empty, tied and frozen."""
    some = {**MOVING, "stage3_param_persistence_threshold": 30}
    for stage, zero in ((1, {}), (2, {}), (3, MOVING), (3, some)):
        for precision in ("fp32", "bf16"):
            settings = config(stage, precision, 1, 0.4, ADAMW, zero=zero, consistency_check_interval=0)
            # The last of so many ranks, which send nothing.
            alone = use_communicator(lambda rank, _: NullCommunicator(ranks - 1, ranks))
            with alone, zerolite.comm.record() as recorder:
                engine = make_engine(settings)
                for step in range(3):
                    engine_window(engine, "OddModel", step, 1)
                engine.full_state_dict()
            assert recorder.count("all_gather") >= 9 and recorder.count("reduce_scatter") >= 6
            assert not [call for call in recorder.calls if call.unaligned]


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
@pytest.mark.parametrize(("world", "accumulation", "precision"), [(2, 1, "bf16"), (3, 3, "fp32"), (4, 1, "fp32")])
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
    alone = stage3(pools, 2, {**SHORT, "stage3_prefetch_bucket_size": 10**6, "overlap_comm": False})
    assert gathers(alone["windows"][-1]) == gathers(result["windows"][0]), "nothing is prefetched"


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
