"""``deepspeed.checkpoint.utils``: tensors as they are written into files."""

from __future__ import annotations

from typing import Any

import torch

from zerolite.utils.nested import map_tensors


def clone_tensors_for_torch_save(item: object, device: torch.device | str = "cpu") -> Any:
    """Return ``item`` with each tensor copied to ``device``, with no more memory than its elements need."""
    return map_tensors(lambda tensor: tensor.detach().to(device, copy=True).contiguous(), item)
