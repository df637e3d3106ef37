"""Activation checkpointing: placement of saved inputs, and modules that the engine checkpoints by itself."""

from zerolite.activation_checkpointing.checkpoint import Checkpointing
from zerolite.activation_checkpointing.current import configured, current, replace_configured
from zerolite.activation_checkpointing.modules import Attached, attach

__all__ = ["Attached", "Checkpointing", "attach", "configured", "current", "replace_configured"]
