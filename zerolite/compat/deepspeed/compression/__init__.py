"""``deepspeed.compression``: only its helpers for modules by name."""

from zerolite.compat.deepspeed.compression import helper

__all__ = ["helper"]
