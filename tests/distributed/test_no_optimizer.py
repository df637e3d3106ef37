"""Engines without an optimizer: reference, reward and teacher models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zerolite
from tests import models
from tests.distributed.cases import no_optimizer
from tests.pool import Pools
from zerolite.config import ConfigError
from zerolite.planning import plan

CASES = "tests.distributed.cases.no_optimizer"
_FAST = {(0, 1), (2, 2), (3, 2), (3, 3)}
STAGES_AND_WORLDS = pytest.mark.parametrize(
    ("stage", "world"),
    [
        pytest.param(stage, world, marks=() if (stage, world) in _FAST else pytest.mark.slow)
        for stage in range(4)
        for world in (1, 2, 3)
    ],
)


@pytest.mark.fast("fp32-0-1", "bf16-2-2", "bf16-3-3")
@STAGES_AND_WORLDS
@pytest.mark.parametrize("precision", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_a_model_is_evaluated_and_nothing_else_is_kept(pools: Pools, stage: int, world: int, precision: str) -> None:
    numel = sum(p.numel() for p in models.build(models.OddModel).parameters())
    size = 4 if precision == "fp32" else 2
    for rank in pools(world).run(f"{CASES}:evaluate", {"stage": stage, "precision": precision}):
        assert rank["same"] and rank["followed"]
        assert not any(rank["kept"].values()), rank["kept"]
        if stage < 3 or world == 1:
            assert rank["bytes"] == numel * size
        else:  # parts are padded to 16 elements
            assert rank["bytes"] <= (numel / world + 16 * 12) * size
        assert rank["optimizer"] is None and rank["lr"] == []
        assert rank["refused"].keys() == set(no_optimizer.TRAINS)
        for name, sentence in rank["refused"].items():
            assert f"engine.{name}" in sentence and '"optimizer"' in sentence


@STAGES_AND_WORLDS
def test_a_backward_reaches_the_inputs(pools: Pools, stage: int, world: int) -> None:
    for precision in ("fp32", "bf16"):
        assert all(pools(world).run(f"{CASES}:gradient_of_inputs", {"stage": stage, "precision": precision}))


@pytest.mark.parametrize("stage", [0, 3])
def test_an_unfrozen_weight_is_named(pools: Pools, stage: int) -> None:
    for sentence in pools(2).run(f"{CASES}:unfreeze", {"stage": stage}):
        assert "'second.bias'" in sentence and '"optimizer"' in sentence


@pytest.mark.fast("0-1")
@STAGES_AND_WORLDS
def test_weights_are_saved_and_loaded(pools: Pools, tmp_path: Path, stage: int, world: int) -> None:
    for found in pools(world).run(f"{CASES}:weights_in_files", {"directory": str(tmp_path), "stage": stage}):
        assert all(found.values()), found


@pytest.mark.parametrize(
    ("more", "arguments", "words"),
    [
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, {}, "scheduler"),
        ({}, {"lr_scheduler": lambda optimizer: None}, "lr_scheduler"),
        ({}, {"model_parameters": []}, "model_parameters"),
    ],
)
def test_what_asks_for_training_is_refused(more: dict[str, Any], arguments: dict[str, Any], words: str) -> None:

    with pytest.raises(ConfigError, match=words):
        zerolite.initialize(models.Mlp(), {**no_optimizer.settings(0), **more}, **arguments)


@pytest.mark.parametrize(
    ("keys", "stage"),
    [
        pytest.param({"pipeline": {"stages": 2, "split": ["2"]}}, 1, marks=pytest.mark.slow),
        ({"tensor_parallel": {"size": 2, "plan": {"0": "column", "2": "row"}}}, 3),
    ],
    ids=["pipeline", "tensor_parallel"],
)
def test_a_model_in_parts_is_evaluated(pools: Pools, keys: dict[str, Any], stage: int) -> None:
    for found, expected in pools(2).run(f"{CASES}:in_parts", {"keys": keys, "stage": stage}):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_plan_of_it(stage: int) -> None:
    config = {**no_optimizer.settings(stage, "bf16"), "zero_optimization": {"stage": stage}}
    made = plan(models.Chain, config, 8, batch=lambda: torch.zeros(2, 384))
    numel = 12 * 384 * 384
    assert (made.parameters, made.trained_parameters) == (numel, 0)
    assert sum(made.states.values()) == 2 * numel // (8 if stage == 3 else 1)
    assert made.flops == 2 * 2 * numel
