"""Cost of a step on the host: instructions of Python for each parameter, beyond plain PyTorch's, and functions of
zerolite that a plain step enters. They tell how long the way through the code is: a feature that is off adds none."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import zerolite
from benchmarks.null_communicator import NullCommunicator
from tests.toolkit.pool import Pool
from tests.toolkit.transports import LateGathers
from zerolite.comm import use_communicator

LAYERS, PARAMETERS = 40, 160  # each step's instructions that no parameter causes are told by halving the layers
MOST = 180  # instructions of a parameter
MOST_IN_FLIGHT = 210  # with its part of the modules that are called, and torch's way around a hook for all modules


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


pytestmark = pytest.mark.usefixtures("one_thread")


def instructions_of(step: Callable[[], None]) -> int:
    """Bytecode instructions of the fourth step. Python 3.12 counts none the first time that it is asked to."""
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
        count = 0
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


def make_engine(layers: int, stage: int, kind: type[NullCommunicator] = NullCommunicator, **zero: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "consistency_check_interval": 0,
    }
    with use_communicator(lambda rank, world: kind(0, 8)):
        return zerolite.initialize(nn.Sequential(*(Layer() for _ in range(layers))), config), torch.ones(2, 10)


def of_engine(layers: int, stage: int, kind: type[NullCommunicator] = NullCommunicator, **zero: int) -> int:
    engine, x = make_engine(layers, stage, kind, **zero)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return instructions_of(step)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_parameter_costs_few_instructions(stage: int) -> None:
    plain = of_plain(2 * LAYERS) - of_plain(LAYERS)
    ours = of_engine(2 * LAYERS, stage) - of_engine(LAYERS, stage)
    assert (ours - plain) / PARAMETERS <= MOST, (ours - plain) / PARAMETERS


@pytest.mark.usefixtures("nothing_compiled")
def test_a_parameter_in_flight_costs_few_instructions() -> None:
    """Most with many buckets, because the hook goes with the last one."""
    counts = [
        of_engine(2 * LAYERS, 2, kind, reduce_bucket_size=1300) - of_engine(LAYERS, 2, kind, reduce_bucket_size=1300)
        for kind in (NullCommunicator, LateGathers)
    ]
    assert 50 < (counts[1] - counts[0]) / PARAMETERS <= MOST_IN_FLIGHT, (counts[1] - counts[0]) / PARAMETERS


ROOT = os.path.dirname(zerolite.__file__)


def entered(function: Callable[[], Any]) -> tuple[Any, set[tuple[str, str, int]]]:
    """Return the result of ``function``, and the functions that it enters: file, name, line."""
    found: set[tuple[str, str, int]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name != "excluded":  # torch 2.6 alone
            found.add((os.path.relpath(code.co_filename, ROOT), code.co_name, code.co_firstlineno))

    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, found


# Of forward, backward and step: (functions that have a name, files that have them). The first number is what holds; it
# is lowered with the code. The aims: stage 2 backward 35 in 9, step 75 in 14; stage 3 forward 30 in 7, backward 60 in
# 14, step 85 in 16. Of the step at stage 2, two functions ask if a gather may stay in flight.
MOST_ENTERED = {2: [(5, 2), (35, 10), (76, 23)], 3: [(22, 5), (46, 13), (85, 27)]}


def ways(stage: int) -> list[list[tuple[str, str, int]]]:
    """The named functions that forward, backward and step of the seventh step enter."""
    engine, x = make_engine(3, stage)
    for _ in range(6):
        engine.backward(engine(x).square().mean())
        engine.step()
    loss, forward = entered(lambda: engine(x).square().mean())
    each = [forward, entered(lambda: engine.backward(loss))[1], entered(engine.step)[1]]
    return [sorted(entry for entry in way if not entry[1].startswith("<")) for way in each]


def ways_of_both() -> dict[int, Any]:
    return {stage: ways(stage) for stage in (2, 3)}


@pytest.fixture(scope="module")
def ways_by_stage() -> dict[int, Any]:
    """The ways of both stages in a process of their own: engines that earlier tests have left would lengthen them."""
    with Pool(1, init_group=False) as pool:
        found: dict[int, Any] = pool.run(ways_of_both)[0]
    return found


@pytest.mark.parametrize(("stage", "part"), [(stage, part) for stage in (2, 3) for part in range(3)])
def test_a_plain_step_enters_few_functions_and_files(stage: int, part: int, ways_by_stage: dict[int, Any]) -> None:
    named = ways_by_stage[stage][part]
    functions, files = MOST_ENTERED[stage][part]
    counts = len(named), len({file for file, *_ in named})
    assert counts <= (functions, counts[1]) and counts[1] <= files, (counts, named)
