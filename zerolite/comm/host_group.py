"""Objects between the hosts' processes, over a gloo group of its own, and meetings that name who does not come."""

from __future__ import annotations

import uuid
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zerolite.comm.arrival import Patience
from zerolite.comm.communicator import Communicator
from zerolite.comm.exits import exited_ranks
from zerolite.comm.objects import broadcast_object, gather_objects
from zerolite.comm.process_group import second_group
from zerolite.comm.ranks import name_ranks


class HostGroup:
    """All methods are called on all ranks of ``comm``, in the same order; the first one is making it. It neither waits
    for the device nor gets in the way of what is in flight. ``group`` is None where there is one process."""

    def __init__(self, comm: Communicator, purpose: str) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self._members = comm.members()
        alone = comm.group is None or comm.world_size == 1
        self.group = None if alone else second_group(comm.group, "gloo", purpose)  # type: ignore[arg-type]
        self._meetings = 0
        self._key = self.broadcast(f"zerolite/{purpose}/{uuid.uuid4()}", 0)

    @property
    def alive(self) -> bool:
        """Whether there is one process, or the group has not been destroyed."""
        return self.group is None or dist.is_initialized()

    def meet(self, timeout_s: float, what: str) -> None:
        """Wait until all ranks are here. Raises RuntimeError after ``timeout_s`` seconds, which says who is missing
        from ``what``. It goes through the store of the rendezvous, where who does not come hinders nobody. A rank that
        comes when the others have given up, or has left out a call of theirs, waits for them at their next one."""
        while self.group is not None and not self._met(timeout_s, what):
            pass

    def _met(self, timeout_s: float, what: str) -> bool:
        """One meeting; False if it has been given up before this rank came."""
        store = _get_default_store()
        meeting, last = f"{self._key}/{self._meetings}", f"{self._key}/{self._meetings - 1}"
        self._meetings += 1
        store.set(f"{meeting}/{self.rank}", "here")
        everybody = store.add(f"{meeting}/count", 1) == self.world_size
        # Whether all have come or somebody has given up is decided once, by who is first at this counter.
        if everybody and store.add(f"{meeting}/decided", 1) == 1:
            store.set(f"{meeting}/outcome", "all")
        patience = Patience(timeout_s)
        while not store.check([f"{meeting}/outcome"]):
            gone = exited_ranks(store, dist.get_rank(), dist.get_world_size())
            exited = [self._members.index(rank) for rank in gone if rank in self._members]
            exited = [rank for rank in exited if not store.check([f"{meeting}/{rank}"])]
            if patience.left() > 0 and not exited:
                patience.pause()
                continue
            missing = [rank for rank in range(self.world_size) if not store.check([f"{meeting}/{rank}"])]
            if store.add(f"{meeting}/decided", 1) == 1:
                store.set(f"{meeting}/outcome", "given up")
            if missing:
                raise RuntimeError(_without(exited, 0.0, what) if exited else _without(missing, timeout_s, what))
        if store.get(f"{meeting}/outcome") != b"all":
            return False
        if self._meetings > 1:  # everybody has left the one before
            store.delete_key(f"{last}/{self.rank}")
            for name in ("count", "decided", "outcome") if self.rank == 0 else ():
                store.delete_key(f"{last}/{name}")
        return True

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order."""
        if self.group is None:
            return [value]
        return gather_objects(value, self.group)

    def broadcast(self, value: Any, source: int) -> Any:
        """Rank ``source``'s ``value``."""
        if self.group is None:
            return value
        return broadcast_object(value, source, self.group)


def _without(missing: list[int], timeout_s: float, what: str) -> str:
    """timeout_s: for how long they have been waited for; 0 if they have exited."""
    if not timeout_s:
        return (
            f"{what}: {name_ranks(missing)} exited with status 0 before this call, which all ranks must make: the "
            f"script has come to its end there, or has called sys.exit or os._exit (see the output of "
            f"{name_ranks(missing)})"
        )
    return (
        f"{what}: {name_ranks(missing)} did not take part within {timeout_s:g} s; all ranks must make this call, in "
        "the same place (not inside `if rank == 0`), and ranks that are slow need a longer checkpoint.timeout_s"
    )
