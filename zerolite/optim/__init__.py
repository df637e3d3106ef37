"""Optimizers and learning rate schedules by name, and the choice of update kernels."""

from zerolite.optim.lion import Lion

__all__ = ["Lion"]
