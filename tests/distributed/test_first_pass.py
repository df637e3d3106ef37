"""The first backward at stages 1 and 2 reduces bucket by bucket, before anybody knows how many contributions each
gradient has: what comes late is reduced once more. The numbers are plain PyTorch's (and the memory: test_memory.py)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import config
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import snapshot
from zerolite.comm import record

STEPS = 3
BRANCHES = ("left", "right", "none", "left")
OPTIMIZER = {"lr": 0.05, "momentum": 0.9}
OF_SEVERAL = ("plain", "no_sync", "weights")
LATE = {"shared": True}  # contributions that come late
APART = {"shared": False, "branches": True}  # each rank uses other parameters


def settings(stage: int, precision: str = "fp32", micros: int = 1, **zero: Any) -> dict[str, Any]:
    made = config(stage, precision, micros, 0.0, ("SGD", OPTIMIZER), {"reduce_bucket_size": 200, **zero})
    return made | {"train_micro_batch_size_per_gpu": 4}


def fail(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError("a backward that ends on its way")


class Late(nn.Module):
    """Four layers; ``shared``: one weight in three reentrantly checkpointed segments, whose gradient comes in three
    parts, the last long after the first; ``small``: weights without dimensions, each used after every layer;
    ``branches``: two layers of which a rank uses one, or none; ``broken``: backward raises on its way."""

    broken = False

    def __init__(self, shared: bool = True, branches: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(4))
        self.shared = nn.Linear(13, 13) if shared else None
        self.small = nn.ParameterList(nn.Parameter(torch.tensor(0.9 + i / 100)) for i in range(8))
        self.branches = nn.ModuleDict({name: nn.Linear(13, 13) for name in ("left", "right") if branches})
        self.last = nn.Linear(13, 3)

    def forward(self, x: Tensor, branch: str = "none") -> Tensor:
        hidden = self.first(x)
        for index, layer in enumerate(self.layers):
            hidden = torch.tanh(layer(hidden))
            if self.shared is not None and index != 2:
                hidden = checkpoint(lambda h: torch.tanh(self.shared(h)), hidden, use_reentrant=True)
            for factor in self.small:
                hidden = hidden * factor
            if index == 1 and self.broken:
                hidden.register_hook(fail)
        if branch in self.branches:
            hidden = hidden + self.branches[branch](hidden)
        return self.last(hidden)


def _loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
    x, y = models.float_batch(step, micro, rank)
    return models.square_loss(model, (x, BRANCHES[(rank + step) % 4], y))


def _weight(step: int, micro: int, rank: int) -> float:
    return float(1 + (micro + 2 * rank + step) % 3)


def _takes_part(how: str, step: int, rank: int, world: int) -> bool:
    """The last rank has no batch in the first step ("absent")."""
    return rank < world - 1 or not (how == "absent" and step == 0)


def plain(how: str, micros: int, model: dict[str, Any]) -> dict[str, Tensor]:
    """Train one process in plain PyTorch on what all ranks have."""
    world = dist.get_world_size()
    module = models.build(Late, **model)
    torch_optimizer = torch.optim.SGD(module.parameters(), **OPTIMIZER)
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
    (on rank 0 the very first backward raises on its way, and all ranks drop it), "absent"."""
    if how == "absent":  # another count of backwards on one rank is an error otherwise
        config = config | {"consistency_check_interval": 0}
    engine = zerolite.initialize(models.build(Late, **(model or {})), config)
    micros = engine.gradient_accumulation_steps
    if how == "broken":
        engine.module.broken = engine.rank == 0
        with contextlib.suppress(ZeroDivisionError):
            engine.backward(_loss(engine, 9, 0, engine.rank))
        engine.module.broken = False
        engine.zero_grad()
    collectives = []
    for step in range(STEPS):
        with record() as recorder:
            for micro in range(micros):
                _micro_batch(engine, how, step, micro, micros)
            if how in ("plain", "absent"):
                engine.optimizer.step()
                engine.optimizer.zero_grad()
        collectives.append([(call.op, call.tag) for call in recorder.calls])
    found = snapshot(engine)
    assert_same_on_ranks(found, how)
    assert engine.global_steps == STEPS
    return {"parameters": found, "collectives": collectives}


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


# -------------------------------------------------------------------- the tests


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str, tolerance: float = 2e-6) -> None:
    rtol = 0 if tolerance == 2e-6 else tolerance
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=tolerance, msg=lambda m: f"{what}: {m}")


@pytest.mark.fast("2-1-hows0")
@pytest.mark.parametrize(
    ("micros", "hows"), [(1, ("twice", "broken")), (1, ("engine", "plain", "weights", "absent")), (3, OF_SEVERAL)]
)
@on_ranks(2, 3, timeout=180)
def test_numbers_are_those_of_plain_pytorch(micros: int, hows: tuple[str, ...]) -> None:
    for how, model in [*((how, LATE) for how in hows), ("weights", APART)]:
        wanted = plain(how, micros, model)
        for stage in (1, 2):
            found = train(settings(stage, micros=micros), how, model)
            assert_close(found["parameters"], wanted, f"{how}, stage {stage}")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@on_ranks(2)
def test_stages_agree(precision: str) -> None:
    apart = [train(settings(stage, precision), model=APART)["parameters"] for stage in (0, 1, 2)]
    late = [train(settings(stage, precision), model=LATE)["parameters"] for stage in (0, 1, 2)]
    assert_same_bits(late[1], late[2], "stages 1 and 2")
    for stage in (1, 2):
        assert_same_bits(apart[0], apart[stage], f"stages 0 and {stage}")
        # two means, rounded one by one, instead of one
        assert_close(late[stage], late[0], f"stage {stage}", {"fp16": 2e-3, "bf16": 1e-2}[precision])
