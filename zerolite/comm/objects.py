"""Python objects between the ranks of a job, by pickle. (torch's own calls for it need numpy.)"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist

from zerolite.comm.flight import wait_for


def gather_objects(value: Any, group: dist.ProcessGroup, tag: str) -> list[Any]:
    """Every rank's ``value``, in rank order. group: of gloo; called on all its ranks. tag: what it is for."""
    own = _packed(value)
    world_size = dist.get_world_size(group)
    lengths = _gather(torch.tensor([own.numel()], device="cpu"), world_size, group, tag).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: own.numel()] = own
    rows = _gather(padded, world_size, group, tag)
    return [_unpacked(row, length) for row, length in zip(rows, lengths, strict=True)]


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup, tag: str) -> Any:
    """Rank ``source``'s ``value``; that of others is ignored. group: of gloo; called on all its ranks."""
    is_source = dist.get_rank(group) == source
    own = _packed(value) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([own.numel()], device="cpu")
    _broadcast(length, source, group, tag)
    if not is_source:
        own = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    _broadcast(own, source, group, tag)
    return value if is_source else _unpacked(own, own.numel())


def _gather(own: torch.Tensor, world_size: int, group: dist.ProcessGroup, tag: str) -> torch.Tensor:
    rows = torch.empty(world_size, own.numel(), dtype=own.dtype, device="cpu")
    work = dist.all_gather(list(rows), own, group=group, async_op=True)
    wait_for((work,), ("all_gather", tag, rows.numel(), rows.dtype, 0))
    return rows


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup, tag: str) -> None:
    work = dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group, async_op=True)
    wait_for((work,), ("broadcast", tag, tensor.numel(), tensor.dtype, 0))


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(row: torch.Tensor, length: int) -> Any:
    return pickle.loads(ctypes.string_at(row.data_ptr(), length))
