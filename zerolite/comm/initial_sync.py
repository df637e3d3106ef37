"""Broadcast of rank 0's initial values: compare hashes, and copy only the tensors that differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from zerolite.comm import Communicator
from zerolite.comm.flight_recorder import collective
from zerolite.utils.accelerator import HostRead, is_fake

_ROW = 1 << 14  # words of a row; each has a factor of its own
_OTHER = 0x5851F42D4C957F2C
_ROWS = {"cpu": 4}  # rows hashed at once: on the CPU as many as a core's cache holds
_WORDS = (torch.int32, torch.int16, torch.uint8)  # the widest that divides a tensor is used


def content_hash(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a 64-bit hash of the bytes of ``tensor`` in logical order: int64, 0-dim, on ``device``.

    It is computed on ``device`` (default: the tensor's), part by part. Equal tensors have equal hashes; tensors without
    memory have the hash 0.
    """
    device = device or tensor.device
    if tensor.numel() == 0 or is_fake(tensor):
        return torch.zeros((), dtype=torch.int64, device=device)
    words = _words(tensor.detach().contiguous().reshape(-1))
    count = -(-words.numel() // _ROW)
    factors = _odd(min(_ROW, words.numel()), device)
    step = _ROWS.get(device.type, 128)
    # Any change of one word changes a sum, because odd factors can be inverted modulo 2^64 (overflow wraps). Changes of
    # several words cancel with a probability of 2^-32, because a word has half of the bits.
    sums = torch.empty(count, dtype=torch.int64, device=device)
    for first, part in zip(range(0, count, step), words.split(_ROW * step), strict=True):
        part = part.to(device)
        full_rows = part.numel() // _ROW
        if full_rows:
            rows = part[: full_rows * _ROW].view(full_rows, _ROW)
            torch.sum(rows * factors, 1, out=sums[first : first + full_rows])
        rest = part[full_rows * _ROW :]
        if rest.numel():  # the last row
            sums[-1] = (rest * factors[: rest.numel()]).sum()
    return (sums * (_odd(count, device) ^ _OTHER)).sum()  # other factors, or (row 1, word 2) would be (row 2, word 1)


def combined_hash(hashes: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return one hash of several 0-dim int64 ``hashes`` on ``device``, which depends on their order."""
    if not hashes:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (torch.stack(list(hashes)) * _odd(len(hashes), device)).sum()


def _words(flat: torch.Tensor) -> torch.Tensor:
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size, offset = flat.element_size(), flat.storage_offset()
    for dtype in _WORDS:
        if flat.numel() * size % dtype.itemsize == 0 and offset * size % dtype.itemsize == 0:
            return flat.view(dtype)
    raise AssertionError("every tensor consists of bytes")


def _odd(count: int, device: torch.device) -> torch.Tensor:
    """Return 64-bit odd numbers, one for each index (splitmix64's mixing of a counter)."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return mixed | 1


@collective
def differing(tensors: Sequence[torch.Tensor], comm: Communicator, device: torch.device) -> list[bool]:
    """Return for each tensor True if its bytes differ between ranks, by one small all-reduce.

    All ranks pass as many tensors.
    """
    if comm.world_size == 1 or not tensors:
        return [False] * len(tensors)
    hashes = torch.stack([content_hash(tensor, device) for tensor in tensors])
    # One maximum of h and ~h: ~ reverses the order of integers, so this gives the largest and the smallest hash.
    extremes = torch.cat([hashes, ~hashes])
    comm.all_reduce_max(extremes, tag="initial_sync")
    largest, smallest = extremes[: len(tensors)], ~extremes[len(tensors) :]
    return [bool(value) for value in HostRead(largest != smallest).get().tolist()]


@collective
def synchronize_tensors(tensors: Sequence[torch.Tensor], comm: Communicator, device: torch.device, tag: str) -> None:
    """Overwrite those of ``tensors`` that differ with rank 0's values. All ranks pass the same shapes."""
    for tensor, different in zip(tensors, differing(tensors, comm, device), strict=True):
        if different:
            broadcast_into(tensor, comm, device, tag)


@torch.no_grad()
def broadcast_into(tensor: torch.Tensor, comm: Communicator, device: torch.device, tag: str, source: int = 0) -> None:
    """Copy rank ``source``'s values into ``tensor``, of any strides, dtype and device."""
    if tensor.numel() == 0:
        return
    # Send bytes: not every backend knows every dtype.
    sent = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    comm.broadcast(sent.view(torch.uint8) if sent.dim() else sent.reshape(1).view(torch.uint8), tag, source)
    tensor.copy_(sent)


@collective
def broadcast_flat(flat: torch.Tensor, comm: Communicator, tag: str, source: int = 0) -> None:
    """Copy the values of rank ``source`` into ``flat`` [n], of any dtype, on all ranks."""
    if flat.numel():
        comm.broadcast(flat.view(torch.uint8), tag, source)


@torch.no_grad()
def broadcast_together(tensors: Iterable[torch.Tensor], comm: Communicator, device: torch.device, tag: str) -> None:
    """Overwrite several tensors on every rank with rank 0's values, in one collective for each dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors if comm.world_size > 1 else ():
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for members in by_dtype.values():
        flat = torch.cat([member.to(device).reshape(-1) for member in members])
        comm.broadcast(flat.view(torch.uint8), tag)
        parts = flat.split([member.numel() for member in members])
        torch._foreach_copy_(members, [part.view(m.shape) for part, m in zip(parts, members, strict=True)])
