"""Key-value exchange through the rendezvous store, independent of all collectives.

Not for objects (objects.py): any rank may call it at any time, while others hang in a collective.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zerolite.comm.exits import exited_ranks


class SharedStore:
    """Of the default process group's ranks, over a connection of its own, so that it waits for nobody who waits in the
    store. Keys are under ``prefix``. Its methods may be called by any rank at any time, and by several threads; they
    raise RuntimeError once the process that holds the store has gone."""

    def __init__(self, prefix: str) -> None:
        self._group = dist.group.WORLD if dist.is_initialized() else None
        self.rank = dist.get_rank() if self._group is not None else 0
        self.world_size = dist.get_world_size() if self._group is not None else 1
        self._store: dist.Store | None = None
        if self.world_size > 1:
            store = _get_default_store()
            clone = getattr(store, "clone", None)  # not in torch 2.6: the same connection then
            self._store = dist.PrefixStore(prefix, store if clone is None else clone())

    @property
    def alone(self) -> bool:
        """Whether there is one process, for which nothing is stored."""
        return self._store is None

    @property
    def held_by_launcher(self) -> bool:
        """Whether the store outlives the ranks; otherwise it lives in rank 0's process."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def belongs_to_default_group(self) -> bool:
        """Whether the process group that it was made for is still there."""
        return self._group is (dist.group.WORLD if dist.is_initialized() else None)

    def close(self) -> None:
        self._store = self._group = None

    def set(self, key: str, value: str) -> None:
        if self._store is not None:
            self._store.set(key, value)

    def get(self, key: str) -> str:
        """Waits until the key is there, at most as long as the store's timeout says."""
        return self._store.get(key).decode() if self._store is not None else ""

    def has(self, key: str) -> bool:
        return self._store is not None and bool(self._store.check([key]))

    def add(self, key: str, number: int) -> int:
        """The counter ``key`` after ``number`` has been added; 0 reads it."""
        return int(self._store.add(key, number)) if self._store is not None else number

    def exited(self) -> list[int]:
        """The ranks of the job that the launcher knows to have exited with status 0."""
        if self._store is None or not dist.is_initialized():
            return []
        return exited_ranks(self._store, dist.get_rank(), dist.get_world_size())

    def delete(self, key: str) -> None:
        if self._store is not None:
            self._store.delete_key(key)
