"""Non-finite gradients, loss scales, and what a step reports of them."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from tests import models
from tests.distributed.cases.training import make_engine, snapshot


class Warnings(logging.Handler):
    """Collects zerolite's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Warnings:
        logging.getLogger("zerolite").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("zerolite").removeHandler(self)


def poison(engine: Any, parameter: str, value: float) -> Any:
    """From now on one element of the parameter's gradient is ``value`` on this rank. Returns the handle of the hook."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[gradient.numel() // 2] = value
        return gradient

    return dict(engine.module.named_parameters())[parameter].register_hook(spoil)


def bad_step(
    config: dict[str, Any], bad_rank: int, parameter: str, value: float, loop: str = "engine"
) -> dict[str, Any]:
    """Six windows; in the fourth (step 3, the last micro-batch) one rank's gradient is not finite."""
    engine = make_engine(config)
    accumulation = config["gradient_accumulation_steps"]
    norms, learning_rates, snapshots = [], [], []
    with Warnings() as warnings:
        for step in range(6):
            for micro in range(accumulation):
                bad = step == 3 and micro == accumulation - 1 and dist.get_rank() == bad_rank
                handle = poison(engine, parameter, value) if bad else None
                loss = models.token_loss(engine, models.token_batch(step, micro, dist.get_rank()))
                if loop == "engine":
                    engine.backward(loss)
                    engine.step()
                else:
                    (loss / accumulation).backward()
                if handle is not None:
                    handle.remove()
            if loop == "plain":
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            norms.append(engine.get_global_grad_norm())
            learning_rates.append(engine.get_lr()[0])
            snapshots.append(snapshot(engine))
        skipped, steps = engine.skipped_steps, engine.global_steps
    return {
        "norms": norms,
        "learning_rates": learning_rates,
        "snapshots": snapshots,
        "skipped_steps": skipped,
        "global_steps": steps,
        "warnings": warnings.messages,
    }


def bad_for_ever(config: dict[str, Any], attempts: int) -> dict[str, Any]:
    """Every gradient of rank 0 is infinite; until the engine raises."""
    engine = make_engine(config)
    before = snapshot(engine)
    if dist.get_rank() == 0:
        poison(engine, "up.weight", float("inf"))
    scales = []
    for attempt in range(attempts):
        scales.append(engine.loss_scale)
        engine.backward(models.token_loss(engine, models.token_batch(attempt, 0, dist.get_rank())))
        try:
            engine.step()
        except Exception as error:
            unchanged = all(torch.equal(before[name], value) for name, value in snapshot(engine).items())
            return {
                "attempt": attempt,
                "error": f"{type(error).__name__}: {error}",
                "scales": scales,
                "unchanged": unchanged,
            }
    return {"attempt": None, "error": "", "scales": scales, "unchanged": True}


def scale_growth(config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train an Mlp; the parameters and the scale after each step."""
    engine = make_engine(config, "Mlp")
    scales, snapshots, norms = [], [], []
    for step in range(steps):
        scales.append(engine.loss_scale)
        engine.backward(models.square_loss(engine, models.float_batch(step, 0, dist.get_rank())))
        engine.step()
        norms.append(engine.get_global_grad_norm())
        snapshots.append(snapshot(engine))
    return {"scales": scales, "snapshots": snapshots, "norms": norms}
