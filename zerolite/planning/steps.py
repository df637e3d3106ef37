"""One step of training, as a plan runs it and as a measurement of a real run does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zerolite.runtime.engine import Engine

FORWARD, BACKWARD, STEP = "forward", "backward", "step"

Batch = Callable[[], Any]
"""Makes one micro-batch: a tuple of the model's arguments, a dict by name, or the one argument."""

Loss = Callable[[Any], torch.Tensor]
"""A scalar of the model's output."""

Phase = Callable[[str], contextlib.AbstractContextManager[None]]
"""Around one phase of a micro-batch, by name."""


def _unseen(phase: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def train_one_step(engine: Engine, batch: Batch, loss: Loss | None = None, phase: Phase = _unseen) -> None:
    """A whole window of micro-batches, each made anew, and its update. Called on all ranks."""
    for _ in range(engine.config.gradient_accumulation_steps or 1):
        with phase(FORWARD):
            value = (loss or loss_of)(_forward(engine, batch()))
        with phase(BACKWARD):
            engine.backward(value)
        del value
        with phase(STEP):
            engine.step()


def _forward(engine: Engine, batch: Any) -> Any:
    if isinstance(batch, dict):
        return engine(**batch)
    return engine(*(batch if isinstance(batch, tuple) else (batch,)))


def loss_of(output: Any) -> torch.Tensor:
    """The output itself if it is one number, its ``loss`` (an attribute, or a key) if it has one, the mean of its first
    floating tensor otherwise."""
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            return tensor if tensor.numel() == 1 else tensor.float().mean()
    what = f"a tensor of {output.dtype}" if isinstance(output, torch.Tensor) else type(output).__name__
    raise ValueError(f"expected a loss or a floating tensor from the model, got {what}; give a loss function")
