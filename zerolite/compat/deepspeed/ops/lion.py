"""``deepspeed.ops.lion``: zerolite's Lion."""

from zerolite.ops.lion import Lion

FusedLion = DeepSpeedCPULion = Lion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
