"""A run whose number of ranks changes, with one global batch for all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

import zerolite
from zerolite.zero import GatheredParameters

BATCH = 24
STEPS, SAVED = 4, 2
ELASTICITY = {"enabled": True, "max_train_batch_size": 25, "micro_batch_sizes": [1, 2, 3], "max_gpus": 6}


class Rows(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Rows that know their number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(BATCH * (STEPS + 1), 5, generator=generator)
        self.y = torch.randn(BATCH * (STEPS + 1), 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.y[index]


def make_engine(stage: int, seed: int, sizes: dict[str, Any] | None = None, **elasticity: Any) -> Any:
    """sizes: instead of the elasticity block."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    config = {
        **({"elasticity": ELASTICITY | elasticity} if sizes is None else sizes),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zerolite.initialize(model, config, training_data=Rows())


def train(engine: Any, batches: Iterator[Any], steps: int) -> list[tuple[list[int], float]]:
    """So many steps. Returns the rows of this rank and the mean loss over them, of each step."""
    result = []
    for _ in range(steps):
        rows: list[int] = []
        losses = []
        for _ in range(engine.gradient_accumulation_steps):
            index, x, y = next(batches)
            loss = torch.nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            rows += index.tolist()
            losses.append(float(loss.detach()))
        result.append((rows, sum(losses) / len(losses)))
    return result


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    with GatheredParameters(engine.module, check=False):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def sizes(engine: Any) -> tuple[int, int, int]:
    return engine.train_batch_size, engine.train_micro_batch_size_per_gpu, engine.gradient_accumulation_steps


def run(directory: str, stage: int, load: bool) -> dict[str, Any]:
    """All steps, saved in between; or those after, by an engine that loads."""
    engine = make_engine(stage, seed=9 if load else 0)
    if load:
        engine.load_checkpoint(directory)
        assert engine.global_steps == SAVED
        steps = train(engine, iter(engine.dataloader), STEPS - SAVED)
    else:
        batches = iter(engine.dataloader)
        steps = train(engine, batches, SAVED)
        engine.save_checkpoint(directory)
        steps += train(engine, batches, STEPS - SAVED)
    return {
        "sizes": sizes(engine),
        "steps": steps,
        "parameters": parameters(engine),
        "lr": engine.optimizer.param_groups[0]["lr"],
    }


def refusal() -> str:
    """Return the message about a number of ranks that does not fit."""
    try:
        make_engine(2, 0, min_gpus=3)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def load_with_smaller_steps(directory: str) -> list[str]:
    """Return the messages of a load whose steps become smaller."""
    engine = make_engine(2, 0, {"train_micro_batch_size_per_gpu": 3})
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zerolite")
    logger.addHandler(handler)
    try:
        engine.load_checkpoint(directory)
    finally:
        logger.removeHandler(handler)
    return said
