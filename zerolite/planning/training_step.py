"""One training step, for dry runs and measurements."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from zerolite.comm import collective
from zerolite.data.micro_batch import LossFunction, MicroBatch
from zerolite.engine.engine import Engine
from zerolite.engine.special_engines import EvaluationEngine
from zerolite.utils.nested import find_tensors

FORWARD, BACKWARD, STEP = "forward", "backward", "step"

MakeBatch = Callable[[], Any]
"""Function that makes one micro-batch: a tuple of the model's arguments, a dict by name, or a single argument."""

Loss = Callable[[Any], torch.Tensor]
"""Function of the model's output that returns a scalar."""

Phase = Callable[[str], contextlib.AbstractContextManager[object]]
"""Function that returns the context for a phase: :data:`FORWARD`, :data:`BACKWARD` or :data:`STEP`."""


def loss_with_targets(loss: Callable[..., torch.Tensor] | None) -> LossFunction | None:
    """Return a plan's ``loss`` if it is a function of outputs and targets, as ``zerolite.initialize`` takes it."""
    return loss if loss is not None and len(required_parameters(loss)) == 2 else None


def required_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of parameters without a default, except *args and **kwargs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [entry.name for entry in parameters if entry.default is entry.empty and entry.kind not in optional]


@collective
def train_one_step(
    engine: Engine, batch: MakeBatch, loss: Loss | None = None, phase: Phase = contextlib.nullcontext
) -> None:
    """Train all micro-batches of one accumulation, each made anew, and update.

    An engine without an optimizer runs a forward only.

    Args:
        engine: the engine.
        batch: makes a micro-batch.
        loss: for an engine without a loss function.
        phase: context of each phase.
    """
    if isinstance(engine, EvaluationEngine):
        with torch.no_grad(), phase(FORWARD):
            _forward(engine, batch())
        return
    for _ in range(engine.config.gradient_accumulation_steps or 1):
        with phase(FORWARD):
            value = _loss(engine, batch(), loss)
        with phase(BACKWARD):
            engine.backward(value)
        del value
        with phase(STEP):
            engine.step()


def _loss(engine: Engine, batch: Any, loss: Loss | None) -> torch.Tensor:
    if engine.loss_fn is not None:
        micro = MicroBatch.of(batch, engine.loss_fn, engine.device)
        return micro.loss(engine(*micro.args, **micro.kwargs), engine.loss_fn)
    return (loss or default_loss)(_forward(engine, batch))


def _forward(engine: Engine, batch: Any) -> Any:
    if isinstance(batch, dict):
        return engine(**batch)
    return engine(*(batch if isinstance(batch, tuple) else (batch,)))


def default_loss(output: Any) -> torch.Tensor:
    """Return the loss of an ``output``: its attribute or key ``loss``, or the mean of its first floating tensor."""
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    for tensor in find_tensors(output):
        if tensor.is_floating_point():
            return tensor if tensor.numel() == 1 else tensor.float().mean()
    what = f"a tensor of {output.dtype}" if isinstance(output, torch.Tensor) else type(output).__name__
    raise ValueError(f"expected a loss or a floating tensor from the model, got {what}; give a loss function")


def walk_through_parameters(model: torch.nn.Module) -> None:
    """Replace the forwards of ``model``'s modules by a walk over all parameters, in the order of registration.

    Each module calls its children, then adds the sum of each of its own parameters to the scalar that it was given. So
    hooks run, parameters are gathered and gradients arrive one by one, as in a real step, but without activations.
    """
    for module in model.modules():
        module.forward = functools.partial(_walk, module)


def _walk(module: torch.nn.Module, value: torch.Tensor) -> torch.Tensor:
    for child in module.children():
        value = child(value)
    for parameter in module.parameters(recurse=False):
        # The product gives the parameter its own gradient tensor. Without it the gradient of a 0-dim parameter would be
        # the scalar that passes through the whole backward. It would stay alive after its bucket has copied it.
        value = value + (1 * parameter.sum()).to(value.dtype)
    return value
