"""Backends that this build of torch supports."""

from __future__ import annotations

import torch.distributed as dist


def available_backends() -> list[str]:
    """Return the names of the backends that torch was built with, such as ["gloo", "nccl"]; [] without
    torch.distributed."""
    if not dist.is_available():
        return []
    unreal = ("undefined", "fake")  # a placeholder, and a double for tests
    names = [name for name in dist.Backend.backend_list if name not in unreal]
    return [name for name in names if dist.is_backend_available(name)]
