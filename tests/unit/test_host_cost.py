"""Instructions of Python in a step, which a parameter costs beyond plain PyTorch's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import zerolite
from zerolite.comm import NullCommunicator, use_communicator

LAYERS, PARAMETERS = 40, 160  # each step's instructions that no parameter causes are told by halving the layers
MOST = 180  # instructions of a parameter


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


pytestmark = pytest.mark.usefixtures("one_thread")


def instructions_of(step: Callable[[], None]) -> int:
    """Bytecode instructions of the third step."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return note

    step()
    step()
    before = sys.gettrace()
    sys.settrace(note)
    try:
        step()
    finally:
        sys.settrace(before)
    return count


def of_plain(layers: int) -> int:
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    parameters = list(model.parameters())

    def step() -> None:
        model(torch.ones(2, 10)).square().mean().backward()
        for parameter in parameters:
            parameter.grad = None

    return instructions_of(step)


def of_engine(layers: int, stage: int) -> int:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "consistency_check_interval": 0,
    }
    with use_communicator(lambda rank, world: NullCommunicator(0, 8)):
        engine = zerolite.initialize(nn.Sequential(*(Layer() for _ in range(layers))), config)

    def step() -> None:
        engine.backward(engine(torch.ones(2, 10)).square().mean())
        engine.step()

    return instructions_of(step)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_parameter_costs_few_instructions(stage: int) -> None:
    plain = of_plain(2 * LAYERS) - of_plain(LAYERS)
    ours = of_engine(2 * LAYERS, stage) - of_engine(LAYERS, stage)
    assert (ours - plain) / PARAMETERS <= MOST, (ours - plain) / PARAMETERS
