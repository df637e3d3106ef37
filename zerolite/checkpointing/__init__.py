"""Activation checkpointing under DeepSpeed's names: ``zerolite.checkpointing.checkpoint``."""

from zerolite.activation_checkpointing.configure import checkpoint, configure, is_configured, reset

__all__ = ["checkpoint", "configure", "is_configured", "reset"]
