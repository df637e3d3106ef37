"""The plan: memory and traffic of a job, found by running the engine on tensors without memory.

    plan = zerolite.plan(build_model, "zero3.json", world_size=64)
    print(plan.peak.bytes, plan.states)

Names are loaded on first use, so that the command answers mistakes without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerolite.planning.errors import PlanError
    from zerolite.planning.make import compare, plan
    from zerolite.planning.result import Comparison, Moment, Peak, Plan, Traffic
    from zerolite.planning.sources import load_batch, load_model_fn

_LAZY = {
    "PlanError": "errors",
    "compare": "make",
    "plan": "make",
    "Comparison": "result",
    "Moment": "result",
    "Peak": "result",
    "Plan": "result",
    "Traffic": "result",
    "load_batch": "sources",
    "load_model_fn": "sources",
}

__all__ = [
    "Comparison",
    "Moment",
    "Peak",
    "Plan",
    "PlanError",
    "Traffic",
    "compare",
    "load_batch",
    "load_model_fn",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
