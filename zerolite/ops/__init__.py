"""Kernels, the launches that run them, and Lion, an optimizer that torch lacks."""

from zerolite.ops.lion import Lion

__all__ = ["Lion"]
