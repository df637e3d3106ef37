"""``deepspeed.runtime.utils``: helpers that scripts use."""

from __future__ import annotations

from typing import Any

import torch

from zerolite.utils.nested import map_tensors


def move_to_device(item: object, device: torch.device | str) -> Any:
    """Return ``item`` with its tensors on ``device``; lists, tuples and dicts may be nested."""
    return map_tensors(lambda tensor: tensor.to(device), item)
