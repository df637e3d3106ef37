"""Tensor bytes per parameter Ψ and rank, bf16 and Adam: 2 compute weights, 2 gradients, 12 for master and two moments
in fp32."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import PARTITIONED, at, config
from tests.toolkit.memory import events_in_order, mark, memory_profile, tensor_bytes
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine

TOLERANCE = 0.05
ADAM = ("Adam", {"lr": 1e-3})


def resident_and_peak(
    config: dict[str, Any], depth: int, width: int, shared_memory: bool, steps: int = 2
) -> tuple[float, float]:
    """Bytes per parameter held after the last step, and the most held during it, counted from before the model was
    made."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = "1" if shared_memory else "0"
    with memory_profile() as profiler:
        engine = zerolite.initialize(models.build(models.Chain, depth=depth, width=width), config)
        x = torch.randn(2, width)
        for step in range(steps):
            if step == steps - 1:
                mark("begin")
            engine.backward(engine(x).square().mean())
            engine.step()
        mark("end")
    held, peak, resident, inside = 0, 0, 0, False
    for _, nbytes, name in events_in_order(profiler):
        held += nbytes
        if name == "begin":
            inside, peak = True, held
        elif name == "end":
            inside, resident = False, held
        if inside:
            peak = max(peak, held)
    return resident / (depth * width**2), peak / (depth * width**2)


DEPTH, WIDTH = 48, 192  # one layer is 2 % of the model, so that a single fresh gradient stays below the tolerance
BUCKET = DEPTH // 8 * WIDTH**2  # an eighth of the model


@pytest.mark.fast("1-False-2", "2-True-2")
@on_ranks(2, 4, timeout=180)
@pytest.mark.parametrize(("stage", "shared_memory"), [(1, False), (2, False), (2, True)])
def test_resident_and_peak_bytes(stage: int, shared_memory: bool) -> None:
    world, share = dist.get_world_size(), 2 * BUCKET / (DEPTH * WIDTH**2)
    zero = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    wanted = 2 + 12 / world
    limit = 4 + 12 / world if stage == 1 else 2 + 14 / world + 3 * share  # two buckets are reduced while one fills
    if shared_memory:
        # Three regions of a bucket per process, mapped by all of them: the account of each shows them all.
        wanted, limit = wanted + world * 3 * share, limit + world * 3 * share
    elif stage == 2:
        # While two buckets are in flight, what the other ranks send of theirs needs room as well.
        limit += 2 * (world - 1) / world * share
    setting = config(stage, "bf16", optimizer=ADAM, zero=zero)
    resident, peak = resident_and_peak(setting, DEPTH, WIDTH, shared_memory)
    assert resident == pytest.approx(wanted, rel=TOLERANCE)
    assert resident < peak <= limit * (1 + TOLERANCE), (peak, limit)


@pytest.mark.slow
@on_ranks(2, 4, timeout=300)
@pytest.mark.parametrize("shared_memory", [False, True])
def test_resident_and_peak_bytes_of_stage_3(shared_memory: bool) -> None:
    world, depth, width = dist.get_world_size(), 24, 384
    layer, numel = width**2, depth * width**2  # a bucket of gradients is a layer
    live = 4 * layer
    zero = {
        **PARTITIONED["kept"],
        "stage3_prefetch_bucket_size": 2 * layer,
        "stage3_max_live_parameters": live,
        "reduce_bucket_size": layer,
    }
    wanted = 14 / world
    limit = wanted + 2 / world + (2 * live + 2 * 2 * layer) / numel
    if shared_memory:
        # Three regions per process, mapped by all of them: for gathers as large as the shards of the first launch of a
        # backward or forward, the layer that is needed at once and two ahead; for reductions as a bucket.
        mapped = 3 * world * (2 * 3 * layer / world + 2 * layer) / numel
        wanted, limit = wanted + mapped, limit + mapped
    setting = config(3, "bf16", optimizer=ADAM, zero=zero)
    resident, peak = resident_and_peak(setting, depth, width, shared_memory, steps=4)
    assert resident == pytest.approx(wanted, rel=TOLERANCE)
    assert resident < peak <= limit * (1 + TOLERANCE), (peak, limit)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_engines_one_after_the_other_return_their_memory(stage: int) -> None:
    alive = []
    for _ in range(5):
        engine = make_engine(at("3 kept" if stage == 3 else stage, "bf16"), "Chain", {"depth": 4, "width": 64})
        engine.backward(engine(torch.randn(2, 64)).square().mean())
        engine.step()
        del engine
        gc.collect()
        deadline = time.monotonic() + 2.0
        while tensor_bytes() and time.monotonic() < deadline:
            time.sleep(0.02)  # gloo's threads let go of the last small messages a moment later
        alive.append(tensor_bytes())
    assert alive == [alive[0]] * 5 and alive[0] < 4 * 64 * 64, alive  # less than one layer
