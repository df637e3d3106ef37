"""Kernels, and the operators of torch that they are."""

from zerolite.ops import operators

__all__ = ["operators"]
