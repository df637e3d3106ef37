"""An engine whose layers are on several ranks: it trains and evaluates whole steps, and refuses the parts of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from zerolite.engine.engine import Engine
from zerolite.engine.evaluation_engine import EvaluationEngine


def refuse(call: str) -> NoReturn:
    """Raise RuntimeError for ``call``, a method that belongs to a user's own training loop."""
    raise RuntimeError(
        f"{call}: a pipeline runs forwards, backwards and updates in an order of its own; use "
        "engine.train_batch(data_iter) and engine.eval_batch(data_iter)"
    )


def _refuses(call: str) -> Callable[..., NoReturn]:
    return lambda self, *args, **kwargs: refuse(call)


class PipelineEngine(Engine):
    """Engine of one pipeline stage. ``train_batch`` and ``eval_batch`` run over all stages. Methods for single
    forwards, backwards and steps raise RuntimeError."""

    __call__ = forward = _refuses("engine(...)")
    backward = _refuses("engine.backward")
    step = _refuses("engine.step")
    no_sync = _refuses("engine.no_sync")
    set_gradient_accumulation_boundary = _refuses("engine.set_gradient_accumulation_boundary")


class PipelineEvaluationEngine(EvaluationEngine, PipelineEngine):
    """A stage of a pipeline without an optimizer."""
