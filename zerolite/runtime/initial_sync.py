"""Rank 0's values are everyone's values: checked by hashes, copied only where they differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerolite.accelerator import HostRead, is_fake
from zerolite.comm import Communicator

_PARTS = {"cpu": 1 << 18}  # elements hashed at once: what caches hold, or what keeps a device busy
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def content_hash(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A 64-bit hash of the bytes of ``tensor`` in logical order, 0-dim int64 on ``device`` (default: the tensor's),
    where it is computed, part by part. Equal tensors have equal hashes, and so have tensors without memory."""
    device = device or tensor.device
    if tensor.numel() == 0 or is_fake(tensor):
        return torch.zeros((), dtype=torch.int64, device=device)
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words = flat.view(_WIDTHS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=device)
    start = 0
    for part in words.split(_PARTS.get(device.type, 1 << 22)):
        chunk = part.to(device)
        position = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=device)
        # An odd multiplier per position (splitmix64's first constant), so that neither order nor repetition
        # cancels; overflow wraps.
        value = (chunk.to(torch.int64) + position) * (position * 2 + -7046029254386353131)
        total += (value ^ (value >> 29)).sum()
        start += chunk.numel()
    return total


def differing(tensors: Sequence[torch.Tensor], comm: Communicator, device: torch.device) -> list[bool]:
    """For each tensor, whether its bytes differ between ranks: one small all-reduce. Called on all ranks with as
    many tensors."""
    if comm.world_size == 1 or not tensors:
        return [False] * len(tensors)
    hashes = torch.stack([content_hash(tensor, device) for tensor in tensors])
    extremes = torch.cat([hashes, ~hashes])
    comm.all_reduce_max(extremes, tag="initial_sync")
    largest, smallest = extremes[: len(tensors)], ~extremes[len(tensors) :]
    return [bool(value) for value in HostRead(largest != smallest).get().tolist()]


def synchronize_tensors(tensors: Sequence[torch.Tensor], comm: Communicator, device: torch.device, tag: str) -> None:
    """Overwrite with rank 0's values those of ``tensors`` that differ. Called on all ranks with the same shapes."""
    for tensor, different in zip(tensors, differing(tensors, comm, device), strict=True):
        if different:
            broadcast_into(tensor, comm, device, tag)


@torch.no_grad()
def broadcast_into(tensor: torch.Tensor, comm: Communicator, device: torch.device, tag: str, source: int = 0) -> None:
    """Rank ``source``'s values into ``tensor``, whatever its strides, dtype and device."""
    if tensor.numel() == 0:
        return
    sent = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    comm.broadcast(sent.view(torch.uint8) if sent.dim() else sent.reshape(1).view(torch.uint8), tag, source)
    tensor.copy_(sent)
