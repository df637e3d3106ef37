"""ZeRO, stages 0 to 3: layout, gradient reduction, sharded optimizer, the step, and partitioned parameters.

For users: ``Init`` builds a model partitioned, ``GatheredParameters`` makes parameters whole for a while, and
``register_external_parameter`` declares a parameter that a module uses without owning it.

These names are loaded on first use: the layout and the schedules need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerolite.zero.stage3.gathered_parameters import GatheredParameters
    from zerolite.zero.stage3.init_context import Init
    from zerolite.zero.stage3.partition_parameters import (
        register_external_parameter,
        unregister_external_parameter,
    )
    from zerolite.zero.stage3.partitioned_parameter import ZeroParamStatus

_LAZY = {
    "GatheredParameters": "gathered_parameters",
    "Init": "init_context",
    "ZeroParamStatus": "partitioned_parameter",
    "register_external_parameter": "partition_parameters",
    "unregister_external_parameter": "partition_parameters",
}

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'zerolite.zero' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"zerolite.zero.stage3.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
