"""``deepspeed.checkpoint.utils``: copies of tensors for files."""

from __future__ import annotations

from typing import Any

import torch

from zerolite.checkpoint.partial_state import gather_partial_tensors
from zerolite.comm import collective
from zerolite.utils.nested import map_tensors


@collective
def clone_tensors_for_torch_save(item: object, device: torch.device | str = "cpu") -> Any:
    """Return ``item`` with contiguous copies of its tensors on ``device``, so that files have only their elements.

    Called on all ranks where this rank's model has parts of parameters (spread experts, tensor-parallel layers): they
    are gathered, and every rank gets the full values. accelerate's ``get_state_dict`` does so at stages 0 to 2.
    """
    full = gather_partial_tensors(item)

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in full:
            return full[id(tensor)].to(device)
        return tensor.detach().to(device, copy=True).contiguous()

    return map_tensors(clone, item)
