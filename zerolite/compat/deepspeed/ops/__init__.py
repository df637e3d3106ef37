"""``deepspeed.ops``: optimizers, updated by zerolite's kernels."""

from zerolite.compat.deepspeed.absent import with_sentences
from zerolite.utils.lazy import lazy_names

__all__ = ["adagrad", "adam", "lion"]

__compatible_ops__: dict[str, bool] = {}  # DeepSpeed's compiled operators; none is needed

__getattr__ = with_sentences(__name__, lazy_names(__name__, dict.fromkeys(__all__, "")))
