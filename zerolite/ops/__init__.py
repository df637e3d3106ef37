"""Kernels, and the torch operators that run them."""

from zerolite.ops import operators

__all__ = ["operators"]
