"""``deepspeed.compression``: only its helpers for modules by name."""

from zerolite.compat.deepspeed.absent import with_sentences
from zerolite.utils.lazy import lazy_names

__all__ = ["helper"]

__getattr__ = with_sentences(__name__, lazy_names(__name__, dict.fromkeys(__all__, "")))
