"""Tensor bytes per parameter Ψ and rank, bf16 and Adam: 2 compute weights, 2 gradients, 12 for master and two moments
in fp32."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import config
from tests.toolkit.memory import events_in_order, mark, memory_profile
from tests.toolkit.pool import Pools
from tests.toolkit.training import engine_window, make_engine

TICKET = 48  # bytes of a fence's tensor, which gloo's threads free where the profiler does not see it


class LoraChain(models.Chain):
    """A chain whose layers are frozen, each with two trained thin ones of ``rank``."""

    def __init__(self, depth: int, width: int, rank: int) -> None:
        super().__init__(depth, width)
        self.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = layer(x) + up(down(x))
        return x


def resident_and_peak(
    config: dict[str, Any], depth: int, width: int, shared_memory: bool, rank: int = 0, steps: int = 3
) -> dict[str, float]:
    """Bytes per parameter held after the last step, and the most held during it, counted from before the model was
    made. ``rank``: with adapters of that rank on a frozen model."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = "1" if shared_memory else "0"
    with memory_profile() as profiler:
        sizes = {"depth": depth, "width": width}
        engine = (
            zerolite.initialize(models.build(LoraChain, **sizes, rank=rank), config)
            if rank
            else make_engine(config, "Chain", sizes)
        )
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
    numel = depth * width**2
    return {"resident": resident / numel, "peak": peak / numel, "numel": numel}


def growth(config: dict[str, Any], steps: int, profiled: int) -> dict[str, int]:
    """Return what ``steps`` steps leave behind, after three to warm up: bytes of tensors that Python can reach, over
    all of them; the most tensors of one size by the allocator's account, over the last ``profiled``."""
    engine = make_engine(config, "Mlp")

    def train(count: int) -> None:
        for step in range(count):
            engine_window(engine, "Mlp", step, 1)

    train(3)
    before = tensor_bytes()
    train(steps - profiled)
    with memory_profile() as profiler:
        mark("begin")
        train(profiled)
        mark("end")
    left: Counter[int] = Counter()  # tensors by size
    counting = False
    for _, nbytes, name in events_in_order(profiler):
        counting = name == "begin" or (counting and name != "end")
        if counting and nbytes:
            left[abs(nbytes)] += 1 if nbytes > 0 else -1
    del left[TICKET]
    return {"left": max(left.values()), "reachable": tensor_bytes() - before}


