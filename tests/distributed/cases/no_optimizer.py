"""Engines without an optimizer: what they compute, keep, save and refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerolite
from tests import models
from tests.distributed.cases.training import make_engine
from tests.distributed.configs import PARTITIONED, SGD
from tests.distributed.configs import config as make_config
from zerolite.utils.memory_items import GRADIENTS, MASTERS, STATES

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
