"""An engine whose layers are on several ranks: it trains and evaluates whole steps, and refuses the parts of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from zerolite.engine.engine import Engine
from zerolite.engine.evaluation_engine import EvaluationEngine


def refuse(call: str) -> NoReturn:
    """Raise RuntimeError for a part of a loop, by its name."""
    raise RuntimeError(
        f"{call}: a pipeline runs forwards, backwards and updates in an order of its own; use "
        "engine.train_batch(data_iter) and engine.eval_batch(data_iter)"
    )


def _refuses(call: str) -> Callable[..., NoReturn]:
    return lambda self, *args, **kwargs: refuse(call)


class PipelineEngine(Engine):
    """See the module; ``train_batch`` and ``eval_batch`` are those of :class:`Engine`, over all stages."""

    __call__ = forward = _refuses("engine(...)")
    backward = _refuses("engine.backward")
    step = _refuses("engine.step")
    join = _refuses("engine.join")
    no_sync = _refuses("engine.no_sync")
    set_gradient_accumulation_boundary = _refuses("engine.set_gradient_accumulation_boundary")


class PipelineEvaluationEngine(EvaluationEngine, PipelineEngine):
    """A stage of a pipeline without an optimizer."""
