"""Bytes of training: what tensors take, in multiples of the parameters; and engine.memory_report(), to the byte."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import ADAMW, at, config
from tests.toolkit.memory import events_in_order, mark, memory_profile
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import backward
from zerolite.zero import GatheredParameters
from zerolite.zero.layout import shard_numel

TOLERANCE = 0.05
ADAM = ("Adam", {"lr": 1e-3})


def assert_bytes(
    config: dict[str, Any], depth: int, width: int, since: int, steps: int, wanted: float, limit: float
) -> None:
    """Bytes per parameter, counted from before the model was made: ``wanted`` are held after the last step, and at most
    ``limit`` since step ``since``."""
    with memory_profile() as profiler:
        engine = zerolite.initialize(models.build(models.Chain, depth=depth, width=width), config)
        x = torch.randn(2, width)
        for step in range(steps):
            if step == since:
                mark("begin")
            engine.backward(engine(x).square().mean())
            engine.step()
        mark("end")
    events = events_in_order(profiler)
    held = list(itertools.accumulate(nbytes / (depth * width**2) for _, nbytes, _ in events))
    names = [name for *_, name in events]
    begin, end = names.index("begin"), names.index("end")
    resident, peak = held[end], max(held[begin : end + 1])
    assert resident == pytest.approx(wanted, rel=TOLERANCE), (resident, wanted)
    assert resident < peak <= limit * (1 + TOLERANCE), (peak, limit)


DEPTH, WIDTH = 48, 192  # one layer is 2 % of the model, so that a single fresh gradient stays below the tolerance
BUCKET = DEPTH // 8 * WIDTH**2  # an eighth of the model


@pytest.mark.fast("2-True-2")
@on_ranks(2, 4, timeout=180)
@pytest.mark.parametrize(("stage", "shared_memory"), [(1, False), (2, False), (2, True)])
def test_resident_and_peak_bytes(stage: int, shared_memory: bool) -> None:
    os.environ["ZEROLITE_SHARED_MEMORY"] = str(int(shared_memory))
    world, share = dist.get_world_size(), 2 * BUCKET / (DEPTH * WIDTH**2)
    zero = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    wanted = 2 + 12 / world  # compute weights; masters and two moments in fp32. Gradients are 2 more
    limit = 4 + 12 / world if stage == 1 else 2 + 14 / world + 3 * share  # two buckets are reduced while one fills
    if shared_memory:
        # Two regions of a bucket per process, mapped by all of them: the account of each shows them all.
        wanted, limit = wanted + world * 2 * share, limit + world * 2 * share
    elif stage == 2:
        # While two buckets are in flight, what the other ranks send of theirs needs room as well.
        limit += 2 * (world - 1) / world * share
    setting = config(stage, "bf16", optimizer=ADAM, zero=zero)
    # The first backward, which does not know how many contributions a gradient has, takes no more than later ones.
    assert_bytes(setting, DEPTH, WIDTH, 0, 2, wanted, limit)


@pytest.mark.slow
@on_ranks(2, 4, timeout=300)
@pytest.mark.parametrize("shared_memory", [False, True])
def test_resident_and_peak_bytes_of_stage_3(shared_memory: bool) -> None:
    os.environ["ZEROLITE_SHARED_MEMORY"] = str(int(shared_memory))
    world, depth, width = dist.get_world_size(), 24, 384
    layer, numel = width**2, depth * width**2  # a bucket of gradients is a layer
    live = 4 * layer
    zero = {"stage3_prefetch_bucket_size": 2 * layer, "stage3_max_live_parameters": live, "reduce_bucket_size": layer}
    wanted = 14 / world
    limit = wanted + 2 / world + (2 * live + 2 * 2 * layer) / numel
    if shared_memory:
        # Two regions per process, mapped by all of them: for gathers as large as the shards of the first launch of a
        # backward or forward, the layer that is needed at once and two ahead; for reductions as a bucket.
        mapped = 2 * world * (2 * 3 * layer / world + 2 * layer) / numel
        wanted, limit = wanted + mapped, limit + mapped
    setting = at("3 kept", "bf16", optimizer=ADAM, zero=zero)
    assert_bytes(setting, depth, width, 3, 4, wanted, limit)


# -------------------------------------------------------------------- engine.memory_report()


# The trained parameters of Mixed in the order of the layout, from the last one on, in buckets of at most 100 elements
# or one parameter; a slot begins at a multiple of 32 elements, a bucket ends at one of 32 per rank.
BUCKETS = [32 + 39, 169, 13, 91]  # last.bias and last.weight, middle, first.bias, first.weight
UNITS = [[91, 13], [169], [39, 3]]  # at stage 3: by module; a rank's part of each is a multiple of 16 elements
FROZEN = [169, 13]
BUFFERS = 3 * 4 + 8 + 2 * 8
REGION = 4096  # the least that is shared between processes: a page, three times per process and communicator
PRECISIONS = {"fp32": (4, 0), "bf16": (2, 4), "fp16": (2, 4)}  # bytes of a compute parameter, of a separate master
CHANGING = ("gradients", "communication_buckets")


def settings(stage: int | str, precision: str = "fp32", accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return at(stage, precision, accumulation, optimizer=ADAMW, **more)


def moments(config: dict[str, Any], optimizer: str = "", init: bool = False) -> dict[str, Any]:
    """The items at each moment of the second window: after each backward, before the update (when all is
    reduced), after the window, with all parameters gathered. ``optimizer``: one of torch's by name, instead of the
    config's. ``init``: the model is made partitioned."""
    with zerolite.zero.Init() if init else contextlib.nullcontext():
        model = models.build(models.Mixed)
    given = {}
    if optimizer:
        config = {key: value for key, value in config.items() if key != "optimizer"}
        given = {"optimizer": getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)}
    engine = zerolite.initialize(model, config, **given)
    found = {"made": engine.memory_report().items}
    for window in range(2):
        for micro in range(engine.gradient_accumulation_steps):
            backward(engine, window, micro)
            found[f"backward {micro}"] = engine.memory_report().items
            if micro + 1 == engine.gradient_accumulation_steps:
                engine.reduce_gradients()
                found["reduced"] = engine.memory_report().items
            engine.step()
    found["after"] = engine.memory_report().items
    with GatheredParameters(engine.module):
        found["gathered"] = engine.memory_report().items
    found["released"] = engine.memory_report().items
    return found


