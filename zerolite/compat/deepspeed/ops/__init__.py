"""``deepspeed.ops``: optimizers, updated by zerolite's kernels."""

from zerolite.compat.deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]

__compatible_ops__: dict[str, bool] = {}  # DeepSpeed's compiled operators; none is needed
