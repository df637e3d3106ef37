"""Kernels, the torch operators that run them, and Lion, an optimizer that torch lacks."""

from zerolite.ops import operators
from zerolite.ops.lion import Lion

__all__ = ["Lion", "operators"]
