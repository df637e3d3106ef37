"""A window in which a backward was cut short, and which the user then drops with ``module.zero_grad()`` or keeps."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerolite
from benchmarks.null_communicator import NullCommunicator
from tests.toolkit import models
from zerolite.comm import use_communicator

LAYERS = 3


class Chain(nn.Module):
    """Linear layers; backward fails at the output of layer ``fails``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
        self.fails: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == self.fails:
                x.register_hook(_fail)
        return x


def _fail(gradient: Tensor) -> Any:
    raise ArithmeticError("planned failure in backward")


def engine_at(stage: int, model: nn.Module, **config: Any) -> Any:
    setting = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **config,
    }
    with use_communicator(lambda rank, world: NullCommunicator(0, 1)):
        return zerolite.initialize(model, setting)


@pytest.mark.parametrize("drops", [True, False], ids=["dropped", "kept"])
@pytest.mark.parametrize("fails", [LAYERS - 1, 0], ids=["before any gradient", "after some"])
@pytest.mark.parametrize(("how", "stage"), [("engine.backward", 0), ("loss.backward", 2)])
def test_after_a_later_backward_has_failed(how: str, stage: int, fails: int, drops: bool) -> None:
    """Gradients that came before the failure count in a window that is kept, as in plain PyTorch."""
    model, plain = models.build(Chain), models.build(Chain)
    engine = engine_at(stage, model, gradient_accumulation_steps=3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)

    def micro_batch(number: int, fails: int | None = None) -> None:
        x = torch.full((2, 4), 1.0 + number)
        model.fails = plain.fails = fails
        with contextlib.suppress(ArithmeticError):
            (plain(x).square().mean() / 3).backward()
        with contextlib.suppress(ArithmeticError):
            loss = engine(x).square().mean()
            if how == "engine.backward":
                engine.backward(loss)
            else:
                (loss / 3).backward()

    micro_batch(0)
    micro_batch(1, fails)
    if drops:
        model.zero_grad()
        plain.zero_grad()
    for number in range(2, 5 if drops else 3):
        micro_batch(number)
    engine.optimizer.step()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_reduced_gradient_that_is_dropped_before_a_backward_past_the_engine_does_not_count(stage: int) -> None:
    """The next backward begins with that parameter's hook: the loss does not come from the engine's outputs."""
    model = nn.Linear(3, 1, bias=False)
    plain = copy.deepcopy(model)
    engine = engine_at(stage, model)
    for one, forward in ((model, engine), (plain, plain)):
        forward(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
        one.weight.grad = None
        (one.weight.sum() * 10).backward()
    engine.step()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    torch.testing.assert_close(model.weight, plain.weight, rtol=0, atol=0)


def test_a_gradient_that_is_assigned_after_the_step_is_not_in_a_checkpoint(tmp_path: Path) -> None:
    engine = engine_at(2, nn.Linear(3, 1))
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    values = [p.detach().clone() for p in engine.module.parameters()]
    engine.module.weight.grad = torch.ones(1, 3)
    engine.save_checkpoint(tmp_path)
    engine.zero_grad()
    engine.load_checkpoint(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(values, engine.module.parameters(), strict=True))
