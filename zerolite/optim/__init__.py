"""Optimizers and learning rate schedules by name, and whether our kernels update for them."""

from zerolite.optim.lion import Lion

__all__ = ["Lion"]
