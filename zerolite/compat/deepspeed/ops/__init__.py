"""``deepspeed.ops``: optimizers, updated by zerolite's kernels."""

from zerolite.compat.deepspeed.ops import adam, lion

__all__ = ["adam", "lion"]

__compatible_ops__: dict[str, bool] = {}  # DeepSpeed's compiled operators; none is needed
