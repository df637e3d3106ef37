"""Parts of models that need little memory for long sequences: losses and MLPs over tiles of tokens."""

from zerolite.nn.deferred_logits import DeferredLogits
from zerolite.nn.tiled_loss import tiled_cross_entropy

__all__ = ["DeferredLogits", "tiled_cross_entropy"]
