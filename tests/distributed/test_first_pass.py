"""The first backward at stages 1 and 2 reduces bucket by bucket, before anybody knows how many contributions each
gradient has: what comes late is reduced once more. The numbers are plain PyTorch's, the memory that of later steps."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import config
from tests.toolkit.memory import events_in_order, mark, memory_profile
from tests.toolkit.pool import Pools
from tests.toolkit.training import make_engine, snapshot
from zerolite.comm import record

STEPS = 3
BRANCHES = ("left", "right", "none", "left")


class Fragile(torch.autograd.Function):
    """The identity, whose backward raises while ``broken``."""

    broken = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Fragile.broken:
            raise ZeroDivisionError("a backward that ends on its way")
        return gradient


class Late(nn.Module):
    """Four layers; ``shared``: one weight in three reentrantly checkpointed segments, whose gradient comes in three
    parts, the last long after the first; ``small``: weights without dimensions, each used after every layer;
    ``branches``: two layers of which a rank uses one, or none."""

    def __init__(self, shared: bool = True, small: bool = True, branches: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(4))
        self.shared = nn.Linear(13, 13) if shared else None
        self.small = nn.ParameterList(nn.Parameter(torch.tensor(0.9 + i / 100)) for i in range(8 if small else 0))
        self.branches = nn.ModuleDict({name: nn.Linear(13, 13) for name in ("left", "right") if branches})
        self.last = nn.Linear(13, 3)

    def forward(self, x: Tensor, branch: str = "none") -> Tensor:
        hidden = self.first(x)
        for index, layer in enumerate(self.layers):
            hidden = torch.tanh(layer(hidden))
            if self.shared is not None and index != 2:
                hidden = checkpoint(self._segment, hidden, use_reentrant=True)
            for factor in self.small:
                hidden = hidden * factor
            if index == 1:
                hidden = Fragile.apply(hidden)
        if branch in self.branches:
            hidden = hidden + self.branches[branch](hidden)
        return self.last(hidden)

    def _segment(self, hidden: Tensor) -> Tensor:
        assert self.shared is not None
        return torch.tanh(self.shared(hidden))


def _loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
    x, y = models.float_batch(step, micro, rank)
    return models.square_loss(model, (x, BRANCHES[(rank + step) % 4], y))


def _weight(step: int, micro: int, rank: int) -> float:
    return float(1 + (micro + 2 * rank + step) % 3)


def _takes_part(how: str, step: int, rank: int, world: int) -> bool:
    """The last rank of several has no batch: in the first step ("absent"), or at all ("join")."""
    lacks = {"absent": step == 0, "join": True}.get(how, False)
    return not (lacks and rank == world - 1 and world > 1)


def plain(how: str, world: int, micros: int, model: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Tensor]:
    """Train one process in plain PyTorch, to be compared with :func:`train`."""
    torch.set_num_threads(1)
    module = models.build(Late, **model)
    torch_optimizer = torch.optim.SGD(module.parameters(), **optimizer)
    places = [(micro, rank) for micro in range(micros) for rank in range(world)]
    for step in range(STEPS):
        torch_optimizer.zero_grad()
        total = sum(_weight(step, *place) for place in places)
        for micro, rank in places:
            if _takes_part(how, step, rank, world):
                share = _weight(step, micro, rank) / total if how == "weights" else 1 / len(places)
                (_loss(module, step, micro, rank) * share * (2 if how == "twice" else 1)).backward()
        torch_optimizer.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train(config: dict[str, Any], how: str = "engine", model: dict[str, Any] | None = None) -> dict[str, Any]:
    """``how``: "engine" or "plain" loop, "no_sync", "weights", "twice" (a second backward through the graph), "broken"
    (on rank 0 the very first backward raises on its way, and all ranks drop it), "absent", "join"."""
    engine = zerolite.initialize(models.build(Late, **(model or {})), config)
    micros = engine.gradient_accumulation_steps
    if how == "broken":
        _break_down(engine)
    collectives = []
    with engine.join() if how == "join" else contextlib.nullcontext():
        for step in range(STEPS):
            if how == "join" and not _takes_part(how, step, engine.rank, engine.world_size):
                break
            with record() as recorder:
                for micro in range(micros):
                    _micro_batch(engine, how, step, micro, micros)
                if how in ("plain", "absent"):
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
            collectives.append([(call.op, call.tag) for call in recorder.calls])
    return {"parameters": snapshot(engine), "steps": engine.global_steps, "collectives": collectives}


def _micro_batch(engine: Any, how: str, step: int, micro: int, micros: int) -> None:
    if not _takes_part(how, step, engine.rank, engine.world_size):
        return
    with engine.no_sync() if how == "no_sync" and micro < micros - 1 else contextlib.nullcontext():
        loss = _loss(engine, step, micro, engine.rank)
        if how in ("plain", "absent"):
            (loss / micros).backward()
            return
        if how == "twice":
            engine.backward(loss, retain_graph=True)
        engine.backward(loss, weight=_weight(step, micro, engine.rank) if how == "weights" else None)
    engine.step()


def _break_down(engine: Any) -> None:
    Fragile.broken = engine.rank == 0
    with contextlib.suppress(ZeroDivisionError):
        engine.backward(_loss(engine, 9, 0, engine.rank))
    Fragile.broken = False
    engine.zero_grad()


def train_many(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: train(**run) for name, run in runs.items()}


class Sleeping(nn.Module):
    """Model whose layers ``shared``, in two reentrantly checkpointed segments, are frozen at first, and ``first``
    always."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13).requires_grad_(False)
        self.shared = nn.Linear(13, 13).requires_grad_(False)
        self.last = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).requires_grad_()
        for _ in range(2):
            hidden = checkpoint(lambda h: torch.tanh(self.shared(h)), hidden, use_reentrant=True)
        return self.last(hidden)


