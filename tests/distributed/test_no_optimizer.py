"""Engines without an optimizer: reference, reward and teacher models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same
from tests.toolkit.configs import at, config
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine, raises, run_steps
from zerolite.config import ConfigError
from zerolite.utils.memory_tags import GRADIENTS, MASTERS, STATES

TRAINS = "step reduce_gradients clip_gradients train_batch".split()


def settings(stage: int, precision: str = "fp32") -> dict[str, Any]:
    made = at(stage, precision)
    del made["optimizer"]
    return made


@pytest.mark.fast("0-fp32-1", "2-bf16-2", "3-bf16-3")
@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp16")])
def test_a_model_is_evaluated_and_nothing_else_is_kept(stage: int, precision: str) -> None:
    engine, plain = make_engine(settings(stage, precision)), models.build(models.OddModel)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    plain.to(dtype)
    plans = []
    if stage == 3:
        engine.module.up.register_forward_hook(lambda *_: plans.append(engine._parts.coordinator.schedule.following))
    for step in range(6):
        tokens, _ = models.token_batch(step, 0, dist.get_rank())
        with torch.no_grad():
            assert torch.equal(engine(tokens), plain(tokens).float()), step
    assert plans in ([], [False, True, True, True, True, True])
    report = engine.memory_report()
    assert not any(report.items[item] for item in (MASTERS, STATES, GRADIENTS))
    numel, world = sum(p.numel() for p in plain.parameters()), dist.get_world_size()
    if stage < 3 or world == 1:
        assert report.model_states == numel * dtype.itemsize
    else:  # parts are padded to 16 elements
        assert report.model_states <= (numel / world + 16 * 12) * dtype.itemsize
    assert engine.optimizer is None and engine.get_lr() == []
    with raises(RuntimeError, "engine.backward", '"optimizer"'):
        engine.backward(torch.ones((), requires_grad=True))
    for name in TRAINS:
        with raises(RuntimeError, f"engine.{name}", '"optimizer"'):
            getattr(engine, name)()
    engine.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_reaches_the_inputs(stage: int) -> None:
    """Inputs get plain PyTorch's gradient, and the weights none. A weight that is unfrozen is named."""
    for dtype, precision in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        engine = make_engine(settings(stage, precision), "Mlp")
        plain = models.build(models.Mlp).to(dtype).requires_grad_(False)
        ours, theirs = (models.float_batch(0, 0, dist.get_rank())[0].requires_grad_() for _ in range(2))
        engine(ours).square().sum().backward()
        plain(theirs.to(dtype)).float().square().sum().backward()
        assert all(parameter.grad is None for parameter in engine.module.parameters())
        assert torch.equal(ours.grad, theirs.grad)
    engine.module.second.bias.requires_grad_(True)
    with raises(RuntimeError, "'second.bias'", '"optimizer"'):
        engine(ours).sum().backward()
    engine.module.second.bias.requires_grad_(False)
    engine.module.second = nn.Sequential(engine.module.second, nn.Linear(3, 3))
    with raises(RuntimeError, "'second.1.weight'", '"optimizer"'):  # past the engine
        engine.module(ours.detach().to(torch.bfloat16)).sum().backward()
    engine.module.second[1].requires_grad_(False).to(torch.bfloat16)
    engine.module(ours.detach().to(torch.bfloat16))
    copied = copy.deepcopy(engine.module).requires_grad_(True)  # an ordinary model, trained apart
    copied(ours.detach().to(torch.bfloat16)).sum().backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())


@pytest.mark.fast("0-2")
@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_weights_are_saved_and_loaded(tmp_path: Path, stage: int) -> None:
    """From a training run into an engine without an optimizer, and from one such engine into another."""
    trained = make_engine(config(stage))
    run_steps(trained, model="OddModel")
    trained.save_checkpoint(tmp_path, tag="trained")
    wanted = trained.full_state_dict()
    first, second, third = (make_engine(settings(stage)) for _ in range(3))
    assert not torch.equal(first.full_state_dict()["up.weight"], wanted["up.weight"])
    first.load_checkpoint(tmp_path, tag="trained")
    first.save_checkpoint(tmp_path, tag="weights")
    first.save_16bit_model(tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").exists()
    second.load_checkpoint(tmp_path, tag="weights")
    third.load_full_state_dict(wanted)
    for engine in (first, second, third):
        assert_same(engine.full_state_dict(), wanted)


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
        zerolite.initialize(models.Mlp(), {**settings(0), **more}, **arguments)
