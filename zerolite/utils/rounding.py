"""Relation between 32-bit values and their 16-bit roundings."""

from __future__ import annotations

import torch


def sync_master_from_param_(exact: torch.Tensor, rounded: torch.Tensor) -> bool:
    """Copy values that the user has written into 16-bit parameters into their fp32 masters, in place.

    The user has written an element if it differs from the rounded master. On the CPU nothing is written if there are
    none; a device is not waited for, so there everything is written.

    Args:
        exact: fp32 masters.
        rounded: 16-bit parameters.

    Returns:
        True if ``exact`` was written.
    """
    # Compared as integers, so that a NaN is equal to itself and -0 differs from 0.
    same = exact.to(rounded.dtype).view(torch.int16) == rounded.view(torch.int16)
    written = same.is_cuda or not bool(same.all())
    if written:
        torch.where(same, exact, rounded.float(), out=exact)
    return written
