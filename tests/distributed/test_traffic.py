"""Recorded traffic: neither a collective nor a byte more than the stage needs."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolite
from benchmarks.null_communicator import NullCommunicator
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import ADAMW, PARTITIONED, config
from tests.toolkit.ranks import on_ranks
from tests.toolkit.stage3_cases import left_gathered
from tests.toolkit.traffic import Adapted, Checkpointed, Conditioned, Tied, Tower, plain_calls
from tests.toolkit.training import engine_window, loss_of, make_engine, snapshot
from zerolite.comm import use_communicator
from zerolite.engine.engine_base import parts_of


def calls_of_a_step(config: dict[str, Any]) -> tuple[list[Any], int]:
    """The collectives of the third window and of reading its norm, and the number of trained elements."""
    engine = make_engine(config)
    for step in range(3):
        with zerolite.comm.record() as recorder:
            engine_window(engine, "OddModel", step, config["gradient_accumulation_steps"])
            engine.get_global_grad_norm()
            parts_of(engine).param_gatherer.wait_all()
    return plain_calls(recorder), sum(p.numel() for p in engine.module.parameters() if p.requires_grad)


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

STEPS = 5  # the plan of the first step is adopted in the second, or in the third with an evaluation in between
SIZES = (7, 13, 11, 5, 3)
LAYERS = list(zip(SIZES, SIZES[1:], strict=False))
MOVING = {**PARTITIONED["kept"], "stage3_prefetch_bucket_size": 0}  # a gather for each unit
SHORT = {**MOVING, "stage3_max_reuse_distance": 0}  # released after every use
Call = tuple[str, int, str, int, str, int]


def whole(numel: int, world: int) -> int:
    """Elements of a gather: equal parts, which begin on 16 bytes in every dtype."""
    return math.ceil(numel / world / 16) * 16 * world if world > 1 else numel


def tower_units(world: int) -> list[int]:
    """Elements of each layer's gather."""
    return [whole(a * b, world) + whole(b, world) for a, b in LAYERS]


def bucket(numels: list[int], world: int) -> int:
    """Elements of the reduction of some parameters."""
    return sum(whole(numel, world) for numel in numels)


def tower_buckets(world: int) -> list[int]:
    """Elements of each reduction: the last two layers have at most reduce_bucket_size together."""
    *large, third, fourth = ([a * b, b] for a, b in LAYERS)
    return [*(bucket(numels, world) for numels in large), bucket([*third, *fourth], world)]


def stage3(
    zero: dict[str, Any],
    accumulation: int = 1,
    precision: str = "fp32",
    model: type[nn.Module] = Tower,
    evaluations: list[Any] | None = None,
    **arguments: Any,
) -> list[list[Call]]:
    """The collectives of every window, the same on all ranks; those of an evaluation after each go to ``evaluations``.
    Nothing is left gathered, and the last step follows a plan."""
    made = config(3, precision, accumulation, 0.4, ADAMW, zero=zero)
    engine = zerolite.initialize(models.build(model, **arguments), made)
    windows = []
    for step in range(STEPS):
        with zerolite.comm.record() as recorder:
            for micro in range(accumulation):
                engine.backward(loss_of(engine, step, micro, "OddModel" if model is Tied else "Mlp"))
                assert step < STEPS - 1 or engine._parts.coordinator.schedule.following
                assert not left_gathered(engine), left_gathered(engine)
                engine.step()
        assert not left_gathered(engine), left_gathered(engine)
        pairs = zip(plain_calls(recorder), recorder.calls, strict=True)
        windows.append([(*call, entry.tensors) for call, entry in pairs])
        if evaluations is not None:
            with zerolite.comm.record() as recorder, torch.no_grad():
                engine(models.float_batch(step, 0, 0)[0])
            assert not left_gathered(engine), left_gathered(engine)
            evaluations.append(plain_calls(recorder))
    assert_same_on_ranks({"windows": windows})
    return windows


