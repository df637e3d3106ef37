"""Engines without an optimizer: reference, reward and teacher models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import PARTITIONED, SGD
from tests.toolkit.configs import config as make_config
from tests.toolkit.pool import Pools
from tests.toolkit.training import make_engine
from zerolite.config import ConfigError
from zerolite.planning import plan
from zerolite.utils.memory_tags import GRADIENTS, MASTERS, STATES

TRAINS = (
    "backward",
    "step",
    "update",
    "publish",
    "reduce_gradients",
    "clip_gradients",
    "train_batch",
    "full_optimizer_state_dict",
)


def settings(stage: int, precision: str = "fp32", **zero: Any) -> dict[str, Any]:
    made = make_config(stage, precision, zero={**(PARTITIONED["moving"] if stage == 3 else {}), **zero})
    del made["optimizer"]
    return made


def evaluate(stage: int, precision: str) -> dict[str, Any]:
    """Logits beside those of the plain model, what rests, and what is refused."""
    engine = make_engine(settings(stage, precision))
    plain = models.build(models.OddModel)
    if precision != "fp32":
        plain.to(torch.bfloat16 if precision == "bf16" else torch.float16)
    same, plans = [], []
    if engine.coordinator is not None:
        engine.module.up.register_forward_hook(lambda *_: plans.append(engine.coordinator.schedule.plan_progress[0]))
    for step in range(6):
        tokens, _ = models.token_batch(step, 0, dist.get_rank())
        with torch.no_grad():
            same.append(torch.equal(engine(tokens), plain(tokens).float()))
    report = engine.memory_report()
    refused = {}
    for name in TRAINS:
        try:
            getattr(engine, name)(*([torch.ones((), requires_grad=True)] if name in ("backward",) else []))
        except RuntimeError as error:
            refused[name] = str(error)
    engine.zero_grad()
    return {
        "same": all(same),
        "followed": plans in ([], [0, 1, 1, 1, 1, 1]),
        "kept": {item: report.items[item] for item in (MASTERS, STATES, GRADIENTS)},
        "bytes": report.model_states,
        "optimizer": engine.optimizer,
        "lr": engine.get_lr(),
        "refused": refused,
    }


def unfreeze(stage: int) -> str:
    """Return the error of a backward after a parameter has been unfrozen."""
    engine = make_engine(settings(stage), "Mlp")
    engine.module.second.bias.requires_grad_(True)
    x, _ = models.float_batch(0, 0, dist.get_rank())
    try:
        engine(x).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def gradient_of_inputs(stage: int, precision: str) -> bool:
    """True if a backward through the model gives its inputs plain PyTorch's gradient, and the weights none."""
    engine = make_engine(settings(stage, precision), "Mlp")
    plain = models.build(models.Mlp).to(engine.compute_dtype or torch.float32).requires_grad_(False)
    ours, theirs = (models.float_batch(0, 0, dist.get_rank())[0].requires_grad_() for _ in range(2))
    engine(ours).square().sum().backward()
    plain(theirs.to(engine.compute_dtype or torch.float32)).float().square().sum().backward()
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    return torch.equal(ours.grad, theirs.grad)


def weights_in_files(directory: str, stage: int) -> dict[str, bool]:
    """Return whether weights survive every way of saving and loading: from a training run into an engine without an
    optimizer, and from one such engine into another."""
    path = Path(directory)
    trained = make_engine(make_config(stage, optimizer=SGD))
    loss = models.token_loss(trained, models.token_batch(0, 0, dist.get_rank()))
    trained.backward(loss)
    trained.step()
    trained.save_checkpoint(path, tag="trained")
    wanted = trained.full_state_dict()
    del trained, loss
    engine = make_engine(settings(stage))

    def right() -> bool:
        state = engine.full_state_dict()
        return state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)

    found = {"differs": not right()}
    engine.load_checkpoint(path, tag="trained")
    found["from training"] = right()
    engine.save_checkpoint(path, tag="weights")
    engine.save_16bit_model(path / "exported")
    found["exported"] = (path / "exported" / "model.safetensors").exists()
    del engine
    engine = make_engine(settings(stage))
    engine.load_checkpoint(path, tag="weights")
    found["from weights"] = right()
    del engine
    engine = make_engine(settings(stage))
    engine.load_full_state_dict(wanted)
    found["from memory"] = right()
    return found


def in_parts(keys: dict[str, Any], stage: int) -> tuple[float, float]:
    """The loss of a batch, of a model that ``keys`` spread over the ranks, and plain PyTorch's."""
    batch = [models.float_batch(micro, 0, 0) for micro in range(2)]
    plain = models.build(_Layers)
    with torch.no_grad():
        expected = sum(nn.functional.mse_loss(plain(x), y) for x, y in batch) / 2
    more = {**settings(stage), "gradient_accumulation_steps": 2, **keys}
    engine = zerolite.initialize(models.build(_Layers), more, loss_fn=nn.functional.mse_loss)
    return float(engine.eval_batch(iter(batch))), float(expected)


class _Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


# -------------------------------------------------------------------- the tests


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
    for rank in pools(world).run(evaluate, {"stage": stage, "precision": precision}):
        assert rank["same"] and rank["followed"]
        assert not any(rank["kept"].values()), rank["kept"]
        if stage < 3 or world == 1:
            assert rank["bytes"] == numel * size
        else:  # parts are padded to 16 elements
            assert rank["bytes"] <= (numel / world + 16 * 12) * size
        assert rank["optimizer"] is None and rank["lr"] == []
        assert rank["refused"].keys() == set(TRAINS)
        for name, sentence in rank["refused"].items():
            assert f"engine.{name}" in sentence and '"optimizer"' in sentence


@STAGES_AND_WORLDS
def test_a_backward_reaches_the_inputs(pools: Pools, stage: int, world: int) -> None:
    for precision in ("fp32", "bf16"):
        assert all(pools(world).run(gradient_of_inputs, {"stage": stage, "precision": precision}))


@pytest.mark.parametrize("stage", [0, 3])
def test_an_unfrozen_weight_is_named(pools: Pools, stage: int) -> None:
    for sentence in pools(2).run(unfreeze, {"stage": stage}):
        assert "'second.bias'" in sentence and '"optimizer"' in sentence


@pytest.mark.fast("0-1")
@STAGES_AND_WORLDS
def test_weights_are_saved_and_loaded(pools: Pools, tmp_path: Path, stage: int, world: int) -> None:
    for found in pools(world).run(weights_in_files, {"directory": str(tmp_path), "stage": stage}):
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
        zerolite.initialize(models.Mlp(), {**settings(0), **more}, **arguments)


@pytest.mark.parametrize(
    ("keys", "stage"),
    [
        pytest.param({"pipeline": {"stages": 2, "split": ["2"]}}, 1, marks=pytest.mark.slow),
        ({"tensor_parallel": {"size": 2, "plan": {"0": "column", "2": "row"}}}, 3),
    ],
    ids=["pipeline", "tensor_parallel"],
)
def test_a_model_in_parts_is_evaluated(pools: Pools, keys: dict[str, Any], stage: int) -> None:
    for found, expected in pools(2).run(in_parts, {"keys": keys, "stage": stage}):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_plan_of_it(stage: int) -> None:
    config = {**settings(stage, "bf16"), "zero_optimization": {"stage": stage}}
    made = plan(models.Chain, config, 8, batch=lambda: torch.zeros(2, 384))
    numel = 12 * 384 * 384
    assert (made.parameters, made.trained_parameters) == (numel, 0)
    assert sum(made.states.values()) == 2 * numel // (8 if stage == 3 else 1)
    assert made.flops == 2 * 2 * numel
