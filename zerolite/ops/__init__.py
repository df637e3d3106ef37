"""Kernels, the operators of torch that they are, and optimizers that torch does not have."""

from zerolite.ops import operators
from zerolite.ops.lion import Lion

__all__ = ["Lion", "operators"]
