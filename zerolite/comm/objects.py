"""Python objects between the ranks of a job, by pickle. (torch's own calls for it need numpy.)

The watchdog does not time these: they are used by threads too, and where ranks may take long, as in saving.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's ``value``, in rank order. group: of gloo; called on all its ranks."""
    own = _packed(value)
    world_size = dist.get_world_size(group)
    lengths = _gather(torch.tensor([own.numel()], device="cpu"), world_size, group).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: own.numel()] = own
    rows = _gather(padded, world_size, group)
    return [_unpacked(row, length) for row, length in zip(rows, lengths, strict=True)]


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup) -> Any:
    """Rank ``source``'s ``value``; that of others is ignored. group: of gloo; called on all its ranks."""
    is_source = dist.get_rank(group) == source
    own = _packed(value) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([own.numel()], device="cpu")
    _broadcast(length, source, group)
    if not is_source:
        own = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    _broadcast(own, source, group)
    return value if is_source else _unpacked(own, own.numel())


def _gather(own: torch.Tensor, world_size: int, group: dist.ProcessGroup) -> torch.Tensor:
    rows = torch.empty(world_size, own.numel(), dtype=own.dtype, device="cpu")
    dist.all_gather(list(rows), own, group=group)
    return rows


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(row: torch.Tensor, length: int) -> Any:
    return pickle.loads(ctypes.string_at(row.data_ptr(), length))
