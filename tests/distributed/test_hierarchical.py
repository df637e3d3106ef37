"""Hierarchical shards: sets of two ranks divide the parameters, all four the states, against four ranks that divide
everything. Sums have another order, so fp32 differs in the last place, and what rounds alike has the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import CLIP, assert_same_bits, assert_same_on_ranks
from tests.toolkit.configs import ADAMW, SGD, at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import expect_words, make_engine, raised, run_steps, snapshot
from zerolite.zero import GatheredParameters

ROWS = {"zero_hpz_partition_size": 2}


def both(train: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run ``train(zero)`` without sets and with them, and compare what it returns."""
    plain, hierarchical = train({}), train(ROWS)
    assert_same_on_ranks(hierarchical)
    torch.testing.assert_close(hierarchical, plain, rtol=1e-6, atol=1e-7)


# -------------------------------------------------------------------- steps that are disturbed


def disturbed(zero: dict[str, Any], stage: str = "3 tight") -> dict[str, Any]:
    """Steps with a rank whose loss is not finite, and between them what users do to weights, gradients and states."""
    engine = make_engine(at(stage, "fp32", 2, CLIP, ADAMW, zero=zero), "Mlp")
    first, *others = engine.module.parameters()
    found: dict[str, Any] = {"losses": run_steps(engine, 2)}
    for micro in range(2):
        x, y = models.float_batch(9, micro, engine.rank)
        engine.backward(nn.functional.mse_loss(engine(x), y) * (torch.nan if engine.rank == 1 and micro else 1.0))
        engine.step()
    assert engine.skipped_steps == 1
    with torch.no_grad():
        found["evaluated"] = engine.eval()(models.float_batch(7, 0, 0)[0])
        first.mul_(1.5)
        others[0].copy_(torch.ones(others[0].shape))
    engine.train()
    found["losses"] += run_steps(engine, 1, 2)
    with GatheredParameters([first], modifier_rank=3):
        if engine.rank == 3:
            first.data.add_(1.0)
    zerolite.set_full_master(others[-1], torch.full(others[-1].ds_shape, 0.25))
    found |= numbered("master", zerolite.get_full_master(list(engine.module.parameters())))
    zerolite.set_full_optimizer_state(others[-1], "exp_avg", torch.full(others[-1].ds_shape, 0.5))
    for micro in range(2):
        x, y = models.float_batch(11, micro, engine.rank)
        engine.backward(nn.functional.mse_loss(engine(x), y))
    mask = torch.arange(first.ds_numel).view(first.ds_shape) % 3 > 0
    first.grad.mul_(mask)
    others[0].grad = others[0].grad.abs() + 1
    found |= numbered("gradient", zerolite.get_full_grad(list(engine.module.parameters())))
    found["largest"] = [float(p.grad.abs().max()) for p in engine.module.parameters()]
    engine.step()
    found |= numbered("state", zerolite.get_full_optimizer_state(list(engine.module.parameters()), "exp_avg_sq"))
    found["losses"] = [float(engine.reduce(torch.tensor(loss))) for loss in found["losses"] + run_steps(engine, 1, 4)]
    return found | snapshot(engine)


def numbered(name: str, values: list[Tensor]) -> dict[str, Tensor]:
    return {f"{name} {place}": value for place, value in enumerate(values)}


@pytest.mark.fast("3 tight-4")
@on_ranks(4)
@pytest.mark.parametrize("stage", ["3 tight", "3 defaults", "3 one unit"])
def test_disturbed_steps(stage: str) -> None:
    both(lambda zero: disturbed(zero, stage))


def unfrozen(zero: dict[str, Any]) -> dict[str, Any]:
    model = models.build(models.TwoBranches)
    model.right.requires_grad_(False)
    engine = zerolite.initialize(model, at("3 moving", zero={"leaf_modules": ["TwoBranches"], **zero}))
    found: dict[str, Any] = {}
    for step in range(6):
        if step in (2, 4):  # as in LISA: another layer each time
            model.right.requires_grad_(step == 2)
            model.left.requires_grad_(step == 4)
        x, y = models.float_batch(step, 0, engine.rank)
        engine.backward(nn.functional.mse_loss(engine(x, "right" if step % 2 and engine.rank else "left"), y))
        engine.step()
        found[f"norm {step}"] = engine.get_global_grad_norm()
    return found | snapshot(engine)


@pytest.mark.slow
@on_ranks(4)
def test_layers_that_are_unfrozen_and_unused() -> None:
    both(unfrozen)


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("model", ["SharedCheckpointed", "EncoderDecoder", "MixtureOfExperts"])
def test_late_gradients_tied_weights_and_experts(model: str) -> None:
    def train(zero: dict[str, Any]) -> dict[str, Any]:
        leaf = {"leaf_modules": ["MoeBlock"]} if model == "MixtureOfExperts" else {}
        engine = make_engine(at("3 moving", "fp32", 2, CLIP, SGD, zero={**leaf, **zero}), model)
        run_steps(engine, 3, model=model)
        return snapshot(engine)

    both(train)


# -------------------------------------------------------------------- states elsewhere


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_states_on_host_and_disk(device: str, tmp_path: Path) -> None:
    """The same bits as on the device."""
    found = []
    offload = {"offload_optimizer": {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}}
    for zero in ({}, offload):
        engine = make_engine(at("3 tight", "bf16", 2, CLIP, ADAMW, zero={**ROWS, **zero}), "Mlp")
        run_steps(engine, 2)
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            next(engine.module.parameters()).data.mul_(2)
        run_steps(engine, 2, 2)
        found.append(snapshot(engine))
    assert_same_on_ranks(found[1])
    assert_same_bits(found[0], found[1], device)


@on_ranks(4)
def test_states_that_leave_for_a_while() -> None:
    engine = make_engine(at("3 tight", "bf16", 1, CLIP, ADAMW, zero=ROWS), "Mlp")
    run_steps(engine, 2)
    before = snapshot(engine)
    engine.offload_states()
    engine.reload_states()
    assert_same_bits(before, snapshot(engine), "reloaded")
    state = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(state)
    assert_same_bits(before, snapshot(engine), "of the optimizer's state")
    assert state["partition"]["rows"] == 2 and state["partition"]["world_size"] == 4
    plain = make_engine(at("3 tight", "bf16", 1, CLIP, ADAMW), "Mlp")
    expect_words(raised(plain.optimizer.load_state_dict, state), "ValueError", "of this rank's partition", "'rows': 2")


# -------------------------------------------------------------------- what is compared, and what is refused


@on_ranks(4)
def test_sets_that_do_not_fit() -> None:
    key = "zero_optimization.zero_hpz_partition_size"
    said = raised(make_engine, at("3", zero={"zero_hpz_partition_size": 3}), "Mlp")
    expect_words(said, "ConfigError", key, "a divisor of the 4 data-parallel ranks, got 3")
    said = raised(make_engine, at("3", zero={"zero_hpz_partition_size": 2 if dist.get_rank() else 4}), "Mlp")
    expect_words(said, "RuntimeError", "different grids", key, "rank 0")
    for more, words in (
        ({"shard_size": 2}, ("beside zero_optimization.shard_size", "got 2")),
        ({"offload_param": {"device": "cpu"}}, ("with zero_optimization.offload_param", "got 2")),
    ):
        expect_words(raised(make_engine, at("3", zero={**ROWS, **more}), "Mlp"), "ConfigError", key, *words)
    one_set = make_engine(at("3", zero={"zero_hpz_partition_size": 4}), "Mlp")
    assert one_set._parts.groups.replicate is None