def gathers(window: list[Call]) -> list[int]:
    return [call[1] for call in window if (call[0], call[4]) == ("all_gather", "parameters")]


def reductions(window: list[Call]) -> list[int]:
    return [call[1] for call in window if (call[0], call[4]) == ("reduce_scatter", "gradients")]


def others(window: list[Call]) -> list[tuple[str, str]]:
    mine = {("all_gather", "parameters"), ("reduce_scatter", "gradients")}
    return [(call[0], call[4]) for call in window if (call[0], call[4]) not in mine]


@pytest.mark.fast("2")
@on_ranks(2, 3, 4)
def test_stage_3_gathers_twice_and_reduces_once() -> None:
    world = dist.get_world_size()
    accumulation, precision = {2: (1, "bf16"), 3: (3, "fp32"), 4: (1, "fp32")}[world]
    units, buckets = tower_units(world), tower_buckets(world)
    for window in stage3(SHORT, accumulation, precision):
        # Forward and backward of every micro-batch; one launch with the weight and the bias of a layer.
        assert gathers(window) == (units + units[::-1]) * accumulation
        assert {call[5] for call in window if call[4] == "parameters"} == {2}
        assert reductions(window) == buckets[::-1] * accumulation
        assert others(window) == [("all_reduce", "stats")]
        dtype = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]
        assert {call[2] for call in window if call[4] in ("parameters", "gradients")} == {dtype}
        assert all(call[3] == call[1] * BYTES.get(call[2], 8) for call in window)


@on_ranks(2)
def test_stage_3_prefetches_of_one_answer_are_one_launch() -> None:
    # The root has no parameters: at its begin all layers are asked for, in forward and in backward.
    first, *_, last = stage3({**SHORT, "stage3_prefetch_bucket_size": 10**6})
    assert gathers(first) == tower_units(2) + tower_units(2)[::-1], "on demand"
    assert gathers(last) == [sum(tower_units(2))] * 2
    alone = stage3({**SHORT, "stage3_prefetch_bucket_size": 10**6, "overlap_comm": False})
    assert gathers(alone[-1]) == gathers(first), "nothing is prefetched"


@pytest.mark.slow
@on_ranks(2)
def test_stage_3_what_is_kept_is_not_gathered_again() -> None:
    units = tower_units(2)
    first, *_, last = stage3(MOVING, accumulation=2)
    assert gathers(first) == (units + units[::-1]) * 2  # nothing is known yet
    assert gathers(last) == units * 2  # kept from forward to backward
    # Between a layer's two uses lie those of the layers after it, twice.
    for kept in range(1, len(SIZES)):
        exact = [a * b + b for a, b in LAYERS]
        distance = 2 * sum(exact[-kept + 1 :]) if kept > 1 else 1
        windows = stage3({**MOVING, "stage3_max_reuse_distance": distance})
        assert gathers(windows[-1]) == units + units[::-1][kept:]


@pytest.mark.slow
@on_ranks(2)
def test_stage_3_what_stays_whole_is_gathered_once_per_step() -> None:
    # Biases stay whole: 13, 11, 5 and 3 elements.
    weights = [whole(a * b, 2) for a, b in LAYERS]
    biases = sum(whole(b, 2) for b in SIZES[1:])
    # Their gradients are reduced with those of the layer that backward leaves last. The last two weights are small.
    first, second, *last = [[a * b] for a, b in LAYERS]
    expected = [bucket(sum(last, []), 2), bucket(second, 2), bucket([*first, *SIZES[1:]], 2)]
    for window in stage3({**SHORT, "stage3_param_persistence_threshold": 13}, accumulation=3):
        assert gathers(window) == [*(weights + weights[::-1]) * 3, biases]
        assert [call[5] for call in window if call[4] == "parameters"][-1] == 1, "they lie side by side"
        assert reductions(window) == expected * 3
    # Everything stays whole: the parameters move when they change, and never else; a bucket has at most 100 elements.
    for window in stage3({"stage3_param_persistence_threshold": 1000}, accumulation=3):
        assert gathers(window) == [bucket([11, 55, 5, 15, 3], 2) + bucket([91, 13, 143], 2)]
        assert len(reductions(window)) % 3 == 0


