"""Tags that say which item of memory (parameters, gradients, ...) a tensor belongs to.

Nothing is recorded unless a tracker listens, so a component may tag its memory wherever it allocates. The exception is
offloaded memory, which nothing else tells apart where the device is the CPU.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

COMPUTE, PERSISTENT, BUFFERS, GRADIENTS, MASTERS, STATES, BUCKETS, GATHERED, STAGING, ACTIVATIONS, OTHER = ITEMS = (
    "compute_parameters",
    "persistent_parameters",
    "buffers",
    "gradients",
    "master_weights",
    "optimizer_states",
    "communication_buckets",
    "gathered_parameters",
    "offload_buffers",
    "activations",
    "other",
)
"""What a rank's memory holds. compute_parameters: what the modules compute with: whole at stages 0 to 2, this rank's
shards at stage 3; frozen ones too. persistent_parameters: whole values of those that stage 3 never releases. buffers:
of the modules. gradients: those that have been reduced, and those that wait for it where they rest whole.
master_weights: where they are not the compute parameters themselves. optimizer_states: moments and the like.
communication_buckets: gradients on their way, and what the communicator needs. gathered_parameters: whole values that
stage 3 releases again. offload_buffers: what is on its way between placements. activations: what the model's forward
and backward allocate, gradients not yet taken among it. other: the rest."""

MODEL_STATES = (COMPUTE, PERSISTENT, GRADIENTS, MASTERS, STATES)
"""What the stages of ZeRO partition (Rajbhandari et al., 2020, section 3)."""


DEVICE, HOST, DISK = PLACES = ("device", "host", "disk")
"""Where memory is: on the device that computes, on the host beside it, or in a file."""


class Listener(Protocol):
    def tag_memory(self, storage: torch.UntypedStorage, item: str, place: str) -> None:
        """``storage`` is memory of ``item`` from now on, and is in ``place``."""
        ...

    def resized(self, storage: torch.UntypedStorage) -> None:
        """``storage`` has another length now."""
        ...


listeners: list[Listener] = []

_elsewhere: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}
"""Where storages are that are not the device's, by ``_cdata``, which is one number for as long as they live."""


def tag_memory(tensor: torch.Tensor, item: str, place: str = DEVICE) -> torch.Tensor:
    """``tensor``, whose memory belongs to ``item``, one of :data:`ITEMS`, from now on, and is in ``place``, one of
    :data:`PLACES`. Tensors on the CPU are the device's where that is what computes."""
    if place != DEVICE or _elsewhere:
        _note(tensor.untyped_storage(), place)
    for listener in listeners:
        listener.tag_memory(tensor.untyped_storage(), item, place)
    return tensor


def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give ``storage`` another length in bytes."""
    storage.resize_(nbytes)
    for listener in listeners:
        listener.resized(storage)


def place_of(tensor: torch.Tensor) -> str:
    """Return the placement of ``tensor`` that :func:`own` was told last; the device if it was told nothing."""
    known = _elsewhere.get(tensor.untyped_storage()._cdata)
    return DEVICE if known is None else known[1]


def _note(storage: torch.UntypedStorage, place: str) -> None:
    key = storage._cdata
    if place == DEVICE:
        _elsewhere.pop(key, None)
    else:
        _elsewhere[key] = (weakref.ref(storage, lambda _: _elsewhere.pop(key, None)), place)
