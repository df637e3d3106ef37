"""``deepspeed.utils.init_on_device``."""

from zerolite.compat.deepspeed.zero import OnDevice

__all__ = ["OnDevice"]
