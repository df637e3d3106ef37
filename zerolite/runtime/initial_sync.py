"""Rank 0's values are everyone's values: checked by hashes, copied only where they differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerolite.accelerator import HostRead, is_fake
from zerolite.comm import Communicator

_ROW = 1 << 14  # words with weights of their own
_ROWS = {"cpu": 4}  # hashed at once: what a core's cache holds; elsewhere what keeps a device busy
_made: dict[torch.device, torch.Tensor] = {}  # those weights
_WORDS = (torch.int32, torch.int16, torch.uint8)  # the widest that a tensor consists of


def content_hash(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A 64-bit hash of the bytes of ``tensor`` in logical order, 0-dim int64 on ``device`` (default: the tensor's),
    where it is computed, part by part. Equal tensors have equal hashes, and so have tensors without memory."""
    device = device or tensor.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    if tensor.numel() == 0 or is_fake(tensor):
        return total
    weights = _weights(device)
    words = _words(tensor.detach().contiguous().reshape(-1))
    whole = words.numel() // _ROW * _ROW
    first = 0
    for part in (*words[:whole].split(_ROW * _ROWS.get(device.type, 64)), words[whole:]):
        rows = part.to(device).view(-1, min(_ROW, max(1, part.numel())))
        # Any change of one word changes a sum, because odd factors can be inverted modulo 2^64 (overflow wraps); those
        # of several words cancel with a probability of 2^-32, because a word has half of the bits.
        sums = (rows * weights[: rows.shape[1]]).sum(1)
        total += (sums * _odd(first, len(sums), device)).sum()
        first += len(sums)
    return total


def combined_hash(hashes: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One hash of several 0-dim int64 ``hashes`` on ``device``, in their order."""
    if not hashes:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (torch.stack(list(hashes)) * _odd(0, len(hashes), device)).sum()


def _words(flat: torch.Tensor) -> torch.Tensor:
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size, offset = flat.element_size(), flat.storage_offset()
    for dtype in _WORDS:
        if flat.numel() * size % dtype.itemsize == 0 and offset * size % dtype.itemsize == 0:
            return flat.view(dtype)
    raise AssertionError("every tensor consists of bytes")


def _odd(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers of 64 bits for the places from ``start`` on (splitmix64's mixing of a counter)."""
    mixed = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return mixed | 1


def _weights(device: torch.device) -> torch.Tensor:
    made = _made.get(device)
    if made is None:
        made = _odd(1 << 40, _ROW, device)
        if not is_fake(made):
            _made[device] = made
    return made


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
