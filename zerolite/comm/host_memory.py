"""Shared memory between the processes of one host."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerolite.comm.flight_recorder import blocked, collective
from zerolite.comm.objects import gather_objects
from zerolite.utils.memory_tags import BUCKETS, tag_memory

logger = logging.getLogger("zerolite")

_DIRECTORY = Path("/dev/shm")
_PREFIX = "zerolite-"
_PAGE = 4096


@collective
def same_host(group: dist.ProcessGroup) -> bool:
    """Return True if all ranks of ``group`` run on one host and can share memory there."""
    ids = _gather(_memory_id(), group)
    return ids[0] != "" and all(each == ids[0] for each in ids)


def _gather(value: object, group: dist.ProcessGroup) -> list[Any]:
    with blocked(("all_gather", "initial_sync", 0, None, 0)):
        return gather_objects(value, group)


def _memory_id() -> str:
    """Return a text that is equal for two processes if they share a host and its /dev/shm; "" if there is none."""
    if os.environ.get("ZEROLITE_SHARED_MEMORY", "1") == "0" or not os.access(_DIRECTORY, os.W_OK):
        return ""
    boot = ""
    with contextlib.suppress(OSError):
        # Two machines may have the same host name, but not the same boot id.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    directory = _DIRECTORY.stat()
    return f"{socket.gethostname()}/{boot}/{directory.st_dev}"


class HostMemory:
    """Three regions for each rank, mapped by all ranks of a group on one host and used in turn.

    They grow to the largest tensor asked for.
    """

    REGIONS = 3

    def __init__(self, share_memory: Callable[[int, torch.Tensor], list[torch.Tensor]], rank: int) -> None:
        """
        Args:
            share_memory: see :class:`~zerolite.comm.transport.DryTransport`.
            rank: this rank.
        """
        self._share_memory: Callable[[int, torch.Tensor], list[torch.Tensor]] | None = share_memory
        self._rank = rank
        self._bytes = 0
        self.maps: list[torch.Tensor] = []  # one per rank, uint8 [REGIONS * bytes]
        self.exhausted = False  # a request was refused; from then on some collectives use no region

    def close(self) -> None:
        """Drop the group and the memory."""
        self._share_memory, self.maps, self._bytes, self.exhausted = None, [], 0, True

    def holds(self, nbytes: int) -> bool:
        """Return True if the regions are that large already; the same answer on all ranks."""
        return nbytes <= self._bytes

    @collective
    def regions(self, turn: int, nbytes: int, like: torch.Tensor) -> list[torch.Tensor] | None:
        """Return region ``turn`` (modulo their number) of every rank, as uint8 [nbytes] by rank; None if there is no
        memory.

        All ranks get regions, or none does.

        Args:
            like: a tensor that will be copied there.
        """
        if nbytes > self._bytes and not self._grow(nbytes, like):
            return None
        start = turn % self.REGIONS * self._bytes
        return [mapped.narrow(0, start, nbytes) for mapped in self.maps]

    def own_region(self, turn: int, nbytes: int) -> torch.Tensor | None:
        """Return this rank's region ``turn``, if it is large enough already. May be called by one rank alone."""
        if nbytes > self._bytes:
            return None
        return self.maps[self._rank].narrow(0, turn % self.REGIONS * self._bytes, nbytes)

    def _grow(self, needed: int, like: torch.Tensor) -> bool:
        if self.exhausted or self._share_memory is None:
            return False
        region = -(-needed // _PAGE) * _PAGE
        maps = self._share_memory(self.REGIONS * region, like)
        if not maps:
            self.exhausted = True
            return False
        self.maps, self._bytes = [tag_memory(mapped, BUCKETS) for mapped in maps], region
        return True


@collective
def share(nbytes: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Map ``nbytes`` of memory of every rank of ``group``: uint8 [nbytes] by rank; an empty list on all ranks if there
    is no room.

    The files behind it are removed as soon as all ranks have mapped them. If a signal ends a process before that, the
    next call of any process on this host removes its file.
    """
    _remove_abandoned()
    path = _DIRECTORY / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
    lock: int | None = None
    try:
        lock = _create(path, nbytes)
        paths = _gather("" if lock is None else str(path), group)
        if not all(paths):
            if dist.get_rank(group) == 0:
                logger.warning(
                    "%s has no room for %d MB per process; collectives between the processes of this host go through "
                    "the loopback interface, which is slower. Make it larger (docker run --shm-size) or use smaller "
                    "buckets.",
                    _DIRECTORY,
                    nbytes >> 20,
                )
            return []
        maps = _map_all(paths, nbytes)
        mapped = _gather(bool(maps), group)  # also a barrier: only now may the files be removed
        return maps if all(mapped) else []
    finally:
        path.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


def _remove_abandoned() -> None:
    """Remove the files of processes that ended before they could. A living one holds the lock of its file."""
    for path in _DIRECTORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, removed meanwhile, or locked
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _map_all(paths: list[str], size: int) -> list[torch.Tensor]:
    """Map the files as uint8 [size]; an empty list if one of them cannot be mapped."""
    try:
        # The first collective may be in an evaluation under inference_mode, but training writes to these tensors later.
        with torch.inference_mode(False):
            return [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
    except (OSError, RuntimeError):
        return []


def _create(path: Path, size: int) -> int | None:
    """Make a file of ``size`` bytes, and hold its lock. Returns its descriptor; None if there is no room.

    Its pages are reserved now: without this, a write to a page that does not fit would kill the process with SIGBUS.
    """
    unlocked = path.with_name(f".{path.name}")  # without the prefix: not taken for an abandoned one
    try:
        descriptor = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(path)
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
