"""All ranks launch the same collectives in the same order, whatever gradients, losses and weights each of them has:
NCCL compares nothing, and would exchange what ranks that have parted happen to send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.configs import ADAMW, PARTITIONED, config, dynamic_fp16
from tests.distributed.test_parity import assert_same_bits
from tests.pool import Pools

CASES = "tests.distributed.cases.lockstep"
STAGES = ["0", "1", "2", "3 defaults", "3 moving", "3 tight"]


def setting(stage: str, precision: str, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    number, _, kind = stage.partition(" ")
    more = {"consistency_check_interval": 2, **more}
    if precision == "fp16":
        more = {"fp16": dynamic_fp16(), **more}
        precision = ""
    return config(int(number), precision, accumulation, 0.4, ADAMW, zero=PARTITIONED.get(kind), **more)


def assert_in_step(ranks: list[dict[str, Any]], what: str) -> None:
    for rank, result in enumerate(ranks):
        parted = [pair for pair in zip(ranks[0]["launched"], result["launched"], strict=False) if pair[0] != pair[1]]
        assert not parted, f"{what}: rank 0 launches {parted[0][0]}, rank {rank} {parted[0][1]}"
        assert len(result["launched"]) == len(ranks[0]["launched"]), f"{what}: rank {rank}"
        if "parameters" in result:
            assert_same_bits(result["parameters"], ranks[0]["parameters"], f"{what}: rank {rank} and rank 0")
            assert result["counters"] == ranks[0]["counters"], what


@pytest.mark.fast("1-fp16-unused", "2-bf16-join", "3 defaults-bf16-weight")
@pytest.mark.parametrize("scenario", ["unused", "weight", "join"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("stage", ["1", "2", "3 defaults"])
def test_a_step_that_the_device_skips(pools: Pools, stage: str, precision: str, scenario: str) -> None:
    """The rank that lacks a gradient launches what the others launch, and the numbers are those of a skip that the
    host decides."""
    kwargs = {"config": setting(stage, precision), "scenario": scenario}
    ranks = pools(2).run(f"{CASES}:overflow", {**kwargs, "on_device": True})
    by_host = pools(2).run(f"{CASES}:overflow", {**kwargs, "on_device": False})
    assert_in_step(ranks, scenario)
    assert ranks[0]["counters"]["skipped_steps"] == (1 if scenario == "join" else 2)
    for result, reference in zip(ranks, by_host, strict=True):
        assert_same_bits(result["parameters"], reference["parameters"], "skipped on the device and by the host")
        assert result["counters"] == reference["counters"]


@pytest.mark.fast("0-1-messages")
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared-memory", "messages"])
@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_gradients_may_come_in_another_order_on_each_rank(
    pools: Pools, stage: str, accumulation: int, shared_memory: bool
) -> None:
    """The order of launches becomes that of rank 0, and the numbers are those of reductions after backward."""
    kwargs = {"shared_memory": shared_memory}
    wanted = setting(stage, "bf16", accumulation)
    ranks = pools(3).run(f"{CASES}:in_any_order", {**kwargs, "config": wanted})
    assert_in_step(ranks, "any order")
    keys = [call[3] for call in ranks[0]["launched"] if call[2] == "gradients"]
    last, window = keys[-6:], keys[:-6]
    assert sorted(last) != last and set(last) == set(window)
    wanted["zero_optimization"]["overlap_comm"] = False
    after = pools(3).run(f"{CASES}:in_any_order", {**kwargs, "config": wanted})
    assert_same_bits(ranks[0]["parameters"], after[0]["parameters"], "during and after backward")


@pytest.mark.fast("False-1", "True-3 defaults")
@pytest.mark.parametrize("stage", ["1", "3 defaults"])
@pytest.mark.parametrize("on_device", [True, False])
def test_an_error_about_a_step_comes_in_the_same_place(pools: Pools, stage: str, on_device: bool) -> None:
    """Also where one rank has read the outcome before the others."""
    limited = setting(stage, "bf16", max_consecutive_skipped_steps=3)
    ranks = pools(3).run(f"{CASES}:asked_by_one_rank", {"config": limited, "on_device": on_device})
    assert_in_step(ranks, "asked")
    for result in ranks:
        assert result["steps"] == (3 if on_device else 2)
        assert "max_consecutive_skipped_steps is 3" in result["error"]


@pytest.mark.parametrize("stage", ["0", "2", "3 defaults"])
def test_a_window_is_dropped_by_ranks_that_have_no_gradient(pools: Pools, stage: str) -> None:
    scenarios = ["weight"] if stage.startswith("3") else ["weight", "nothing", "failure"]
    arguments = {"config": setting(stage, "fp32", 2), "scenarios": scenarios}
    ranks = pools(2).run(f"{CASES}:dropped_windows", arguments)
    assert_in_step(ranks, stage)
    assert_same_bits(ranks[0]["parameters"], ranks[0]["wanted"], "windows that were dropped")


@pytest.mark.fast("True-False", "False-False")
@pytest.mark.parametrize("module_only", [False, True])
@pytest.mark.parametrize("on_device", [True, False])
def test_a_rollback_ends_the_errors_of_the_steps_before(
    pools: Pools, tmp_path: Path, on_device: bool, module_only: bool
) -> None:
    arguments = {"on_device": on_device, "directory": str(tmp_path), "module_only": module_only}
    for errors in pools(2).run(f"{CASES}:rolled_back", {"config": setting("2", "bf16"), **arguments}):
        assert errors[0] == errors[1] == errors[3] == ""
        assert ("update of step 2 made weights" in errors[2]) or on_device


FAST = [("1", "bf16", True), ("2", "fp16", True), ("3 defaults", "fp32", True), ("3 tight", "bf16", True)]


def _random_programs(pools: Pools, stage: str, precision: str, on_device: bool, seeds: list[int], world: int) -> None:
    for accumulation in (1, 2):
        kwargs = {
            "config": setting(stage, precision, accumulation, max_consecutive_skipped_steps=0),
            "seeds": seeds,
            "length": 8,
            "on_device": on_device,
        }
        ranks = pools(world).run(f"{CASES}:random_programs", kwargs)
        for number, seed in enumerate(seeds):
            assert_in_step([result[number] for result in ranks], f"accumulation {accumulation}, seed {seed}")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision", "on_device"), FAST)
def test_random_programs(pools: Pools, stage: str, precision: str, on_device: bool) -> None:
    _random_programs(pools, stage, precision, on_device, [1, 2, 3], 3)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_many_random_programs(pools: Pools, stage: str, precision: str, on_device: bool, world: int) -> None:
    _random_programs(pools, stage, precision, on_device, list(range(10, 22)), world)
