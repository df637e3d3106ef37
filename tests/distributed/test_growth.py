"""Parameters that are trained from some step on: unfrozen midway, or added in a param group.

They are compared with plain PyTorch in test_drop_in.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, Optimizer, at
from tests.toolkit.faults import Warnings
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import backward, raised, run_steps, snapshot

STEPS = 7
UNFREEZES, FREEZES, UNFREEZES_AGAIN = 2, 4, 5  # steps


def settings(stage: str, optimizer: Optimizer, precision: str = "fp32") -> dict[str, Any]:
    """``2 waits``: gathers end with the step."""
    zero = {"overlap_comm": False} if stage == "2 waits" else {}
    return at(stage, precision, optimizer=optimizer, zero=zero) | {"train_micro_batch_size_per_gpu": 4}


def change(model: models.Frozen, step: int, optimizer: Any, how: str) -> None:
    """Make the user's change before ``step``."""
    if step == UNFREEZES - 1:
        with torch.no_grad():
            for parameter in model.sleepers():
                parameter.mul_(0.75)
    if step == UNFREEZES:
        for parameter in model.sleepers():
            parameter.requires_grad_(True)
        if how == "group":
            optimizer.add_param_group({"params": model.sleepers(), "lr": 3e-3})
    if step in (FREEZES, UNFREEZES_AGAIN):
        model.last.bias.requires_grad_(step == UNFREEZES_AGAIN)


def train(config: dict[str, Any], how: str, steps: int) -> dict[str, Any]:
    """how: "config" (unfrozen parameters join the only group) or "group" (they are added)."""
    engine = zerolite.initialize(models.build(models.Frozen), config)
    losses = []
    for step in range(steps):
        change(engine.module, step, engine.optimizer, how)
        for micro in range(engine.gradient_accumulation_steps):
            losses.append(backward(engine, step, micro))
            engine.step()
    return {"losses": losses, "parameters": snapshot(engine)}


@pytest.mark.fast("2-group-fp32")
@pytest.mark.parametrize(("how", "precision"), [("group", "fp32"), ("config", "bf16")])
@on_ranks(2, 3)
def test_stages_give_the_same_bits(how: str, precision: str) -> None:
    found = {
        stage: train(settings(stage, ADAMW, precision), how, STEPS)
        for stage in ("0", "1", "2", "2 waits", "3", "3 tight", "3 defaults")
    }
    for stage, result in found.items():
        assert_same_bits(found["0"]["parameters"], result["parameters"], f"stages 0 and {stage}")
        assert result["losses"] == found["0"]["losses"]


@pytest.mark.parametrize("stage", ["0", "3 defaults"])
@on_ranks(2)
def test_what_cannot_be_is_said(stage: str) -> None:
    model = models.build(models.Frozen)
    groups = [{"params": [model.second.weight]}, {"params": [model.last.weight], "lr": 0.2}]
    engine = zerolite.initialize(model, settings(stage, ("SGD", {"lr": 0.1})), model_parameters=groups)
    for parameter, words in (
        (nn.Parameter(torch.zeros(2)), "no parameter of the engine's module"),
        (model.last.weight, "'last.weight', which is trained already"),
    ):
        said = raised(lambda p=parameter: engine.optimizer.add_param_group({"params": [p]}))
        assert words in said


@pytest.mark.slow
@on_ranks(2)
def test_a_checkpoint_with_states_of_what_is_frozen_here(tmp_path: Path) -> None:
    """They are left, and rank 0 says so; those of a parameter that is unfrozen before it is loaded are taken."""
    engine = zerolite.initialize(models.build(models.Frozen), settings("2", ADAMW))
    engine.module.scale.requires_grad_(True)
    run_steps(engine, 2)
    engine.save_checkpoint(tmp_path)
    for frozen in (True, False):
        engine = zerolite.initialize(models.build(models.Frozen), settings("2", ADAMW))
        engine.module.scale.requires_grad_(not frozen)
        with Warnings() as warnings:
            engine.load_checkpoint(tmp_path)
        told = [text for text in warnings.messages if "optimizer states" in text]
        assert len(told) == (frozen and engine.rank == 0)
        assert all("1 parameters are frozen here" in text and "(scale)" in text for text in told)
        if not frozen:
            assert zerolite.get_full_optimizer_state(engine.module.scale, "step") == 2
