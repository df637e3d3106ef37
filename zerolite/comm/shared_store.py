"""Key-value exchange through the rendezvous store, independent of all collectives.

Any rank may call it at any time, while others hang in a collective. Objects are exchanged by objects.py instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from zerolite.comm.store_requests import StoreSilent, ask_store, exited_ranks
from zerolite.utils.torch_private import job_store

Answer = TypeVar("Answer")


class SharedStore:
    """Store of the default process group's ranks, over a connection of its own, with keys under ``prefix``.

    Any rank and any thread may call its methods at any time. They raise RuntimeError if the process that hosts the
    store has ended, or has not answered for 30 s: no request waits for ever.
    """

    def __init__(self, prefix: str) -> None:
        self._group = dist.group.WORLD if dist.is_initialized() else None
        self.rank = dist.get_rank() if self._group is not None else 0
        self.world_size = dist.get_world_size() if self._group is not None else 1
        self._store: dist.Store | None = None
        self._silent = False
        if self.world_size > 1:
            store = job_store()
            # A connection of its own: a request that blocks would make all others of the connection wait. torch 2.6
            # cannot clone; there the connection is shared.
            clone = getattr(store, "clone", None)
            self._store = dist.PrefixStore(prefix, store if clone is None else clone())

    @property
    def alone(self) -> bool:
        """True in a job of one process, for which nothing is stored."""
        return self._store is None

    @property
    def held_by_launcher(self) -> bool:
        """True if the launcher hosts the store, which then outlives the ranks; otherwise rank 0's process does."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def belongs_to_default_group(self) -> bool:
        """Return True while the process group exists for which this store was made."""
        return self._group is (dist.group.WORLD if dist.is_initialized() else None)

    def close(self) -> None:
        self._store = self._group = None

    def set(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def get(self, key: str) -> str:
        """Return the value of an existing key."""
        return self._ask(lambda store: store.get(key)).decode()

    def has(self, *keys: str) -> bool:
        """Return True if all the keys exist."""
        return self._ask(lambda store: store.check(list(keys)))

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the counter ``key`` and return its new value; 0 reads it."""
        return self._ask(lambda store: store.add(key, number))

    def claim(self, key: str, value: str) -> str:
        """Set ``key`` unless another rank has. Return its value: the ``value`` of the rank that came first."""
        # An empty expected value means that the key is set only if it is missing.
        return self._ask(lambda store: store.compare_set(key, "", value)).decode()

    def exited(self) -> list[int]:
        """Return the ranks of the job that the launcher knows to have exited with status 0."""
        rank, world_size = self.rank, self.world_size
        return self._ask(lambda store: exited_ranks(store, rank, world_size))

    def _ask(self, request: Callable[[dist.Store], Answer]) -> Answer:
        store = self._store
        if store is None or self._silent:
            raise RuntimeError("the store of the rendezvous cannot be asked")
        try:
            return ask_store(lambda: request(store))
        except StoreSilent:
            self._silent = True  # the request that still waits occupies the connection
            raise
