"""Gloo group for Python objects, with barriers that name the ranks that do not arrive."""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zerolite.comm.communicator import Communicator
from zerolite.comm.flight_recorder import blocked
from zerolite.comm.objects import broadcast_object, from_tensor, gather_objects, to_tensor
from zerolite.comm.process_group import second_group
from zerolite.comm.ranks import name_ranks
from zerolite.comm.store_barrier import StoreBarrier

_TAG = 1
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = weakref.WeakKeyDictionary()
"""How many there have been over each group, by purpose; the same on all its ranks."""


class HostGroup:
    """All methods are called on all ranks of ``comm``, in the same order; the first one is making it. It neither waits
    for the device nor gets in the way of what is in flight."""

    def __init__(self, comm: Communicator, purpose: str) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self._members = comm.members()
        self._comm, self._purpose = comm, purpose
        self._alone = comm.group is None or comm.world_size == 1
        self.global_rank = comm.rank if self._alone else self._members[comm.rank]
        self._group: dist.ProcessGroup | None = None
        self._meetings = 0
        self._key = ""
        if comm.group is not None and not self._alone:
            made = _made.setdefault(comm.group, {})
            made[purpose] = made.get(purpose, 0) + 1
            ranks = zlib.crc32(repr(self._members).encode())
            key = f"zerolite/{purpose}/{ranks}/{made[purpose]}"
            # A store may outlive a process group, and have the keys of one before: every rank comes once for each.
            tickets = _get_default_store().add(f"{key}/made", 1)
            self._key = f"{key}/{(tickets - 1) // self.world_size}"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, which all ranks make together when they first ask for it; None where there is one process."""
        if self._group is None and not self._alone:
            if self._comm.group is None:
                raise RuntimeError(
                    f"expected the process group to be there for what ranks tell each other ({self._purpose}), but it "
                    "has been destroyed; make this call before zerolite.destroy()"
                )
            self._group = second_group(self._comm.group, "gloo", self._purpose)
        return self._group

    @property
    def alive(self) -> bool:
        """True if there is one process, or the group has not been destroyed."""
        return self._alone or dist.is_initialized()

    def barrier(self, timeout_s: float, what: str) -> None:
        """Wait until all ranks are here. Raises RuntimeError on all that are after ``timeout_s`` seconds, which says
        who is missing from ``what``. It goes through the store of the rendezvous, where a missing rank hinders
        no other. A rank that comes when the others have given up, or has left out a call of theirs, waits for them at
        their next one."""

        def too_late(missing: list[int]) -> str:
            return (
                f"{name_ranks(missing)} did not take part within {timeout_s:g} s; all ranks must make this call, in "
                "the same place (not inside `if rank == 0`), and ranks that are slow need a longer "
                "checkpoint.timeout_s"
            )

        if self._alone:
            return
        met = False
        while not met:
            self._meetings += 1
            met = self._barrier(self._meetings, what).wait(timeout_s, too_late)
        if self._meetings > 1:  # all ranks have left the one before
            self._barrier(self._meetings - 1, what).clean()

    def _barrier(self, number: int, what: str) -> StoreBarrier:
        store = dist.PrefixStore(f"{self._key}/{number}", _get_default_store())
        return StoreBarrier(store, self.global_rank, self._members, what)

    def gather(self, value: object) -> list[Any]:
        """Every rank's ``value``, in rank order."""
        group = self.group
        return [value] if group is None else gather_objects(value, group)

    def broadcast(self, value: object, source: int) -> Any:
        """Rank ``source``'s ``value``."""
        group = self.group
        return value if group is None else broadcast_object(value, source, group)


class HostLinks:
    """Objects from one rank of ``comm`` to another. Made on all of them, in the same order; every :meth:`send` needs a
    :meth:`receive` there."""

    def __init__(self, comm: Communicator, purpose: str) -> None:
        assert comm.group is not None
        on_host = torch.device("cpu") in comm.group._device_types
        # Messages with a tag of their own do not meet others of the same group.
        self._group = comm.group if on_host else second_group(comm.group, "gloo", purpose)
        self._ranks = comm.members()
        self._sent: list[tuple[Any, torch.Tensor]] = []  # works, and what they need alive

    def send(self, value: object, rank: int) -> None:
        """Send ``value`` to ``rank``, and wait for nothing."""
        packed = to_tensor(value)
        for tensor in (torch.tensor([packed.numel()], device="cpu"), packed):
            self._sent.append((dist.isend(tensor, self._ranks[rank], group=self._group, tag=_TAG), tensor))

    def receive(self, rank: int) -> Any:
        """Return what ``rank`` sends next."""
        with blocked(("receive", "object", 0, None, 0)):
            length = torch.empty(1, dtype=torch.int64, device="cpu")
            dist.recv(length, self._ranks[rank], group=self._group, tag=_TAG)
            packed = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            dist.recv(packed, self._ranks[rank], group=self._group, tag=_TAG)
        return from_tensor(packed, packed.numel())

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            work.wait()
