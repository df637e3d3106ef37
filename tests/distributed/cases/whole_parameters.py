"""Optimizers that need whole parameters, at the stages that spread their states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerolite
from tests import models
from tests.distributed.cases.training import BATCHES, LOSSES, make_engine, snapshot, train_engine

STEPS = 3


class TrustRatio(torch.optim.Optimizer):
    """Momentum scaled by norms of the whole parameter, as in LAMB."""

    zerolite_elementwise = False

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                assert p.grad.shape == momentum.shape == p.shape
                momentum.mul_(0.9).add_(p.grad)
                state["ratio"] = p.norm() / momentum.norm().clamp(min=1e-3)
                p.add_(momentum, alpha=-group["lr"] * float(state["ratio"].clamp(0.1, 10)))


def make(config: dict[str, Any], model: str) -> Any:
    """An engine with the config's optimizer, or with TrustRatio where it names none."""
    if "optimizer" in config:
        return make_engine(config, model)
    return make_engine(config, model, optimizer=TrustRatio)


def train(config: dict[str, Any], model: str) -> dict[str, Any]:
    """Train as training.train does; return the whole states, too, and how much of them this rank holds."""
    engine = make(config, model)
    result = train_engine(engine, model, STEPS)
    result["states"] = engine.full_optimizer_state_dict()["state"]
    shapes = {tuple(v.shape) for s in engine.optimizer.state.values() for v in s.values() if torch.is_tensor(v)}
    result["flat"] = bool(config["zero_optimization"]["stage"]) and max(map(len, shapes), default=2) < 2
    report = engine.memory_report()
    result["state bytes"] = report.items["optimizer_states"]
    return result


def overflow(config: dict[str, Any]) -> dict[str, Any]:
    """A run in which one rank's gradient of the second step is not finite."""
    engine = make(config, "Mlp")
    for step in range(STEPS):
        x, y = models.float_batch(step, 0, dist.get_rank())
        if step == 1 and dist.get_rank() == 0:
            x = x * float("inf")
        engine.backward(LOSSES["Mlp"](engine, (x, y)))
        engine.step()
    return {"parameters": snapshot(engine), "skipped": engine.skipped_steps}


def grow(config: dict[str, Any]) -> dict[str, Any]:
    """A run that unfreezes a layer, and goes back to this rank's state dict of the optimizer once."""
    model = models.build(models.Mlp)
    model.first.requires_grad_(False)
    engine = zerolite.initialize(model, config, optimizer=TrustRatio)
    train_engine(engine, "Mlp", 1)
    engine.module.first.requires_grad_(True)
    train_engine(engine, "Mlp", 2)
    saved = copy.deepcopy(engine.optimizer.state_dict())
    weights = engine.full_state_dict()
    train_engine(engine, "Mlp", 1)
    engine.load_full_state_dict(weights)
    engine.optimizer.load_state_dict(saved)
    train_engine(engine, "Mlp", 1)
    return held(engine)


def save(config: dict[str, Any], model: str, directory: str) -> dict[str, Any]:
    """Two steps, a checkpoint, and what the engine holds."""
    engine = make(config, model)
    train_engine(engine, model, 2)
    engine.save_checkpoint(Path(directory), tag="two")
    return held(engine)


def load(config: dict[str, Any], model: str, directory: str) -> dict[str, Any]:
    """Load the checkpoint: return the engine's values, and their values after one step."""
    engine = make(config, model)
    engine.load_checkpoint(Path(directory), tag="two")
    found = held(engine)
    engine.backward(LOSSES[model](engine, BATCHES[model](2, 0, 0)))
    engine.step()
    return {"held": found, "after": held(engine)}


def held(engine: Any) -> dict[str, Any]:
    return {
        "weights": engine.full_state_dict(dtype=torch.float32),
        "states": engine.full_optimizer_state_dict()["state"],
    }


def refusal(config: dict[str, Any]) -> str:
    try:
        zerolite.initialize(models.Mlp(), config)
    except ValueError as error:
        return str(error)
    return "no error"


def look_at_gradients(config: dict[str, Any]) -> dict[str, Any]:
    """A loop that clips, scales and reads ``p.grad``."""
    engine = make(config, "ConvNet")
    seen = []
    for step in range(STEPS):
        engine.backward(LOSSES["ConvNet"](engine, BATCHES["ConvNet"](step, 0, dist.get_rank())))
        parameters = list(engine.module.parameters())
        seen.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.5)))
        for parameter in parameters:
            parameter.grad.mul_(0.5).clamp_(-0.01, 0.01)
        seen.append([torch.tensor(parameter.grad.tolist()) for parameter in parameters])
        parameters[0].grad = seen[-1][0] * 2
        engine.step()
    return {"seen": seen, **held(engine)}


def interrupted(before: dict[str, Any], after: dict[str, Any], directory: str) -> dict[str, Any]:
    """A run that is saved after a step of two micro-batches and goes on in another engine, and one that is not
    interrupted."""
    results = {}
    for name in ("whole", "interrupted"):
        engine = make(before, "OddModel")
        for micro in range(4):
            engine.backward(LOSSES["OddModel"](engine, BATCHES["OddModel"](micro // 2, micro % 2, dist.get_rank())))
            engine.step()
            if micro == 1 and name == "interrupted":
                engine.save_checkpoint(Path(directory), tag="first")
                del engine
                engine = make(after, "OddModel")
                engine.load_checkpoint(Path(directory), tag="first")
        results[name] = held(engine)
        del engine
    return results


def grow_by_group(config: dict[str, Any]) -> dict[str, Any]:
    """A run of Muon by name that trains another layer from some step on, its matrix with Muon."""
    model = models.build(models.Mlp)
    model.first.requires_grad_(False)
    engine = zerolite.initialize(model, config)
    train_engine(engine, "Mlp", 1)
    model.first.weight.requires_grad_(True)
    engine.optimizer.add_param_group({"params": [model.first.weight], "lr": 0.03, "use_muon": True})
    model.first.bias.requires_grad_(True)
    engine.optimizer.add_param_group({"params": [model.first.bias]})
    train_engine(engine, "Mlp", 2)
    return {"lr": engine.get_lr(), **held(engine)}
