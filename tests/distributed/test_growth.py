"""Parameters that are trained from some step on: unfrozen midway, or added in a param group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, PARTITIONED, SGD, config
from tests.toolkit.growth import Frozen, message_of
from tests.toolkit.pool import Pools
from tests.toolkit.training import snapshot

LR = 3e-3  # of an added group
WAKES, SLEEPS, WAKES_AGAIN = 2, 4, 5  # steps


def change(model: Frozen, step: int, optimizer: Any, how: str) -> None:
    """Make the user's change before ``step``; the same to a plain model and its optimizer."""
    if step == WAKES:
        for parameter in model.sleepers():
            parameter.requires_grad_(True)
        if how == "group":
            optimizer.add_param_group({"params": model.sleepers(), "lr": LR})
    if step == SLEEPS:
        model.last.bias.requires_grad_(False)
    if step == WAKES_AGAIN:
        model.last.bias.requires_grad_(True)


def train(config: dict[str, Any], how: str, steps: int, micros: int = 1, loop: str = "engine") -> dict[str, Any]:
    """how: "config" (woken parameters join the only group), "instance" (the user's optimizer has all of them from the
    start) or "group" (they are added). loop: "engine", or "module" for torch's own loop over ``engine.module``."""
    model = models.build(Frozen)
    more = {}
    if how == "instance":
        settings = config.pop("optimizer")
        more["optimizer"] = getattr(torch.optim, settings["type"])(model.parameters(), **settings["params"])
    engine = zerolite.initialize(model, config, **more)
    losses = []
    for step in range(steps):
        change(model, step, engine.optimizer, how)
        for micro in range(micros):
            batch = models.float_batch(step, micro, engine.rank)
            if loop == "engine":
                loss = models.square_loss(engine, batch)
                engine.backward(loss)
                engine.step()
            else:
                loss = models.square_loss(engine.module, batch)
                (loss / micros).backward()
            losses.append(float(loss.detach()))
        if loop == "module":
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    states = engine.optimizer.state_dict()["state"]
    counts = sorted(int(state["step"]) for state in states.values() if "step" in state)
    return {"losses": losses, "norm": engine.get_global_grad_norm(), "parameters": snapshot(engine), "steps": counts}


def train_plain(optimizer: tuple[str, dict[str, Any]], how: str, steps: int, world: int, micros: int = 1) -> Any:
    """The same in plain PyTorch on the joint batches."""
    model = models.build(Frozen)
    kind = getattr(torch.optim, optimizer[0])
    start = model.parameters() if how != "group" else [p for p in model.parameters() if p.requires_grad]
    torch_optimizer = kind(start, **optimizer[1])
    for step in range(steps):
        change(model, step, torch_optimizer, how)
        torch_optimizer.zero_grad()
        for micro in range(micros):
            for rank in range(world):
                loss = models.square_loss(model, models.float_batch(step, micro, rank))
                (loss / (world * micros)).backward()
        torch_optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def refused(stage: int) -> dict[str, str]:
    """The sentences for what cannot be."""
    model = models.build(Frozen)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    trained = [{"params": [model.second.weight]}, {"params": [model.last.weight], "lr": 0.2}]
    engine = zerolite.initialize(model, config, model_parameters=trained)
    messages = {}
    added = {
        "foreign": nn.Parameter(torch.zeros(2)),
        "trained": model.last.weight,
        "fine": model.scale,
    }
    for name, parameter in added.items():
        messages[name] = message_of(engine.optimizer.add_param_group, {"params": [parameter]})
    model.first.bias.requires_grad_(True)
    batch = models.float_batch(0, 0, engine.rank)

    def step() -> None:
        engine.backward(models.square_loss(engine, batch))
        engine.step()

    messages["homeless"] = message_of(step)
    model.first.bias.requires_grad_(False)
    engine.zero_grad()
    messages["afterwards"] = message_of(step)
    return messages


def new_module(stage: int) -> dict[str, Any]:
    """A head that is added to the model after it was given to the engine."""
    model = models.build(Frozen)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    engine = zerolite.initialize(model, config)
    torch.manual_seed(100 + engine.rank)  # the ranks' values differ; rank 0's are everyone's
    model.last = nn.Sequential(model.last, nn.Linear(3, 3))
    message = message_of(engine.optimizer.add_param_group, {"params": model.last[1].parameters()})
    if message:
        return {"message": message}
    before = snapshot(engine)["last.1.weight"]
    for step in range(2):
        engine.backward(models.square_loss(engine, models.float_batch(step, 0, engine.rank)))
        engine.step()
    after = snapshot(engine)
    return {"message": message, "before": before, "after": after["last.1.weight"], "parameters": after}


