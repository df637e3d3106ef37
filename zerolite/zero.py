"""ZeRO stage 3 from the user's side, under DeepSpeed's names.

``Init`` builds a model partitioned; ``GatheredParameters`` makes parameters whole for a while;
``register_external_parameter`` tells of a parameter that a module uses without owning it.
"""

from zerolite.runtime.init_context import Init
from zerolite.runtime.zero.partition_parameters import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from zerolite.runtime.zero.partitioned_parameter import ZeroParamStatus

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
]
