"""``deepspeed.runtime``: engine, optimizer, schedules and config under DeepSpeed's module names."""

from zerolite.utils.lazy import lazy_names

__all__ = ["base_optimizer", "config", "engine", "lr_schedules", "sequence_parallel", "utils", "zero"]

__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, ""))
