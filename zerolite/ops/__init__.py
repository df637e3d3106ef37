"""Kernels, the torch operators that run them, and an optimizer that torch does not have."""

from zerolite.ops import operators
from zerolite.ops.lion import Lion

__all__ = ["Lion", "operators"]
