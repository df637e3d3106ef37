"""``deepspeed.utils.nvtx``."""

from zerolite.compat.deepspeed.utils import instrument_w_nvtx

__all__ = ["instrument_w_nvtx"]
