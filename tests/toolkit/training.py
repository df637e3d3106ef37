"""Training runs on every rank: what the other tests compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

import zerolite
from tests.toolkit import models
from zerolite.zero import GatheredParameters

# By the name of the model in tests.toolkit.models: its loss, and what makes a micro-batch for it.
KINDS: dict[str, tuple[Callable[[Any, Any], Tensor], Callable[..., Any]]] = {
    "OddModel": (models.token_loss, models.token_batch),
    "Mlp": (models.square_loss, models.float_batch),
    "SharedCheckpointed": (models.square_loss, models.float_batch),
    "Buffered": (models.square_loss, models.float_batch),
    "TwoDtypes": (models.square_loss, models.float_batch),
    "example_gpt": (models.token_loss, models.token_batch),
    "PrimeMlp": (models.square_loss, models.float_batch),
    "ConvNet": (models.square_loss, models.image_batch),
    "EncoderDecoder": (models.token_loss, models.pair_batch),
    "MixtureOfExperts": (models.square_loss, models.expert_batch),
    "hugging_face_gpt2": (models.token_loss, models.token_batch),
    "hugging_face_llama": (models.token_loss, models.token_batch),
}
LOSSES = {name: loss for name, (loss, _) in KINDS.items()}
BATCHES = {name: batch for name, (_, batch) in KINDS.items()}


def make_engine(
    config: dict[str, Any], model: str = "OddModel", sizes: dict[str, Any] | None = None, **more: Any
) -> Any:
    """An engine over a fresh model with the weights of seed 7."""
    return zerolite.initialize(models.build(getattr(models, model), **(sizes or {})), config, **more)


def snapshot(engine: Any) -> dict[str, Tensor]:
    """The compute parameters by name, copied, whole, in their own dtype and strides. Called on all ranks."""
    with GatheredParameters(engine.module, check=False):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def counters(engine: Any) -> dict[str, Any]:
    return {
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": engine.micro_steps,
        "loss_scale": engine.loss_scale,
        "lr": engine.get_lr(),
    }


def loss_of(engine: Any, step: int, micro: int = 0, model: str = "Mlp") -> Tensor:
    """The loss of this rank's micro-batch."""
    return LOSSES[model](engine, BATCHES[model](step, micro, dist.get_rank()))


def backward(engine: Any, step: int, micro: int = 0, model: str = "Mlp", **more: Any) -> float:
    """Run a forward and ``engine.backward(loss, **more)``; return the loss."""
    loss = loss_of(engine, step, micro, model)
    engine.backward(loss, **more)
    return loss.item()


def engine_window(engine: Any, model: str, step: int, accumulation: int) -> list[float]:
    """One window in DeepSpeed's loop; returns this rank's losses."""
    losses = []
    for micro in range(accumulation):
        losses.append(backward(engine, step, micro, model))
        engine.step()
    return losses


def run_steps(engine: Any, steps: int = 1, first: int = 0, model: str = "Mlp") -> list[float]:
    """Take steps in DeepSpeed's loop; return this rank's losses."""
    return [
        loss
        for step in range(first, first + steps)
        for loss in engine_window(engine, model, step, engine.gradient_accumulation_steps)
    ]


def plain_window(engine: Any, model: str, step: int, accumulation: int) -> list[float]:
    """One window in the ordinary PyTorch loop."""
    losses = []
    for micro in range(accumulation):
        loss = loss_of(engine, step, micro, model)
        (loss / accumulation).backward()
        losses.append(loss.item())
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return losses


WINDOWS = {"engine": engine_window, "plain": plain_window}


def train(
    config: dict[str, Any],
    model: str = "OddModel",
    sizes: dict[str, Any] | None = None,
    steps: int = 10,
    loop: str = "engine",
) -> dict[str, Any]:
    """Train and tell everything that a comparison may need."""
    return train_engine(make_engine(config, model, sizes), model, steps, loop)


def train_engine(engine: Any, model: str, steps: int, loop: str = "engine") -> dict[str, Any]:
    """Train an engine that exists, as :func:`train` does."""
    losses, norms = [], []
    for step in range(steps):
        losses += WINDOWS[loop](engine, model, step, engine.gradient_accumulation_steps)
        norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms, "parameters": snapshot(engine), **counters(engine)}


def train_many(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several runs of :func:`train` in one call, by name."""
    return {name: train(**run) for name, run in runs.items()}


def raised(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Class and text of the exception that ``call`` raises; empty if it raises none."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def expect_words(text: str, *words: str) -> None:
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"


@contextlib.contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], *texts: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        for text in texts:
            assert text in str(error), f"'{text}' is not in: {error}"
    else:
        raise AssertionError(f"{kind} was not raised")
