"""Plan of a job: its memory and traffic, found by running the engine on tensors without memory.

    plan = zerolite.plan(build_model, "zero3.json", world_size=64)
    print(plan.peak.bytes, plan.states)

Names are imported on first use, so that the command reports mistakes without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerolite.utils.lazy import lazy_names

if TYPE_CHECKING:
    from zerolite.planning.length_search import longest
    from zerolite.planning.make import plan
    from zerolite.planning.result import Comparison, Machine, Peak, Plan, PlanError, StepTime, TimePoint, Traffic
    from zerolite.planning.settings import compare
    from zerolite.planning.sources import load_model_fn

__all__ = [
    "Comparison",
    "Machine",
    "Peak",
    "Plan",
    "PlanError",
    "StepTime",
    "TimePoint",
    "Traffic",
    "compare",
    "load_model_fn",
    "longest",
    "plan",
]

_MODULES = dict.fromkeys(
    ("Comparison", "Machine", "Peak", "Plan", "PlanError", "StepTime", "TimePoint", "Traffic"), "result"
)
_MODULES |= {"load_model_fn": "sources", "compare": "settings", "longest": "length_search", "plan": "make"}

__getattr__ = lazy_names(__name__, {name: f"zerolite.planning.{module}" for name, module in _MODULES.items()})
