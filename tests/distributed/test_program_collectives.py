"""Models that launch collectives of their own within backward (SyncBatchNorm, an all-to-all), while ranks use different
parameters: reductions neither mix with these collectives nor wait for the peers in a circle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, at, config
from tests.toolkit.models import build
from tests.toolkit.ranks import on_ranks
from tests.toolkit.traffic import MeanOfRanks, mean_of_ranks
from tests.toolkit.training import snapshot
from tests.toolkit.transports import transport


class Detector(nn.Module):
    """A backbone whose activations are averaged over ranks, and heads behind it that only the first ranks use."""

    def __init__(self, forward_too: bool = True) -> None:
        super().__init__()
        self.forward_too = forward_too
        self.backbone = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, used: int) -> Tensor:
        for layer in self.backbone:
            x = MeanOfRanks.apply(layer(x).tanh(), self.forward_too)
        return sum((head(x).square().mean() for head in self.heads[:used]), x.square().mean())


def _batch(step: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(2, 8, generator=generator), (4, 2, 1)[dist.get_rank()]  # the last head's bucket is full first


def _plain(steps: int, forward_too: bool) -> dict[str, Tensor]:
    model = build(Detector, forward_too=forward_too)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True, fused=False, **ADAMW[1])
    for step in range(steps):
        optimizer.zero_grad()
        model(*_batch(step)).backward()
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            parameter.grad = gradient / dist.get_world_size()
        optimizer.step()
    return dict(model.named_parameters())


def _trained(steps: int, given: dict[str, Any], forward_too: bool) -> dict[str, Tensor]:
    model = build(Detector, forward_too=forward_too)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True, fused=False, **ADAMW[1])
    engine = zerolite.initialize(model, given, optimizer=optimizer)
    for step in range(steps):
        engine.backward(engine(*_batch(step)))
        engine.step()
    assert engine._parts.reducer.program_communicates
    return snapshot(engine)


def _given(stage: int, **zero: Any) -> dict[str, Any]:
    given = config(stage, zero=zero)
    del given["optimizer"]
    return given


@pytest.mark.fast("2-native-1", "2-shared memory-2", "2-messages-0")
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["native", "messages", "shared memory"])
@on_ranks(2, 3, timeout=15.0)
def test_ranks_with_different_heads(stage: int, name: str) -> None:
    """The first backward, in which the engine does not know the model yet, and later ones."""
    with transport(name):
        trained = _trained(3, _given(stage), forward_too=True)
    if dist.get_world_size() == 2:
        assert_same_bits(trained, _plain(3, forward_too=True), "plain")


@pytest.mark.fast("2-True-None", "2-False-True")
@pytest.mark.parametrize("key", [None, True])
@pytest.mark.parametrize("forward_too", [True, False])
@on_ranks(2)
def test_it_is_seen_in_the_first_backward(forward_too: bool, key: bool | None) -> None:
    """Ranks are alike in the first backward, whether the program communicates in forwards too or not."""
    model = build(Detector, forward_too=forward_too)
    engine = zerolite.initialize(model, config(2, zero={"collectives_in_backward": key}))
    assert engine._parts.reducer.program_communicates is bool(key)
    for step in range(3):
        loss = engine(*_batch(step)) if step else engine(_batch(step)[0], 4)
        assert engine._parts.reducer.program_communicates is bool(key or step or forward_too)
        engine.backward(loss)
        engine.step()
    assert engine._parts.call.call_module is engine.module


@pytest.mark.fast("2-shared memory-1-1-True")
@pytest.mark.parametrize("by_call", [False, True])
@pytest.mark.parametrize("stages", ["0-0", "1-1", "2-2", "2-3 moving", "3 moving-2"])
@pytest.mark.parametrize("name", ["native", "shared memory"])
@on_ranks(2)
def test_two_engines_in_one_backward(stages: str, name: str, by_call: bool) -> None:
    """Each rank leaves out heads of another engine, so that their buckets are complete at different times; that of the
    engine whose backward is called, on one rank before the other engine's backward begins. (At stage 3 all ranks run
    the same modules.)"""
    seeds, partitioned = (7, 8), [stage.startswith("3") for stage in stages.split("-")]

    def losses(models: Any, step: int) -> Tensor:
        x, rank = _batch(step)[0], dist.get_rank()
        used = [4 if rank == number or partitioned[number] else 1 for number in range(2)]
        return sum(model(x, count) for model, count in zip(models, used, strict=True))

    with transport(name):
        engines = [
            zerolite.initialize(build(Heads, seed), at(stage))
            for seed, stage in zip(seeds, stages.split("-"), strict=True)
        ]
        for step in range(3):
            loss = losses(engines, step)
            if by_call:
                engines[-1].backward(loss)
            else:
                loss.backward()
            for engine in engines:
                engine.step()
        trained = [snapshot(engine) for engine in engines]
    plain = [build(Heads, seed) for seed in seeds]
    settings = config()["optimizer"]["params"]
    optimizer = torch.optim.SGD([p for model in plain for p in model.parameters()], foreach=True, **settings)
    for step in range(3):
        optimizer.zero_grad()
        losses(plain, step).backward()
        for parameter in (p for model in plain for p in model.parameters()):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = mean_of_ranks(gradient)
        optimizer.step()
    for ours, model in zip(trained, plain, strict=True):
        assert_same_bits(ours, dict(model.named_parameters()), "plain")


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, used: int) -> Tensor:
        x = self.trunk(x)
        return sum((head(x).square().mean() for head in self.heads[-used:]), x.square().mean())