def up(numel: int, unit: int) -> int:
    return -(-numel // unit) * unit


def flat(world: int) -> int:
    """Elements of all buckets, stages 0 to 2."""
    return sum(up(numel, 32 * world) for numel in BUCKETS)


def rows(world: int) -> int:
    """Elements of this rank's rows, stage 3."""
    return sum(up(shard_numel(numel, world), 16) for unit in UNITS for numel in unit)


def whole(world: int) -> int:
    """Elements of all parameters when gathered."""
    return sum(world * shard_numel(numel, world) for numel in [*sum(UNITS, []), *FROZEN])


def states(stage: int, precision: str, world: int) -> dict[str, int]:
    """Bytes of what stays the same from the first update on."""
    compute, master = PRECISIONS[precision]
    if stage == 3:
        trained = owned = rows(world)
        frozen = sum(shard_numel(numel, world) for numel in FROZEN)
    else:
        trained, frozen = flat(world), sum(FROZEN)
        owned = trained if stage == 0 else trained // world
    return {
        "compute_parameters": compute * (trained + frozen),
        "master_weights": master * owned,
        "optimizer_states": 2 * 4 * owned,
        "buffers": BUFFERS,
        **dict.fromkeys(("persistent_parameters", "gathered_parameters", "offload_buffers", "activations"), 0),
    }


def gradients(stage: int, precision: str, world: int, accumulation: int) -> int:
    """Bytes of the mean gradient that an update takes: summed in fp32 where there are several contributions."""
    width = PRECISIONS[precision][0] if accumulation == 1 else 4
    return width * {0: flat(world), 3: rows(world)}.get(stage, flat(world) // world)


def without(items: dict[str, int], *names: str) -> dict[str, int]:
    return {name: nbytes for name, nbytes in items.items() if name not in names}


@pytest.mark.fast("2-2")
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("stage", range(4))
def test_every_stage_and_precision_to_the_byte(stage: int) -> None:
    world = dist.get_world_size()
    for precision in PRECISIONS:
        for micros in (1, 2):
            found = moments(settings(stage, precision, micros))
            expected = states(0 if world == 1 and stage < 3 else stage, precision, world)
            gradient = gradients(stage, precision, world, micros)
            for moment in ("made", "reduced", "after", "released"):
                assert without(found[moment], *CHANGING) == expected, (precision, micros, moment)
            assert found["reduced"]["gradients"] == gradient, (precision, micros)
            # At stage 0 the buckets stay, to be used again: those on the CPU are expensive to allocate.
            assert found["after"]["gradients"] == (gradient if stage == 0 else 0), (precision, micros)
            full = PRECISIONS[precision][0] * whole(world) if stage == 3 and world > 1 else 0
            assert without(found["gathered"], *CHANGING) == {**expected, "gathered_parameters": full}


@pytest.mark.slow
@on_ranks(2)
def test_sums_in_the_middle_of_a_window() -> None:
    found = [moments(settings(stage, "bf16", 3)) for stage in range(4)]
    # Nothing is reduced before the last micro-batch at stages 0 and 1: whole sums, in fp32.
    for stage, micro in ((0, 0), (1, 0), (1, 1)):
        assert found[stage][f"backward {micro}"]["gradients"] == 4 * flat(2)
    # The others reduce each; what is still on its way is no gradient yet: the last two buckets at stage 2.
    assert found[2]["backward 0"]["gradients"] == 4 * (flat(2) - sum(up(b, 64) for b in BUCKETS[-2:])) // 2
    assert found[2]["backward 1"]["gradients"] == 4 * flat(2) // 2
    assert found[3]["backward 1"]["gradients"] == 4 * rows(2)


@pytest.mark.slow
@on_ranks(2)
def test_what_stays_whole_and_what_a_communicator_keeps() -> None:
    found = {
        "persistent": moments(settings("3 defaults")),
        "in zero.Init": moments(settings(3), init=True),
        "moving": moments(settings(3)),
        "stage 2": moments(settings(2)),
        "stage 0": moments(settings(0)),
    }
    persistent = found["persistent"]
    assert persistent["after"]["persistent_parameters"] == 4 * whole(2)
    assert persistent["after"]["gathered_parameters"] == persistent["gathered"]["gathered_parameters"] == 0
    assert found["in zero.Init"] == found["moving"]
    # Every process maps the regions of both; gathers have a communicator of their own. Sums of fewer than 4096
    # elements, such as the statistics and all of stage 0's here, have regions of their own.
    buckets = [one["after"]["communication_buckets"] // (2 * 2 * REGION) for one in found.values()]
    assert buckets == [3, 3, 3, 2, 1]


@pytest.mark.slow
@on_ranks(2)
def test_states_of_torchs_own_optimizers_and_masters_in_16_bits() -> None:
    # Of the pieces alone, without padding: bucket by bucket the first half is rank 0's. Two moments, and two numbers of
    # four bytes for each piece.
    pieces = [[3, 32, 96, 13, 64], [7, 73, 27]][dist.get_rank()]
    nadam = moments(settings(1), "NAdam")["after"]["optimizer_states"]
    assert nadam == 2 * 4 * sum(pieces) + 2 * 4 * len(pieces)
    rprop = moments(settings(0), "Rprop")["after"]["optimizer_states"]
    assert rprop == 2 * 4 * sum(sum(UNITS, [])) + 4 * 5
    low = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    low_bits = moments(settings(2, "bf16", bf16=low))["after"]
    assert low_bits["master_weights"] == 0  # they are the compute parameters
    assert low_bits["optimizer_states"] == 2 * 2 * flat(2) // 2


@on_ranks(2)
def test_a_report_is_text_and_plain_data_and_counts_each_storage_once() -> None:
    engine = zerolite.initialize(models.build(models.Mixed), config(2, "bf16"))
    with zerolite.comm.record() as recorder:
        report = engine.memory_report()
    assert not recorder.calls
    data = json.loads(json.dumps(report.to_dict()))
    items = data["items"]
    assert (data["rank"], data["device"], data["other"], data["allocated"]) == (engine.rank, "cpu", None, None)
    assert data["resident_peak"] >= data["resident"] > 50e6
    assert report.total == sum(items.values())
    assert report.model_states == sum(items[n] for n in ("compute_parameters", "master_weights", "optimizer_states"))
    assert set(data["host"].values()) == set(data["disk"].values()) == {0}
    text = str(report)
    assert f"memory of rank {engine.rank} on cpu" in text
    assert f"  compute parameters     {2 * (flat(2) + sum(FROZEN)) / 1000:>7.2f} KB" in text.splitlines()
    engine.module.register_buffer("seen", engine.module.offset[1:])  # another view of memory that counts already
    assert engine.memory_report().items == items
    engine.module.register_buffer("new", torch.zeros(1000))
    assert engine.memory_report().items == {**items, "buffers": BUFFERS + 4000}
    del engine.module.new
    engine.module.register_buffer("sparse", torch.eye(3).to_sparse())
    assert engine.memory_report().items == items
