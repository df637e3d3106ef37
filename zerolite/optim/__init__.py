"""Optimizers and learning rate schedules by name, and the choice of update kernels."""
