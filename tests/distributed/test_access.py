"""Gradients, masters and states by parameter: the same bits at every stage, or an error; never nothing.

Stages are compared with plain PyTorch in test_drop_in.py.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerolite
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import backward, make_engine, raised, run_steps, snapshot

STEPS = 2
STAGES = ("0", "1", "2", "3 moving", "3 defaults")
WHOLE = ("0", "1", "3 moving")  # of an optimizer that needs whole parameters
STATES = ("exp_avg", "exp_avg_sq", "step")


class WholeAdamW(torch.optim.AdamW):
    """An optimizer whose states belong to one rank each."""

    zerolite_elementwise = False


def settings(stage: str, precision: str = "fp32") -> dict[str, Any]:
    return at(stage, precision, optimizer=ADAMW)


def read_and_write(config: dict[str, Any], batched: bool, whole: bool = False) -> dict[str, Any]:
    """Trains OddModel, doubling the first gradient and dropping the last by hand in every step; what was read."""
    more: dict[str, Any] = {}
    if whole:
        more["optimizer"] = functools.partial(WholeAdamW, **config.pop("optimizer")["params"])
    engine = make_engine(config, **more)
    named = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    parameters, read = list(named.values()), {}

    def get(function: Any, *args: Any) -> list[Any]:
        return function(parameters, *args) if batched else [function(p, *args) for p in parameters]

    assert get(zerolite.get_full_grad) + get(zerolite.get_full_optimizer_state, "exp_avg") == [None] * len(named) * 2
    for number in range(STEPS):
        backward(engine, number, model="OddModel")
        grads = get(zerolite.get_full_grad)
        read[f"gradients {number}"] = dict(zip(named, grads, strict=True))
        if batched:
            zerolite.set_full_grad([parameters[0], parameters[-1]], [grads[0] * 2, None])
        else:
            zerolite.set_full_grad(parameters[0], grads[0] * 2)
            zerolite.set_full_grad(parameters[-1], None)
        engine.step()
        read[f"norm {number}"] = {"": torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)}
    read["masters"] = dict(zip(named, get(zerolite.get_full_master), strict=True))
    for name in STATES:
        read[name] = dict(zip(named, get(zerolite.get_full_optimizer_state, name), strict=True))
    return {**read, **replace(engine, {name: p for name, p in named.items() if name not in ("empty", "unused")})}


def replace(engine: Any, trained: dict[str, nn.Parameter]) -> dict[str, Any]:
    """Set masters and states, and take a step: the parameters and averages afterwards."""
    run_steps(engine, 1, STEPS, "OddModel")  # which gives states to the parameter whose gradients were dropped
    for number, (name, parameter) in enumerate(trained.items()):
        master = zerolite.get_full_master(parameter)
        values = torch.linspace(-1, 1, master.numel()).reshape(master.shape) + number
        zerolite.set_full_master(parameter, values)
        zerolite.set_full_optimizer_state(parameter, "exp_avg", values * 1e-2)
        zerolite.set_full_optimizer_state([parameter], "step", [7])
        assert torch.equal(zerolite.get_full_master(parameter), values)
        assert torch.equal(zerolite.get_full_optimizer_state(parameter, "exp_avg"), values * 1e-2)
        assert torch.equal(snapshot(engine)[name], values.to(parameter.dtype))
    run_steps(engine, 1, STEPS + 1, "OddModel")
    assert {float(zerolite.get_full_optimizer_state(p, "step")) for p in trained.values()} == {8.0}
    averages = {name: zerolite.get_full_optimizer_state(p, "exp_avg") for name, p in trained.items()}
    return {"parameters": snapshot(engine), "averages": averages}


def known(values: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.fast("2-False-fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("whole", [False, True])
@on_ranks(2, 3)
def test_what_is_read_and_written_has_the_same_bits_at_all_stages(precision: str, whole: bool) -> None:
    """Parameters are read one by one, or several at once."""
    stages = WHOLE if whole else STAGES
    found = {stage: read_and_write(settings(stage, precision), stage in ("1", "3 moving"), whole) for stage in stages}
    for stage, read in found.items():
        for kind, values in read.items():
            assert known(values).keys() == known(found["0"][kind]).keys(), kind
            if kind.startswith("norm"):
                torch.testing.assert_close(values, found["0"][kind], rtol=1e-12, atol=0)
            else:
                assert_same_bits(known(found["0"][kind]), known(values), f"{kind} of stages 0 and {stage}")


OVER_STAGES = pytest.mark.parametrize("stage", ["0", "2", "3"])


@OVER_STAGES
@on_ranks(2)
def test_nothing_is_passed_over_in_silence(stage: str) -> None:
    engine = make_engine(settings(stage))
    parameter = next(p for p in engine.module.parameters() if p.requires_grad)
    backward(engine, 0, model="OddModel")
    for words, call in {
        "expected a tensor of": lambda: zerolite.set_full_grad(parameter, torch.zeros(3)),
        "that an engine trains": lambda: zerolite.get_full_grad(nn.Parameter(torch.zeros(3))),
        "a value for each of 1 parameters, got 0": lambda: zerolite.set_full_grad([parameter], []),
        "made by the first update": lambda: zerolite.set_full_optimizer_state(parameter, "exp_avg", torch.zeros(())),
    }.items():
        assert words in raised(call)
    parameter.grad = torch.zeros_like(parameter.grad)
    engine.zero_grad()
    assert all(p.grad is None for p in engine.module.parameters())
    run_steps(engine, 1, 0, "OddModel")
    assert "no optimizer state 'nonsense'" in raised(lambda: zerolite.get_full_optimizer_state(parameter, "nonsense"))


@OVER_STAGES
@on_ranks(2)
def test_masters_go_on_from_loaded_values(stage: str) -> None:
    """Steps smaller than a 16-bit unit add up in the masters, also after values were loaded."""
    made = settings(stage, "bf16")
    made["optimizer"] = {"type": "AdamW", "params": {"lr": 2e-6, "weight_decay": 0.0, "betas": [0.9, 0.9]}}
    engine = make_engine(made)
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if p.requires_grad)
    state = engine.full_state_dict()
    engine.load_full_state_dict(state)
    for _ in range(5):
        run_steps(engine, 1, 0, "OddModel")
    assert (zerolite.get_full_master(parameter) - state[name].float()).abs().max() > 4.5 * 2e-6
