"""A window in which a backward was cut short, and which the user then drops with ``module.zero_grad()`` or keeps."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerolite
from tests import models
from zerolite.comm import NullCommunicator, use_communicator

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


@pytest.mark.parametrize("drops", [True, False], ids=["dropped", "kept"])
@pytest.mark.parametrize("fails", [LAYERS - 1, 0], ids=["before any gradient", "after some"])
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("how", ["engine.backward", "loss.backward"])
def test_after_a_later_backward_has_failed(how: str, stage: int, fails: int, drops: bool) -> None:
    """In a window that is kept, the gradients that had come before the failure count, as in plain PyTorch."""
    model, plain = models.build(Chain), models.build(Chain)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    with use_communicator(lambda rank, world: NullCommunicator(0, 1)):
        engine = zerolite.initialize(model, config)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

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
        for number in range(2, 5):
            micro_batch(number)
    else:
        micro_batch(2)
    engine.optimizer.step()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
