"""Parameters that are trained from some step on: unfrozen midway, or added in a param group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.cases import growth
from tests.distributed.configs import ADAMW, PARTITIONED, SGD, config
from tests.distributed.test_parity import assert_same_bits
from tests.pool import Pools

CASES = "tests.distributed.cases.growth"
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
    return pools(world).run(f"{CASES}:train", {"config": settings, "how": how, "steps": STEPS, **more})


@pytest.mark.slow
@over_stages()
@pytest.mark.parametrize("how", ["config", "instance", "group"])
def test_unfrozen_parameters_are_trained_like_plain_pytorch(pools: Pools, stage: str, how: str) -> None:
    for world, micros, optimizer in ((2, 1, ADAMW), (3, 2, SGD)):
        ranks = run(pools, world, stage, optimizer, how, micros=micros)
        wanted = growth.train_plain(optimizer, how, STEPS, world, micros)
        for rank in ranks:
            assert_same_bits(rank["parameters"], ranks[0]["parameters"], "parameters of two ranks")
        for name, value in wanted.items():
            torch.testing.assert_close(
                ranks[0]["parameters"][name], value, rtol=0, atol=3e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        if optimizer is ADAMW:  # who slept has fewer steps behind it
            lengths = {STEPS, STEPS - growth.WAKES, STEPS - 1}
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
    wanted = growth.train_plain(optimizer, "config", STEPS, 2)
    for name, value in wanted.items():
        torch.testing.assert_close(ranks[0]["parameters"][name], value, rtol=0, atol=3e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_cannot_be_is_said(pools: Pools, stage: int) -> None:
    for messages in pools(2).run(f"{CASES}:refused", {"stage": stage}):
        assert "no parameter of the engine's module" in messages["foreign"]
        assert "'last.weight', which is trained already" in messages["trained"]
        assert messages["fine"] == ""
        assert "'first.bias'" in messages["homeless"] and "engine.optimizer.add_param_group" in messages["homeless"]
        assert messages["afterwards"] == ""


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_module_that_is_added_later(pools: Pools, stage: int) -> None:
    ranks = pools(2).run(f"{CASES}:new_module", {"stage": stage})
    for rank in ranks:
        if stage == 3:
            assert "'last.1.weight'" in rank["message"] and "before zerolite.initialize" in rank["message"]
        else:
            assert rank["message"] == ""
            assert torch.equal(rank["before"], ranks[0]["before"])
            assert not torch.equal(rank["before"], rank["after"])
            assert_same_bits(rank["parameters"], ranks[0]["parameters"], "parameters of two ranks")