def wake(config: dict[str, Any] | None, optimizer: dict[str, Any], world: int = 1) -> dict[str, Tensor]:
    """``shared`` is trained from the second step on; without a config in plain PyTorch, over the batches of ``world``
    ranks."""
    module = models.build(Sleeping)
    engine = zerolite.initialize(module, config) if config is not None else None
    torch_optimizer = torch.optim.SGD(module.parameters(), **optimizer)
    for step in range(STEPS):
        module.shared.requires_grad_(step > 0)
        if engine is not None:
            engine.backward(models.square_loss(engine, models.float_batch(step, 0, engine.rank)))
            engine.step()
            continue
        torch_optimizer.zero_grad()
        for rank in range(world):
            (models.square_loss(module, models.float_batch(step, 0, rank)) / world).backward()
        torch_optimizer.step()
    return snapshot(engine) if engine is not None else {n: p.detach().clone() for n, p in module.named_parameters()}


def backward_bytes(config: dict[str, Any], depth: int, width: int, steps: int) -> list[float]:
    """The most bytes per parameter that a backward takes, beyond what is there when it begins; for each step. Between
    ranks go messages: shared memory is there from the first backward on."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = "0"
    with memory_profile() as profiler:
        engine = make_engine(config, "Chain", {"depth": depth, "width": width})
        x = torch.randn(2, width)
        for _ in range(steps):
            loss = engine(x).square().mean()
            mark("begin")
            engine.backward(loss)
            mark("end")
            engine.step()
    most: list[float] = []
    held, before, inside = 0, 0, False
    for _, nbytes, name in events_in_order(profiler):
        held += nbytes
        if name == "begin":
            inside, before = True, held
            most.append(0)
        elif name == "end":
            inside = False
        if inside:
            most[-1] = max(most[-1], held - before)
    return [nbytes / (depth * width**2) for nbytes in most]


# -------------------------------------------------------------------- the tests


OPTIMIZER = {"lr": 0.05, "momentum": 0.9}
HOW = ("engine", "plain", "weights", "twice", "broken", "join", "absent")
OF_SEVERAL = ("plain", "no_sync", "weights", "join")
LATE = {"shared": True}  # contributions that come late
APART = {"shared": False, "branches": True}  # each rank uses other parameters


def settings(stage: int, precision: str = "fp32", micros: int = 1, **zero: Any) -> dict[str, Any]:
    made = config(stage, precision, micros, 0.0, ("SGD", OPTIMIZER), {"reduce_bucket_size": 200, **zero})
    return made | {"train_micro_batch_size_per_gpu": 4}


def run_many(pools: Pools, world: int, runs: dict[Any, dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    """The results of all ranks, by run; equal on all of them."""
    ranks = pools(world).run(train_many, {"runs": runs}, timeout=180)
    results = {name: [rank[name] for rank in ranks] for name in runs}
    for name, of_ranks in results.items():
        for rank in of_ranks[1:]:
            assert_same_bits(rank["parameters"], of_ranks[0]["parameters"], f"{name}: parameters of two ranks")
            assert rank["steps"] == of_ranks[0]["steps"] == STEPS
    return results


@pytest.mark.fast("1-2")
@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3, 4))])
@pytest.mark.parametrize("micros", [1, 3])
def test_numbers_are_those_of_plain_pytorch(pools: Pools, world: int, micros: int) -> None:
    kinds = [(how, LATE) for how in (HOW if micros == 1 else OF_SEVERAL)]
    kinds += [(how, APART) for how in ("engine", "join")]
    runs = {
        (number, stage): {"config": settings(stage, micros=micros), "how": how, "model": model}
        for number, (how, model) in enumerate(kinds)
        for stage in (1, 2)
    }
    results = run_many(pools, world, runs)
    for number, (how, model) in enumerate(kinds):
        wanted = plain(how, world, micros, model, OPTIMIZER)
        for stage in (1, 2):
            for name, value in wanted.items():
                torch.testing.assert_close(
                    results[number, stage][0]["parameters"][name],
                    value,
                    rtol=0,
                    atol=2e-6,
                    msg=lambda m, n=name, h=how, s=stage: f"{h}, stage {s}, {n}: {m}",
                )


@pytest.mark.fast("contiguous_gradients")
@pytest.mark.parametrize(
    "options",
    [
        {"contiguous_gradients": False},
        {"reduce_scatter": False},
        *(pytest.param(o, marks=pytest.mark.slow) for o in ({"overlap_comm": False}, {"overlap_comm": True})),
    ],
    ids=lambda options: "-".join(options),
)
def test_numbers_with_other_ways_of_reducing(pools: Pools, options: dict[str, Any]) -> None:
    runs = {stage: {"config": settings(stage, **options), "model": LATE} for stage in (1, 2)}
    wanted = plain("engine", 2, 1, LATE, OPTIMIZER)
    for result in run_many(pools, 2, runs).values():
        for name, value in wanted.items():
            torch.testing.assert_close(result[0]["parameters"][name], value, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", *(pytest.param(p, marks=pytest.mark.slow) for p in ("fp32", "fp16"))])
def test_stages_agree(pools: Pools, precision: str) -> None:
    models = {"apart": APART, "late": LATE}
    runs = {
        (stage, kind): {"config": settings(stage, precision), "model": model}
        for stage in (0, 1, 2)
        for kind, model in models.items()
    }
    results = {key: ranks[0]["parameters"] for key, ranks in run_many(pools, 2, runs).items()}
    for stage in (1, 2):
        assert_same_bits(results[0, "apart"], results[stage, "apart"], f"stages 0 and {stage}")
        assert_same_bits(results[1, "late"], results[stage, "late"], f"stages 1 and {stage}")
        for name, value in results[0, "late"].items():  # two means, rounded one by one, instead of one
            tolerance = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1e-2}[precision]
            torch.testing.assert_close(results[stage, "late"][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_weight_that_is_unfrozen_may_have_several_contributions(pools: Pools, stage: int) -> None:
    wanted = wake(None, OPTIMIZER, 2)
    for rank in pools(2).run(wake, {"config": settings(stage), "optimizer": OPTIMIZER}):
        for name, value in wanted.items():
            torch.testing.assert_close(rank[name], value, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_only_late_buckets_are_reduced_again_and_only_at_first(pools: Pools) -> None:
    runs = {kind: {"config": settings(2), "model": model} for kind, model in (("apart", APART), ("late", LATE))}
    for kind, ranks in run_many(pools, 2, runs).items():
        for rank in ranks:
            first, second, third = (step.count(("reduce_scatter", "gradients")) for step in rank["collectives"])
            assert second == third
            assert first - second == (0 if kind == "apart" else 2)  # of the shared weight, and of its bias


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_backward_takes_no_more_memory_than_later_ones(pools: Pools, world: int) -> None:
    depth, width = 48, 192
    layer, bucket = 1 / depth, 1 / 8  # of the model
    setting = config(
        2,
        "bf16",
        optimizer=("Adam", {"lr": 1e-3}),
        zero={"reduce_bucket_size": depth // 8 * width**2, "allgather_bucket_size": depth // 8 * width**2},
    )
    kwargs = {"config": setting, "depth": depth, "width": width, "steps": 3}
    # This rank's part of the gradients; a bucket that fills, two that travel, one that is kept for the next (on the
    # CPU); what the others send of the two that travel; one gradient.
    most = 2 / world + 2 * (4 * bucket + 2 * (world - 1) / world * bucket + layer)
    for first, second, third in pools(world).run(backward_bytes, kwargs, timeout=180):
        assert first == pytest.approx(third, rel=0.05)
        assert 2 / world < second <= most * 1.05
