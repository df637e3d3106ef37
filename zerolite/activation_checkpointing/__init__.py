"""Activation checkpointing: placement of saved inputs, and modules that the engine checkpoints by itself."""

from zerolite.activation_checkpointing.checkpoint import Checkpointing
from zerolite.activation_checkpointing.configure import current
from zerolite.activation_checkpointing.modules import Attached, attach

__all__ = ["Attached", "Checkpointing", "attach", "current"]
