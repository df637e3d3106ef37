"""Whose memory a tensor is: the parts of the engine say what they allocate, and whoever counts memory listens.

Nothing is recorded unless somebody listens, so a part may name its memory wherever it allocates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

COMPUTE, PERSISTENT, BUFFERS, GRADIENTS, MASTERS, STATES, BUCKETS, GATHERED, ACTIVATIONS, OTHER = ITEMS = (
    "compute_parameters",
    "persistent_parameters",
    "buffers",
    "gradients",
    "master_weights",
    "optimizer_states",
    "communication_buckets",
    "gathered_parameters",
    "activations",
    "other",
)
"""What a rank's memory holds. compute_parameters: what the modules compute with: whole at stages 0 to 2, this
rank's shards at stage 3; frozen ones too. persistent_parameters: whole values of those that stage 3 never releases.
buffers: of the modules. gradients: those that have been reduced, and those that wait for it where they rest whole.
master_weights: where they are not the compute parameters themselves. optimizer_states: moments and the like.
communication_buckets: gradients on their way, and what the communicator needs. gathered_parameters: whole values that
stage 3 releases again. activations: what the model's forward and backward allocate, gradients not yet taken among it.
other: the rest."""

MODEL_STATES = (COMPUTE, PERSISTENT, GRADIENTS, MASTERS, STATES)
"""What the stages of ZeRO partition (Rajbhandari et al., 2020, section 3)."""


class Listener(Protocol):
    def own(self, storage: torch.UntypedStorage, item: str) -> None:
        """``storage`` is memory of ``item`` from now on."""
        ...

    def resized(self, storage: torch.UntypedStorage) -> None:
        """``storage`` has another length now."""
        ...


listeners: list[Listener] = []


def own(tensor: torch.Tensor, item: str) -> torch.Tensor:
    """``tensor``, whose memory belongs to ``item``, one of :data:`ITEMS`, from now on."""
    for listener in listeners:
        listener.own(tensor.untyped_storage(), item)
    return tensor


def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give ``storage`` another length in bytes."""
    storage.resize_(nbytes)
    for listener in listeners:
        listener.resized(storage)
