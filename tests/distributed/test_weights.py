"""Weights of backwards: ranks whose batches differ in size train by the gradient of the joint batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerolite
from tests.distributed.test_uneven import STAGES, settings
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits, everywhere_equal
from tests.toolkit.configs import ADAMW, SGD, dynamic_fp16
from tests.toolkit.partitioned import raises
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import snapshot
from zerolite.zero import GatheredParameters

STEPS = 4


def rows(step: int, micro: int, rank: int, world: int) -> int:
    """Return how many samples a micro-batch holds: all numbers from 0 to 6, never none on all ranks."""
    if rank == world - 1 and micro == 0:
        return 1 + (step + rank) % 6
    return (5 * rank + 3 * micro + 2 * step) % 7


def batch_of(step: int, micro: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    x, y = models.float_batch(step, micro, rank, size=8)
    count = rows(step, micro, rank, world)
    return x[:count], y[:count]


def weighted(
    config: dict[str, Any], micros: int = 1, flush: bool = False, equal: bool = False, weights: bool = True
) -> dict[str, Any]:
    """Train with ``weight=`` the number of samples, also as a tensor. flush: the window holds one micro-batch less than
    the config says. equal: all batches are of 4 samples."""
    engine = zerolite.initialize(models.build(models.TwoBranches), config)
    gradients, norms = [], []
    for step in range(STEPS):
        for micro in range(micros):
            rank = engine.rank
            x, y = models.float_batch(step, micro, rank) if equal else batch_of(step, micro, rank, engine.world_size)
            loss = torch.nn.functional.mse_loss(engine(x, "left").float(), y)
            weight: Any = torch.tensor(len(x)) if micro else len(x)
            engine.backward(loss, weight=weight if weights else None)
            if micro == micros - 1:
                gradients.append(zerolite.get_full_grad(engine.module.stem.weight))
            engine.step(flush=flush and micro == micros - 1)
        norms.append(engine.get_global_grad_norm())
    with GatheredParameters(engine.module, check=False):
        everywhere_equal(engine.module)
    assert engine.skipped_steps == 0
    return {"parameters": snapshot(engine), "norms": norms, "gradients": gradients}


def weighted_plain(optimizer: tuple[str, dict[str, Any]], micros: int = 1, clip: float = 0.0) -> dict[str, Any]:
    """Plain PyTorch on the one joint batch of each step, in double precision."""
    world, model = dist.get_world_size(), models.build(models.TwoBranches).double()
    torch_optimizer = getattr(torch.optim, optimizer[0])(model.parameters(), **optimizer[1])
    gradients, norms = [], []
    for step in range(STEPS):
        parts = [batch_of(step, micro, rank, world) for micro in range(micros) for rank in range(world)]
        x, y = (torch.cat(tensors).double() for tensors in zip(*parts, strict=True))
        torch_optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x, "left"), y).backward()
        gradients.append(model.stem.weight.grad.clone())
        limit = clip or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        torch_optimizer.step()
    return {
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "norms": norms,
        "gradients": gradients,
    }


@pytest.mark.slow
@on_ranks(1, 2, 3, timeout=120)
def test_weights_give_the_gradient_of_the_joint_batch() -> None:
    for optimizer, clip, micros in ((SGD, 0.0, 1), (ADAMW, 0.5, 3)):
        wanted, results = weighted_plain(optimizer, micros, clip), {}
        for stage in STAGES:
            found = weighted(settings(stage, accumulation=micros, optimizer=optimizer, clip=clip), micros)
            assert found["norms"] == pytest.approx(wanted["norms"], rel=2e-6)
            for got, want in zip(found["gradients"], wanted["gradients"], strict=True):
                torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)
            results[stage] = found["parameters"]
            # Momentum and Adam carry each step's rounding on: a few units in the last place of values around 1.
            atol = 1e-6 if optimizer is SGD else 1e-5
            doubles = {name: value.double() for name, value in results[stage].items()}
            torch.testing.assert_close(doubles, wanted["parameters"], rtol=0, atol=atol)
        for stage in STAGES if dist.get_world_size() < 3 else ():
            first = "0" if micros == 1 or stage in "01" else "2"  # above, each micro-batch is reduced: another order
            assert_same_bits(results[first], results[stage], f"stages {first} and {stage}")


@on_ranks(2)
@pytest.mark.parametrize(("stage", "precision"), [("0", "bf16"), ("2", "fp16"), ("3", "fp16")])
def test_weights_in_16_bits(stage: str, precision: str) -> None:
    """Gradients are those of the joint batch, to the rounding of 16-bit values."""
    found = weighted(settings(stage, precision=precision, accumulation=2), 2)
    rel = 0.02 if precision == "bf16" else 0.003
    assert found["norms"] == pytest.approx(weighted_plain(SGD, 2)["norms"], rel=rel)


@on_ranks(2)
def test_fp16_finds_a_unit_for_large_weights() -> None:
    """Weights of 65,536 would overflow any fp16 gradient; after the first step they are counted in their own unit."""
    engine = zerolite.initialize(
        models.build(models.Mlp), settings("2", fp16=dynamic_fp16(initial_scale_power=4, hysteresis=4))
    )
    model = models.build(models.Mlp)
    for step in range(4):
        engine.backward(models.square_loss(engine, models.float_batch(0, 0, engine.rank)), weight=65536.0)
        model.load_state_dict({name: value.float() for name, value in engine.full_state_dict().items()})
        model.zero_grad()
        for rank in range(2):
            (models.square_loss(model, models.float_batch(0, 0, rank)) / 2).backward()
        plain = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        engine.step()
        assert not step or engine.get_global_grad_norm() == pytest.approx(plain, rel=0.003)
    assert (engine.skipped_steps, engine.global_steps) == (1, 4)


@pytest.mark.slow
@on_ranks(2)
def test_equal_weights_change_no_bit() -> None:
    for stage in ("0", "1", "2", "3"):
        one, other = (weighted(settings(stage), equal=True, weights=weights) for weights in (True, False))
        assert_same_bits(one["parameters"], other["parameters"], f"stage {stage}, with weights and without")


@on_ranks(2)
@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_window_that_is_flushed_early(stage: str) -> None:
    found = weighted(settings(stage, accumulation=5), 2, flush=True)
    assert found["norms"] == pytest.approx(weighted_plain(SGD, 2)["norms"], rel=2e-6)


@on_ranks(2)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_what_is_no_weight(stage: str) -> None:
    engine = zerolite.initialize(models.build(models.Mlp), settings(stage))

    def train(**arguments: Any) -> None:
        engine.backward(models.square_loss(engine, models.float_batch(0, 0, engine.rank)), **arguments)
        engine.step()

    for weight in (-1, float("nan"), torch.ones(2)):
        with raises(ValueError, "expected weight to be the number of tokens or samples"):
            train(weight=weight)
        engine.zero_grad()
    for words, arguments in (
        ("scale_wrt_gas", {"weight": 2, "scale_wrt_gas": False}),
        ("the mean over nothing has no gradient", {"weight": 0}),
        ("some ranks gave a weight", {"weight": 3 if engine.rank == 0 else None}),
    ):
        with raises((ValueError, RuntimeError), words):
            train(**arguments)
        engine.zero_grad()
    with raises(RuntimeError, "all backwards of a step to have a weight, or none"):
        engine.backward(models.square_loss(engine, models.float_batch(0, 0, engine.rank)), weight=2)
        train()
    engine.zero_grad()
    before = snapshot(engine)
    train(weight=2)
    assert not torch.equal(before["first.weight"], snapshot(engine)["first.weight"])