def tensor_bytes() -> int:
    """Bytes of all storages that Python can reach."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type != "meta":
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(storages.values())


def engines_one_after_the_other(config: dict[str, Any], count: int) -> list[int]:
    """Tensor bytes alive after each of ``count`` engines was made, trained and dropped."""
    alive = []
    for _ in range(count):
        engine = make_engine(config, "Chain", {"depth": 4, "width": 64})
        engine.backward(engine(torch.randn(2, 64)).square().mean())
        engine.step()
        del engine
        alive.append(tensor_bytes())
        deadline = time.monotonic() + 2.0
        while alive[-1] > 0 and time.monotonic() < deadline:
            time.sleep(0.02)  # gloo's threads let go of the last small messages a moment later
            alive[-1] = tensor_bytes()
    return alive


def dropped_without_gc(config: dict[str, Any]) -> dict[str, Any]:
    """The model outlives its engine and still works as a plain module."""
    model = models.build(models.Mlp)
    engine = zerolite.initialize(model, config)
    batch = models.float_batch(0, 0, dist.get_rank())
    engine.backward(models.square_loss(engine, batch))
    engine.step()
    del engine
    gc.collect()
    models.square_loss(model, batch).backward()
    return {"gradients": all(p.grad is not None for p in model.parameters())}


# -------------------------------------------------------------------- the tests


DEPTH, WIDTH = 48, 192  # one layer is 2 % of the model, so that a single fresh gradient stays below the tolerance
BUCKET = DEPTH // 8 * WIDTH**2  # an eighth of the model
TOLERANCE = 0.05
ADAM = ("Adam", {"lr": 1e-3})
MOVING = {"stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}


@pytest.mark.fast("2-1-messages", "2-2-shared-memory")
@pytest.mark.parametrize("shared_memory", [False, True], ids=["messages", "shared-memory"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_resident_and_peak_bytes(pools: Pools, world: int, stage: int, shared_memory: bool) -> None:
    setting = config(
        stage, "bf16", optimizer=ADAM, zero={"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    )
    three_buckets = 3 * 2 * BUCKET / (DEPTH * WIDTH**2)  # two are reduced while one fills
    resident = 2 + 12 / world
    peak = 4 + 12 / world if stage == 1 else 2 + 14 / world + three_buckets
    if shared_memory:
        # Three regions of a bucket per process, mapped by all of them: the account of each shows them all.
        mapped = world * 3 * 2 * BUCKET / (DEPTH * WIDTH**2)
        resident, peak = resident + mapped, peak + mapped
    elif stage == 2:
        # While two buckets are in flight, what the other ranks send of theirs needs room as well.
        peak += 2 * (world - 1) / world * 2 * BUCKET / (DEPTH * WIDTH**2)
    kwargs = {"config": setting, "depth": DEPTH, "width": WIDTH, "shared_memory": shared_memory}
    for result in pools(world).run(resident_and_peak, kwargs, timeout=180):
        assert result["resident"] == pytest.approx(resident, rel=TOLERANCE)
        assert result["resident"] < result["peak"] <= peak * (1 + TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["all-trained", "frozen-base"])
@pytest.mark.parametrize("shared_memory", [False, True], ids=["messages", "shared-memory"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_resident_and_peak_bytes_of_stage_3(pools: Pools, world: int, shared_memory: bool, adapters: bool) -> None:
    depth, width, rank = 24, 384, 8 if adapters else 0
    layer, numel = width**2, depth * width**2
    live, trained = 4 * layer, 2 * depth * rank * width if adapters else numel
    reduced = rank * width if adapters else layer  # a bucket: the parameters of one module
    zero = {
        **MOVING,
        "stage3_prefetch_bucket_size": 2 * layer,
        "stage3_max_live_parameters": live,
        "reduce_bucket_size": layer,
    }
    case = {"depth": depth, "width": width, "rank": rank, "shared_memory": shared_memory, "steps": 4}
    case["config"] = config(3, "bf16", optimizer=ADAM, zero=zero)
    # Of what is frozen the weights only; bytes per parameter of the base.
    resident = (14 * trained + (2 * numel if adapters else 0)) / world / numel
    peak = resident + (2 * trained / world + 2 * live + 2 * 2 * layer) / numel
    if shared_memory:
        # Three regions per process, mapped by all of them: for gathers as large as the shards of the first launch of a
        # backward or forward, the layer that is needed at once and two ahead; for reductions as a bucket.
        mapped = 3 * world * (2 * 3 * layer / world + 2 * reduced) / numel
        resident, peak = resident + mapped, peak + mapped
    for result in pools(world).run(resident_and_peak, case, timeout=300):
        assert result["resident"] == pytest.approx(resident, rel=TOLERANCE)
        assert result["resident"] < result["peak"] <= peak * (1 + TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(s, marks=pytest.mark.slow) if s in (0, 1) else s for s in range(4)])
def test_two_hundred_steps_grow_nothing(pools: Pools, stage: int) -> None:
    # The profiler does not see what gloo's threads free: a tensor of a collective now and then. What is left behind at
    # every step is at least one of a size per step.
    setting = config(stage, "bf16", 1, 0.4, ADAM, zero=MOVING if stage == 3 else {})
    kwargs = {"config": setting, "steps": 200, "profiled": 30}
    for result in pools(2).run(growth, kwargs, timeout=120):
        assert result["left"] < 30
        assert result["reachable"] <= 0  # what an earlier case has left may be collected meanwhile


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_engines_one_after_the_other_return_their_memory(pools: Pools, stage: int) -> None:
    setting = config(stage, "bf16", zero=MOVING if stage == 3 else {})
    for alive in pools(2).run(engines_one_after_the_other, {"config": setting, "count": 5}):
        assert alive == [alive[0]] * 5
        assert alive[0] < 4 * 64 * 64  # less than one layer


def test_a_model_outlives_its_engine(pools: Pools) -> None:
    for result in pools(2).run(dropped_without_gc, {"config": config(2)}):
        assert result["gradients"]