@pytest.mark.slow
@on_ranks(2)
def test_stage_3_small_subtrees_are_one_launch() -> None:
    for window in stage3({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}):
        assert gathers(window) == [sum(tower_units(2))] * 2
        assert [call[5] for call in window if call[4] == "parameters"] == [8, 8]
        assert reductions(window) == [sum(tower_buckets(2))]


@on_ranks(2)
def test_stage_3_evaluation_gathers_once() -> None:
    for zero in (SHORT, MOVING):
        evaluations: list[Any] = []
        stage3(zero, evaluations=evaluations)
        for evaluation in evaluations:
            assert [call[:2] for call in evaluation] == [("all_gather", numel) for numel in tower_units(2)]


@on_ranks(2)
def test_stage_3_frozen_base() -> None:
    units = [[whole(a * b, 2) + whole(b, 2), whole(2 * a, 2), whole(2 * b, 2)] for a, b in LAYERS]
    forward = [numel for unit in units for numel in unit]
    once = forward[0]  # no gradient comes to the first frozen layer: neither its weights nor its input need one
    thin = [2 * size for pair in LAYERS for size in pair]
    adapters = [bucket(thin[4:], 2), bucket(thin[:4], 2)]  # each of at most 100 elements
    for window in stage3(SHORT, layer=Adapted):
        assert gathers(window)[: len(forward)] == forward
        assert Counter(gathers(window)) == Counter(forward * 2) - Counter([once])
        assert reductions(window) == adapters


@on_ranks(2)
@pytest.mark.parametrize("functional", [False, True], ids=["tied", "called"])
def test_stage_3_tied_weights_are_one(functional: bool) -> None:
    weight, middle = whole(55, 2), whole(25, 2)
    windows = stage3(MOVING, model=Tied, functional=functional)
    assert gathers(windows[-1]) == [weight, middle]
    for window in windows:
        assert reductions(window) == [bucket([25, 55], 2)]
    # Each use is a gather of its own, unless the root uses the weight: then it lives as long as the root's forward. The
    # backward of an embedding needs none.
    forward = [weight, middle] if functional else [weight, middle, weight]
    expected = forward * 2 if functional else [*forward, weight, middle]
    assert gathers(stage3(SHORT, model=Tied, functional=functional)[-1]) == expected


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_stage_3_recomputation_gathers_as_planned(reentrant: bool) -> None:
    units = tower_units(2)
    first, rest = units[0], units[1:]
    case: dict[str, Any] = {"model": Checkpointed, "reentrant": reentrant}
    # Reentrant: the recomputation is a use, the backward another. Otherwise it runs inside the backward's use.
    again = [numel for numel in rest[::-1] for _ in range(2 if reentrant else 1)]
    for window in stage3(SHORT, **case):
        assert gathers(window) == [*units, *again, first]
        assert reductions(window) == tower_buckets(2)[::-1]
    last = stage3({**MOVING, "stage3_max_reuse_distance": 1}, **case)[-1]
    assert gathers(last) == [*units, *rest[-2::-1], first]
    assert gathers(stage3(MOVING, **case)[-1]) == units


@pytest.mark.slow
@on_ranks(2)
def test_stage_3_a_forward_without_a_graph_delays_no_reduction_but_in_the_first_step() -> None:
    for step, window in enumerate(stage3(SHORT, model=Conditioned)):
        assert reductions(window) == tower_buckets(2)[::-1]
        moved = [call[0] for call in window if call[4] in ("parameters", "gradients")]
        assert ("reduce_scatter" in moved[: -len(LAYERS)]) == (step > 0), moved
