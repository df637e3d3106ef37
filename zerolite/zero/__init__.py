"""ZeRO, stages 0 to 3: layout, gradient reduction, sharded optimizer, the step, and partitioned parameters.

For users: ``Init`` builds a model partitioned, and ``GatheredParameters`` is a context with full parameters.
``register_external_parameter`` declares a parameter that a module uses without owning it.

These names are loaded on first use: the layout and the schedules need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerolite.utils.lazy import lazy_names

if TYPE_CHECKING:
    from zerolite.zero.stage3.gathered_parameters import GatheredParameters
    from zerolite.zero.stage3.group_plan import register_external_parameter, unregister_external_parameter
    from zerolite.zero.stage3.partition_parameters import Init
    from zerolite.zero.stage3.partitioned_parameter import ZeroParamStatus

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
]

_STAGE3 = "zerolite.zero.stage3"

__getattr__ = lazy_names(
    __name__,
    {
        "GatheredParameters": f"{_STAGE3}.gathered_parameters",
        "Init": f"{_STAGE3}.partition_parameters",
        "ZeroParamStatus": f"{_STAGE3}.partitioned_parameter",
        "register_external_parameter": f"{_STAGE3}.group_plan",
        "unregister_external_parameter": f"{_STAGE3}.group_plan",
    },
)
