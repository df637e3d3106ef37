"""Python objects between ranks, pickled and signed with the secret of the job if it has one.

Unpickling executes code, so a pickle from outside the job must not be loaded. torch's own object collectives sign
nothing. The watchdog does not time these calls: threads use them too, and in a save ranks may take long.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import pickle
from typing import Any

import torch
import torch.distributed as dist

from zerolite.comm.flight_recorder import collective
from zerolite.utils.network import SECRET_VARIABLE

_SIGNATURE = 32  # bytes of a signature


def pack(value: object) -> torch.Tensor:
    """Return ``value`` as uint8 on the host, which :func:`unpack` reads on another rank."""
    pickled = pickle.dumps(value)
    return torch.frombuffer(bytearray(_signature(pickled) + pickled), dtype=torch.uint8)


def unpack(packed: torch.Tensor, nbytes: int) -> Any:
    """Return the value in the first ``nbytes`` of ``packed``. Raises RuntimeError if no rank of this job has packed
    it."""
    content = ctypes.string_at(packed.data_ptr(), nbytes)
    signature, pickled = content[:_SIGNATURE], content[_SIGNATURE:]
    if not hmac.compare_digest(signature, _signature(pickled)):
        raise RuntimeError(
            "a message to this rank is not signed with the secret of its job, so it is not read: either "
            f"{SECRET_VARIABLE} is not the same on all ranks, or something else has connected to this job"
        )
    return pickle.loads(pickled)


def _signature(content: bytes) -> bytes:
    return hmac.digest(os.environ.get(SECRET_VARIABLE, "").encode(), content, "sha256")


@collective
def gather_objects(value: object, group: dist.ProcessGroup, to_first: bool = False) -> list[Any]:
    """Return every rank's ``value``, in rank order; with ``to_first`` on the group's first rank alone, [] on others."""
    packed = pack(value)
    # Gloo gathers equal lengths only: first all lengths, then the bytes, padded to the longest.
    lengths = _gather(torch.tensor([packed.numel()], device="cpu"), group).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: packed.numel()] = packed
    if to_first and dist.get_rank(group) != 0:
        dist.gather(padded, None, dist.get_global_rank(group, 0), group)
        return []
    rows = _gather(padded, group, to_first)
    return [unpack(row, length) for row, length in zip(rows, lengths, strict=True)]


def _gather(packed: torch.Tensor, group: dist.ProcessGroup, to_first: bool = False) -> torch.Tensor:
    rows = torch.empty(dist.get_world_size(group), packed.numel(), dtype=packed.dtype, device="cpu")
    if to_first:
        dist.gather(packed, list(rows), dist.get_global_rank(group, 0), group)
    else:
        dist.all_gather(list(rows), packed, group=group)
    return rows


@collective
def broadcast_object(value: object, source: int, group: dist.ProcessGroup) -> Any:
    """Return rank ``source``'s ``value``; other ranks' values are ignored."""
    is_source = dist.get_rank(group) == source
    packed = pack(value if is_source else None)
    length = torch.tensor([packed.numel()], device="cpu")
    dist.broadcast(length, dist.get_global_rank(group, source), group=group)
    packed = packed if is_source else torch.empty(int(length), dtype=torch.uint8, device="cpu")
    dist.broadcast(packed, dist.get_global_rank(group, source), group=group)
    return value if is_source else unpack(packed, packed.numel())
