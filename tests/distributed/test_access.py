"""Gradients, masters and states by parameter, and what users do with ``p.grad``: right, or an error; never nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests import models, reference
from tests.distributed.configs import ADAMW, PARTITIONED, config
from tests.distributed.test_parity import assert_same_bits
from tests.pool import Pools

CASES = "tests.distributed.cases.access"
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
        for rank in pools(world).run(f"{CASES}:read_and_write", arguments):
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
            f"{CASES}:read_and_write",
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
    results = {
        stage: pools(2).run(f"{CASES}:set_everything", {"config": settings(stage, precision)}) for stage in STAGES
    }
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
    for said in pools(2).run(f"{CASES}:refusals", {"config": settings(stage)}):
        assert "expected a tensor of" in said["shape of the value"]
        assert "that an engine trains" in said["foreign"]
        assert "a value for each of 1 parameters, got 0" in said["count"]
        assert "made by the first update" in said["state too early"]
        assert said["nothing left"] == ""
        assert "no optimizer state 'nonsense'" in said["unknown state"]


@OVER_STAGES
def test_gradients_set_to_none_are_dropped(pools: Pools, stage: str) -> None:
    wanted = pools(2).run(f"{CASES}:dropped", {"config": settings(stage), "how": "never"})
    for how in ("module.zero_grad", "engine.zero_grad", "grad = None"):
        ranks = pools(2).run(f"{CASES}:dropped", {"config": settings(stage), "how": how})
        for got, want in zip(ranks, wanted, strict=True):
            assert got["norm"] == want["norm"], how
            assert_same_bits(want["parameters"], got["parameters"], how)


@OVER_STAGES
def test_masters_go_on_from_loaded_values(pools: Pools, stage: str) -> None:
    """Steps smaller than a 16-bit unit add up in the masters, also after values were loaded."""
    for moved in pools(2).run(f"{CASES}:tiny_steps_after_loading", {"config": settings(stage, "bf16")}):
        assert moved > 4.5 * 2e-6
