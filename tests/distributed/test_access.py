"""Gradients, masters and states by parameter, and what users do with ``p.grad``: right, or an error; never nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import zerolite
from tests.toolkit import models, reference
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, PARTITIONED, config
from tests.toolkit.growth import message_of
from tests.toolkit.pool import Pools
from tests.toolkit.training import make_engine, snapshot

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
        "shape of the value": message_of(zerolite.set_full_grad, parameter, torch.zeros(3)),
        "foreign": message_of(zerolite.get_full_grad, nn.Parameter(torch.zeros(3))),
        "count": message_of(zerolite.set_full_grad, [parameter], []),
        "state too early": message_of(zerolite.set_full_optimizer_state, parameter, "exp_avg", torch.zeros(())),
    }
    parameter.grad = torch.zeros_like(parameter.grad)
    engine.zero_grad()
    said["nothing left"] = "".join(str(p.grad) for p in module.parameters() if p.grad is not None)
    backward()
    engine.step()
    said["unknown state"] = message_of(zerolite.get_full_optimizer_state, parameter, "nonsense")
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


# -------------------------------------------------------------------- the tests


STAGES = {
    "0": (0, None),
    "1": (1, None),
    "2": (2, None),
    "1w": (1, {"whole_parameters": True}),
    "3": (3, PARTITIONED["moving"]),
    "3w": (3, PARTITIONED["defaults"]),
}
STEPS = 3
OVER_STAGES = pytest.mark.parametrize(
    "stage", [pytest.param(name, marks=pytest.mark.slow if name in ("1", "1w", "3w") else ()) for name in STAGES]
)


def settings(stage: str, precision: str = "fp32", micros: int = 1) -> dict[str, Any]:
    number, zero = STAGES[stage]
    return config(number, precision, micros, 0.0, ADAMW, zero)


@functools.cache
def plain(world: int, micros: int) -> dict[str, Any]:
    model = models.build(models.OddModel)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW[1])
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    read: dict[str, Any] = {"grads": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micros):
            for rank in range(world):
                loss = models.token_loss(model, models.token_batch(step, micro, rank))
                (loss / (world * micros)).backward()
        read["grads"].append({name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()})
        first, *_, last = parameters.values()
        first.grad *= 2
        last.grad = None
        read["norms"].append(float(reference.global_norm([p.grad for p in parameters.values() if p.grad is not None])))
        optimizer.step()
    read["masters"] = {name: p.detach().clone() for name, p in parameters.items()}
    for name in ("exp_avg", "exp_avg_sq", "step"):
        # Here a parameter without elements has no states.
        read[name] = {n: optimizer.state[p].get(name) if p.numel() else None for n, p in parameters.items()}
    return read


def assert_close(got: dict[str, Any], wanted: dict[str, Any], what: str, atol: float = 2e-6) -> None:
    for name, value in wanted.items():
        if value is None:
            assert got[name] is None, f"{what} of {name}"
        else:
            torch.testing.assert_close(
                got[name], value, rtol=1e-5, atol=atol, msg=lambda m, n=name: f"{what} of {n}: {m}"
            )


@pytest.mark.fast("True-0")
@OVER_STAGES
@pytest.mark.parametrize("batched", [False, True])
def test_what_is_read_and_written_is_plain_pytorchs(pools: Pools, stage: str, batched: bool) -> None:
    for world, micros in ((2, 1), (3, 2)):
        wanted = plain(world, micros)
        arguments = {"config": settings(stage, micros=micros), "steps": STEPS, "micros": micros, "batched": batched}
        for rank in pools(world).run(read_and_write, arguments):
            assert rank["before"] == [None] * len(rank["before"])
            for got, grads in zip(rank["grads"], wanted["grads"], strict=True):
                assert_close(got, grads, "gradient", atol=1e-6)
            assert rank["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
            for kind in ("masters", "exp_avg", "exp_avg_sq", "step"):
                assert_close(rank[kind], wanted[kind], kind)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_stages_read_the_same_bits_in_16_bits(pools: Pools, precision: str) -> None:
    results = {
        stage: pools(2).run(
            read_and_write,
            {"config": settings(stage, precision), "steps": STEPS, "micros": 1, "batched": True},
        )
        for stage in STAGES
    }
    for stage, ranks in results.items():
        for rank in ranks:
            assert rank["norms"] == pytest.approx(results["0"][0]["norms"], rel=1e-12), stage
            for kind in ("masters", "exp_avg", "parameters"):
                kept = {n: v for n, v in results["0"][0][kind].items() if v is not None}
                assert_same_bits(kept, {n: rank[kind][n] for n in kept}, f"{kind} of stages 0 and {stage}")
            for one, other in zip(results["0"][0]["grads"], rank["grads"], strict=True):
                kept = {name: value for name, value in one.items() if value is not None}
                assert_same_bits(kept, {name: other[name] for name in kept}, f"gradients of stages 0 and {stage}")


@pytest.mark.fast("fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_masters_and_states_are_set(pools: Pools, precision: str) -> None:
    results = {stage: pools(2).run(set_everything, {"config": settings(stage, precision)}) for stage in STAGES}
    first = results["0"][0]
    for number, (name, value) in enumerate(first["masters"].items()):
        wanted = torch.linspace(-1, 1, value.numel()).reshape(value.shape) + number
        assert torch.equal(value, wanted)
        assert torch.equal(first["set"][name], wanted.to(first["set"][name].dtype))
    for stage, ranks in results.items():
        for rank in ranks:
            assert set(rank["steps"]) == {8.0}, stage
            for kind in ("masters", "set", "after", "averages"):
                assert_same_bits(first[kind], rank[kind], f"{kind} of stages 0 and {stage}")


@OVER_STAGES
def test_nothing_is_passed_over_in_silence(pools: Pools, stage: str) -> None:
    for said in pools(2).run(refusals, {"config": settings(stage)}):
        assert "expected a tensor of" in said["shape of the value"]
        assert "that an engine trains" in said["foreign"]
        assert "a value for each of 1 parameters, got 0" in said["count"]
        assert "made by the first update" in said["state too early"]
        assert said["nothing left"] == ""
        assert "no optimizer state 'nonsense'" in said["unknown state"]


@OVER_STAGES
def test_gradients_set_to_none_are_dropped(pools: Pools, stage: str) -> None:
    wanted = pools(2).run(dropped, {"config": settings(stage), "how": "never"})
    for how in ("module.zero_grad", "engine.zero_grad", "grad = None"):
        ranks = pools(2).run(dropped, {"config": settings(stage), "how": how})
        for got, want in zip(ranks, wanted, strict=True):
            assert got["norm"] == want["norm"], how
            assert_same_bits(want["parameters"], got["parameters"], how)


@OVER_STAGES
def test_masters_go_on_from_loaded_values(pools: Pools, stage: str) -> None:
    """Steps smaller than a 16-bit unit add up in the masters, also after values were loaded."""
    for moved in pools(2).run(tiny_steps_after_loading, {"config": settings(stage, "bf16")}):
        assert moved > 4.5 * 2e-6
