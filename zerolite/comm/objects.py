"""Broadcast and gather of Python objects, without numpy, which torch's own functions need.

Plain data is sent as JSON. Other objects are pickled, and signed with the secret of the job if it has one. Unpickling
executes code, so a pickle from outside the job must not be loaded.

All objects between ranks go through here, most of them by :class:`~zerolite.comm.HostGroup`. The watchdog does not time
these calls: threads use them too, and in a save ranks may take long.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import os
import pickle
from typing import Any

import torch
import torch.distributed as dist

from zerolite.comm.flight_recorder import collective
from zerolite.utils.listening import SECRET_VARIABLE
from zerolite.utils.torch_private import read_objects_by

_JSON, _PICKLE = b"j", b"p"
_SIGNATURE = hashlib.sha256().digest_size  # bytes


def pack(value: object) -> bytes:
    """Return ``value`` as bytes that :func:`unpack` reads on another rank."""
    if _is_plain(value):
        return _JSON + json.dumps(value).encode()
    pickled = pickle.dumps(value)
    return _PICKLE + _signature(pickled) + pickled


def unpack(packed: bytes) -> Any:
    """Return the value of bytes from :func:`pack`. Raises RuntimeError for bytes that no rank of this job has
    packed."""
    kind, content = packed[:1], packed[1:]
    if kind == _JSON:
        return json.loads(content)
    signature, pickled = content[:_SIGNATURE], content[_SIGNATURE:]
    if kind != _PICKLE or not hmac.compare_digest(signature, _signature(pickled)):
        raise RuntimeError(
            "a message to this rank is not signed with the secret of its job, so it is not read: either "
            f"{SECRET_VARIABLE} is not the same on all ranks, or something else has connected to this job"
        )
    return pickle.loads(pickled)


def _signature(content: bytes) -> bytes:
    return hmac.digest(os.environ.get(SECRET_VARIABLE, "").encode(), content, "sha256")


def _is_plain(value: Any) -> bool:
    """Return True if JSON gives back the same value with the same types."""
    cls = type(value)
    if cls is list:
        return all(map(_is_plain, value))
    if cls is dict:
        return all(type(key) is str for key in value) and all(map(_is_plain, value.values()))
    return value is None or cls in (bool, int, float, str)


@collective
def gather_objects(value: object, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's ``value``, in rank order."""
    own = to_tensor(value)
    world_size = dist.get_world_size(group)
    # Gloo gathers equal lengths only: first all lengths, then the bytes, padded to the longest.
    lengths = _gather(torch.tensor([own.numel()], device="cpu"), world_size, group).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: own.numel()] = own
    rows = _gather(padded, world_size, group)
    return [from_tensor(row, length) for row, length in zip(rows, lengths, strict=True)]


@collective
def broadcast_object(value: object, source: int, group: dist.ProcessGroup) -> Any:
    """Return rank ``source``'s ``value``; other ranks' values are ignored."""
    is_source = dist.get_rank(group) == source
    own = to_tensor(value) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([own.numel()], device="cpu")
    _broadcast(length, source, group)
    if not is_source:
        own = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    _broadcast(own, source, group)
    return value if is_source else from_tensor(own, own.numel())


def _gather(own: torch.Tensor, world_size: int, group: dist.ProcessGroup) -> torch.Tensor:
    rows = torch.empty(world_size, own.numel(), dtype=own.dtype, device="cpu")
    dist.all_gather(list(rows), own, group=group)
    return rows


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)


def to_tensor(value: object) -> torch.Tensor:
    """Return the bytes of :func:`pack` as uint8 on the host."""
    return torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)


def from_tensor(row: torch.Tensor, length: int) -> Any:
    """Return the value in the first ``length`` bytes of ``row``: the inverse of :func:`to_tensor`."""
    return unpack(ctypes.string_at(row.data_ptr(), length))


def read_objects_without_numpy() -> None:
    """Let torch's own object collectives run without numpy; torch.distributed.checkpoint calls them.

    torch uses numpy only to read the bytes of a tensor. Called before each of these collectives; cheap.
    """
    try:
        torch.empty(0, dtype=torch.uint8, device="cpu").numpy()
    except RuntimeError:
        read_objects_by(_unpickled)


def _unpickled(tensor: torch.Tensor, tensor_size: int, group: object) -> object:
    here = tensor.cpu().contiguous()
    return pickle.loads(ctypes.string_at(here.data_ptr(), int(tensor_size)))
