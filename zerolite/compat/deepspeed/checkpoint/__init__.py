"""``deepspeed.checkpoint``."""

from zerolite.compat.deepspeed.checkpoint import utils

__all__ = ["utils"]
