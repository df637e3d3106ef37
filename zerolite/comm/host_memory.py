"""Shared memory between the processes of one host."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerolite.comm.flight_recorder import blocked, collective
from zerolite.comm.objects import gather_objects

logger = logging.getLogger("zerolite")


@collective
def same_host(group: dist.ProcessGroup) -> bool:
    """Return True if all ranks of ``group`` run on one host and can share memory there."""
    ids = _gather(_memory_id(), group)
    return ids[0] != "" and all(each == ids[0] for each in ids)


def _gather(value: object, group: dist.ProcessGroup) -> list[Any]:
    with blocked(("all_gather", "initial_sync", 0, None, 0)):
        return gather_objects(value, group)


def _memory_id() -> str:
    """Return a text that is equal for two processes if they run on one host and see each other's process ids; "" where
    memory cannot be shared."""
    if os.environ.get("ZEROLITE_SHARED_MEMORY", "1") == "0" or not hasattr(os, "memfd_create"):
        return ""
    try:
        # Two machines may have the same host name, but not the same boot id.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@collective
def share(nbytes: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Map ``nbytes`` of memory of every rank of ``group``: uint8 [nbytes] by rank; an empty list on all ranks if there
    is no room.

    The files have no name in any directory: they end with the last process that maps them, however that ends.
    """
    name = f"zerolite-{uuid.uuid4().hex}"
    descriptor = _create(name, nbytes)
    try:
        files = _gather(None if descriptor is None else [os.getpid(), descriptor, name], group)
        maps = [_map(file, nbytes) for file in files if file is not None]
        mapped = [each for each in maps if each is not None]
        # The second exchange is also a barrier: only now may the descriptors be closed.
        if all(_gather(len(mapped) == len(files), group)):
            return mapped
        if dist.get_rank(group) == 0:
            logger.warning(
                "the processes of this host cannot share %d MB of memory each; their collectives go through the "
                "loopback interface, which is slower. Use smaller buckets if the memory is too small.",
                nbytes >> 20,
            )
        return []
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _create(name: str, nbytes: int) -> int | None:
    """Return the descriptor of a file in memory; None if there is no room.

    Its pages are reserved now: without this, a write to a page that does not fit would kill the process with SIGBUS.
    """
    descriptor: int | None = None
    try:
        descriptor = os.memfd_create(name)
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _map(file: tuple[int, int, str], nbytes: int) -> torch.Tensor | None:
    """Map a process's file as uint8 [nbytes]; None if this process may not open it."""
    process, descriptor, name = file
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        if name not in os.readlink(path):  # processes that only seem to be on one host
            return None
        # The first collective may be in an evaluation under inference_mode, but training writes to these tensors later.
        with torch.inference_mode(False):
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
