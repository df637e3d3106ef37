"""Functions of zerolite that a plain training step enters, without any option, in its steady state.

They say how long the way through the code is: a feature that is off must add none.
"""

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
from zerolite.comm import NullCommunicator, use_communicator

ROOT = os.path.dirname(zerolite.__file__)
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "consistency_check_interval": 0,
}

pytestmark = pytest.mark.usefixtures("one_thread")


def entered(function: Callable[[], Any]) -> tuple[Any, set[tuple[str, str, int]]]:
    """Return the result of ``function``, and the functions that it enters: file, name, line."""
    found: set[tuple[str, str, int]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name != "kept_out":  # torch 2.6 alone
            found.add((os.path.relpath(code.co_filename, ROOT), code.co_name, code.co_firstlineno))

    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, found


def plain_step(zero: dict[str, Any]) -> list[set[tuple[str, str, int]]]:
    """Return the functions that a forward, a backward and a step enter after six steps."""
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3)]
    with use_communicator(lambda rank, world: NullCommunicator(0, 8)):
        engine = zerolite.initialize(nn.Sequential(*layers), {**CONFIG, "zero_optimization": zero})
    x = torch.ones(2, 8)
    for _ in range(6):
        engine.backward(engine(x).square().mean())
        engine.step()
    loss, forward = entered(lambda: engine(x).square().mean())
    _, backward = entered(lambda: engine.backward(loss))
    _, step = entered(engine.step)
    return [forward, backward, step]


# Of forward, backward and step: functions that have a name, and files that have them.
@pytest.mark.parametrize(("stage", "most"), [(2, [(6, 3), (76, 18), (144, 33)]), (3, [(25, 6), (94, 23), (161, 38)])])
def test_a_plain_step_enters_few_functions_and_files(stage: int, most: list[tuple[int, int]]) -> None:
    for found, (functions, files) in zip(plain_step({"stage": stage}), most, strict=True):
        named = sorted(entry for entry in found if not entry[1].startswith("<"))
        assert len(named) <= functions and len({file for file, *_ in named}) <= files, named
