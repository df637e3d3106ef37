"""Optimizers and operators that torch does not have."""

from zerolite.ops.lion import Lion

__all__ = ["Lion"]
