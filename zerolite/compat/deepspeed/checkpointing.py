"""``deepspeed.checkpointing``: activation checkpointing."""

from zerolite.checkpointing import checkpoint, configure, is_configured, reset

__all__ = ["checkpoint", "configure", "is_configured", "reset"]