# -------------------------------------------------------------------- the tests


STEPS = 7
STAGES: dict[str, tuple[int, dict[str, Any] | None]] = {
    "0": (0, None),
    "1": (1, None),
    "2": (2, None),
    "2-overlap": (2, {"overlap_comm": True}),
    "3": (3, PARTITIONED["moving"]),
    "3-tight": (3, PARTITIONED["tight"]),
    "3-defaults": (3, PARTITIONED["defaults"]),
}
FAST = {"0", "2-overlap", "3-tight"}


def over_stages(*names: str) -> Any:
    marked = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names or STAGES]
    return pytest.mark.parametrize("stage", marked)


def run(pools: Pools, world: int, stage: str, optimizer: Any, how: str, **more: Any) -> list[dict[str, Any]]:
    number, zero = STAGES[stage]
    settings = config(number, more.pop("precision", "fp32"), more.get("micros", 1), 0.0, optimizer, zero)
    settings["train_micro_batch_size_per_gpu"] = 4
    return pools(world).run(train, {"config": settings, "how": how, "steps": STEPS, **more})


@pytest.mark.slow
@over_stages()
@pytest.mark.parametrize("how", ["config", "instance", "group"])
def test_unfrozen_parameters_are_trained_like_plain_pytorch(pools: Pools, stage: str, how: str) -> None:
    for world, micros, optimizer in ((2, 1, ADAMW), (3, 2, SGD)):
        ranks = run(pools, world, stage, optimizer, how, micros=micros)
        wanted = train_plain(optimizer, how, STEPS, world, micros)
        for rank in ranks:
            assert_same_bits(rank["parameters"], ranks[0]["parameters"], "parameters of two ranks")
        for name, value in wanted.items():
            torch.testing.assert_close(
                ranks[0]["parameters"][name], value, rtol=0, atol=3e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        if optimizer is ADAMW:  # who slept has fewer steps behind it
            lengths = {STEPS, STEPS - WAKES, STEPS - 1}
            assert {count for rank in ranks for count in rank["steps"]} == lengths


@over_stages()
def test_torchs_own_loop_over_the_module(pools: Pools, stage: str) -> None:
    by_module = run(pools, 2, stage, ADAMW, "config", loop="module")
    by_engine = run(pools, 2, stage, ADAMW, "config")
    assert_same_bits(by_module[0]["parameters"], by_engine[0]["parameters"], "the two loops")


@pytest.mark.fast("fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stages_give_the_same_bits(pools: Pools, precision: str) -> None:
    names = ("0", "1", "2", "3", "3-tight")
    results = {name: run(pools, 2, name, ADAMW, "group", precision=precision)[0] for name in names}
    for name in names[1:]:
        assert_same_bits(results["0"]["parameters"], results[name]["parameters"], f"stages 0 and {name}")
        assert results[name]["losses"] == results["0"]["losses"]


@pytest.mark.fast("1-implementation0", "3-implementation1")
@pytest.mark.parametrize("implementation", [{"foreach": True}, {"amsgrad": True}])
@pytest.mark.parametrize("stage", ["1", "3"])
def test_torchs_implementations_take_them_too(pools: Pools, stage: str, implementation: dict[str, bool]) -> None:
    optimizer = (ADAMW[0], {**ADAMW[1], **implementation})
    ranks = run(pools, 2, stage, optimizer, "config")
    wanted = train_plain(optimizer, "config", STEPS, 2)
    for name, value in wanted.items():
        torch.testing.assert_close(ranks[0]["parameters"][name], value, rtol=0, atol=3e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_cannot_be_is_said(pools: Pools, stage: int) -> None:
    for messages in pools(2).run(refused, {"stage": stage}):
        assert "no parameter of the engine's module" in messages["foreign"]
        assert "'last.weight', which is trained already" in messages["trained"]
        assert messages["fine"] == ""
        assert "'first.bias'" in messages["homeless"] and "engine.optimizer.add_param_group" in messages["homeless"]
        assert messages["afterwards"] == ""


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_module_that_is_added_later(pools: Pools, stage: int) -> None:
    ranks = pools(2).run(new_module, {"stage": stage})
    for rank in ranks:
        if stage == 3:
            assert "'last.1.weight'" in rank["message"] and "before zerolite.initialize" in rank["message"]
        else:
            assert rank["message"] == ""
            assert torch.equal(rank["before"], ranks[0]["before"])
            assert not torch.equal(rank["before"], rank["after"])
            assert_same_bits(rank["parameters"], ranks[0]["parameters"], "parameters of two ranks")
