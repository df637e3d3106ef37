"""``deepspeed.runtime.zero.partition_parameters``."""

from zerolite.compat.deepspeed.zero import GatheredParameters, Init, ZeroParamStatus, register_external_parameter

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]
