"""``deepspeed.checkpoint.utils``: copies of tensors for files."""

from __future__ import annotations

from typing import Any

import torch

from zerolite.utils.nested import map_tensors


def clone_tensors_for_torch_save(item: object, device: torch.device | str = "cpu") -> Any:
    """Return ``item`` with contiguous copies of its tensors on ``device``, so that files have only their elements."""
    return map_tensors(lambda tensor: tensor.detach().to(device, copy=True).contiguous(), item)
