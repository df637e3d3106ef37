"""Tags that say which item of memory (parameters, gradients, ...) a tensor belongs to.

Nothing is recorded unless a tracker listens, so a component may tag its memory wherever it allocates. The exception is
offloaded memory, which nothing else tells apart where the device is the CPU.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

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
"""Items of a rank's memory.

- compute_parameters: parameters that modules compute with, frozen ones too: full at stages 0 to 2, shards at stage 3.
- persistent_parameters: full values of parameters that stage 3 never releases.
- buffers: buffers of the modules.
- gradients: reduced gradients, and full ones that wait for their reduction at stages 0 and 1.
- master_weights: master weights, unless they are the compute parameters themselves.
- optimizer_states: moments and other states of the optimizer.
- communication_buckets: gradients in flight, and memory of the communicator.
- gathered_parameters: full values that stage 3 releases again.
- offload_buffers: copies in flight between placements.
- activations: everything that the model's forward and backward allocate, including gradients before the hooks run.
- other: the rest.
"""

MODEL_STATES = (COMPUTE, PERSISTENT, GRADIENTS, MASTERS, STATES)
"""Items that the stages of ZeRO partition (Rajbhandari et al., 2020, section 3)."""


DEVICE, HOST, DISK = LOCATIONS = ("device", "host", "disk")
"""Placements of memory: on the device that computes, on the host, or in a file."""


listeners: list[Any] = []
"""Trackers of a dry run or a test: ``tag_memory(storage, item, location)`` and ``resized(storage)`` are called."""

_offloaded: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}
"""Placement of storages that are not on the device, by ``id``. torch keeps one object for a storage as long as its
memory exists."""


def tag_memory(tensor: torch.Tensor, category: str, location: str = DEVICE) -> torch.Tensor:
    """Note that the memory of ``tensor`` belongs to ``category`` (one of :data:`ITEMS`), at ``location`` (one of
    :data:`LOCATIONS`).

    Returns the tensor. If the CPU computes, its tensors are on the device.
    """
    if location != DEVICE or _offloaded:
        _note(tensor.untyped_storage(), location)
    for listener in listeners:
        listener.tag_memory(tensor.untyped_storage(), category, location)
    return tensor


def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Resize ``storage`` to ``nbytes``."""
    storage.resize_(nbytes)
    for listener in listeners:
        listener.resized(storage)


def location_of(tensor: torch.Tensor) -> str:
    """Return the placement of ``tensor`` that :func:`tag_memory` was last given; the device if none was given."""
    known = _offloaded.get(id(tensor.untyped_storage()))
    return DEVICE if known is None else known[1]


def _note(storage: torch.UntypedStorage, location: str) -> None:
    key = id(storage)
    if location == DEVICE:
        _offloaded.pop(key, None)
    else:
        _offloaded[key] = (weakref.ref(storage, lambda _: _offloaded.pop(key, None)), location)
