"""Relation between 32-bit values and their 16-bit roundings."""

from __future__ import annotations

import torch


def follow_(exact: torch.Tensor, rounded: torch.Tensor) -> None:
    """Write the values of ``rounded``, of 16 bits, into ``exact``, fp32, wherever those are not what it rounds to: the
    user has written them. On the CPU nothing is written if there are none; a device is not waited for."""
    same = exact.to(rounded.dtype).view(torch.int16) == rounded.view(torch.int16)
    if same.is_cuda or not bool(same.all()):
        torch.where(same, exact, rounded.float(), out=exact)
