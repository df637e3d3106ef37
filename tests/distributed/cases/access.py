"""Gradients, masters and states by parameter, and what users do with ``p.grad``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zerolite
from tests import models
from tests.distributed.cases.growth import _message
from tests.distributed.cases.training import make_engine, snapshot

SKIPPED = ("empty", "unused")  # of OddModel: they never have states


def read_and_write(config: dict[str, Any], steps: int, micros: int, batched: bool) -> dict[str, Any]:
    """Trains OddModel, doubling the first gradient and dropping the last by hand in every step; what was read."""
    engine = make_engine(config)
    named = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    names, parameters = list(named), list(named.values())
    read: dict[str, Any] = {"grads": [], "norms": []}

    def get(function: Any, *args: Any) -> list[Any]:
        return function(parameters, *args) if batched else [function(p, *args) for p in parameters]

    read["before"] = get(zerolite.get_full_grad) + get(zerolite.get_full_optimizer_state, "exp_avg")
    for step in range(steps):
        for micro in range(micros):
            loss = models.token_loss(engine, models.token_batch(step, micro, engine.rank))
            engine.backward(loss)
            if micro < micros - 1:
                engine.step()
        grads = get(zerolite.get_full_grad)
        read["grads"].append(dict(zip(names, grads, strict=True)))
        if batched:
            zerolite.set_full_grad([parameters[0], parameters[-1]], [grads[0] * 2, None])
        else:
            zerolite.set_full_grad(parameters[0], grads[0] * 2)
            zerolite.set_full_grad(parameters[-1], None)
        engine.step()
        read["norms"].append(engine.get_global_grad_norm())
    read["masters"] = dict(zip(names, get(zerolite.get_full_master), strict=True))
    for name in ("exp_avg", "exp_avg_sq", "step"):
        read[name] = dict(zip(names, get(zerolite.get_full_optimizer_state, name), strict=True))
    check_whole_states(engine, {name: read[name] for name in ("exp_avg", "exp_avg_sq", "step")}, names)
    read["parameters"] = snapshot(engine)
    return read


def check_whole_states(engine: Any, read: dict[str, dict[str, Any]], names: list[str]) -> None:
    """Compare engine.full_optimizer_state_dict() with what was read of each parameter."""
    whole = engine.full_optimizer_state_dict()
    on_rank_0 = engine.full_optimizer_state_dict(rank0_only=True)
    assert on_rank_0.keys() == (whole.keys() if engine.rank == 0 else set())
    (group,) = whole["param_groups"]
    assert len(group["params"]) == len(engine.optimizer.param_groups[0]["params"])
    for position, name in zip(group["params"], names, strict=True):
        wanted = {kind: of_names[name] for kind, of_names in read.items() if of_names[name] is not None}
        torch.testing.assert_close(whole["state"].get(position, {}), wanted, rtol=0, atol=0)


def set_everything(config: dict[str, Any]) -> dict[str, Any]:
    """After one step, masters and states are replaced; a second step follows."""
    engine = make_engine(config)
    parameters = {n: p for n, p in engine.module.named_parameters() if p.requires_grad and n not in SKIPPED}

    def step(number: int) -> None:
        engine.backward(models.token_loss(engine, models.token_batch(number, 0, engine.rank)))
        engine.step()

    step(0)
    for number, parameter in enumerate(parameters.values()):
        master = zerolite.get_full_master(parameter)
        values = torch.linspace(-1, 1, master.numel()).reshape(master.shape) + number
        zerolite.set_full_master(parameter, values)
        zerolite.set_full_optimizer_state(parameter, "exp_avg", values * 1e-2)
        zerolite.set_full_optimizer_state([parameter], "step", [7])
    result = {"set": snapshot(engine)}
    result["masters"] = {name: zerolite.get_full_master(p) for name, p in parameters.items()}
    step(1)
    result["after"] = snapshot(engine)
    result["averages"] = {name: zerolite.get_full_optimizer_state(p, "exp_avg") for name, p in parameters.items()}
    result["steps"] = [float(zerolite.get_full_optimizer_state(p, "step")) for p in parameters.values()]
    return result


def refusals(config: dict[str, Any]) -> dict[str, str]:
    engine = make_engine(config)
    module = engine.module
    parameter = next(p for p in module.parameters() if p.requires_grad)
    batch = models.token_batch(0, 0, engine.rank)

    def backward() -> None:
        engine.backward(models.token_loss(engine, batch))

    backward()
    said = {
        "shape of the value": _message(zerolite.set_full_grad, parameter, torch.zeros(3)),
        "foreign": _message(zerolite.get_full_grad, nn.Parameter(torch.zeros(3))),
        "count": _message(zerolite.set_full_grad, [parameter], []),
        "state too early": _message(zerolite.set_full_optimizer_state, parameter, "exp_avg", torch.zeros(())),
    }
    parameter.grad = torch.zeros_like(parameter.grad)
    engine.zero_grad()
    said["nothing left"] = "".join(str(p.grad) for p in module.parameters() if p.grad is not None)
    backward()
    engine.step()
    said["unknown state"] = _message(zerolite.get_full_optimizer_state, parameter, "nonsense")
    return said


def dropped(config: dict[str, Any], how: str) -> dict[str, Any]:
    """A bad batch whose gradients the user drops, then a good one."""
    engine = make_engine(config)
    if how != "never":
        engine.backward(models.token_loss(engine, models.token_batch(9, 0, engine.rank)) * 1e3)
    if how == "module.zero_grad":
        engine.module.zero_grad()
    elif how == "engine.zero_grad":
        engine.zero_grad()
    elif how == "grad = None":
        for parameter in engine.module.parameters():
            parameter.grad = None
    loss = models.token_loss(engine, models.token_batch(0, 0, engine.rank))
    if engine.rank == 0:
        loss.backward()  # the plain loop begins without telling the engine
    else:
        engine.backward(loss)
    engine.optimizer.step()
    return {"parameters": snapshot(engine), "norm": engine.get_global_grad_norm()}


def tiny_steps_after_loading(config: dict[str, Any]) -> float:
    """Return how far five steps of 2e-6 have moved a master from the loaded value, in an element that moved one way."""
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 2e-6, "weight_decay": 0.0, "betas": [0.9, 0.9]}}
    engine = make_engine(config)
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if p.requires_grad)
    state = engine.full_state_dict()
    engine.load_full_state_dict(state)
    for _ in range(5):
        engine.backward(models.token_loss(engine, models.token_batch(0, 0, engine.rank)))
        engine.step()
    return float((zerolite.get_full_master(parameter) - state[name].float()).abs().max())
