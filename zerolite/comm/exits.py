"""Ranks that exited with status 0 while other ranks may still wait for them.

The `zerolite` launcher's agent, whose children the ranks are, writes it into the store of the rendezvous.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from zerolite.utils.failure_record import EXIT_COUNT, NUMBERED_EXIT

_READ = 64  # ranks: when all end normally, no rank needs to know of more


def exited_ranks(store: dist.Store, rank: int, world_size: int) -> list[int]:
    """The ranks of the job that are known to have exited with status 0; none where the script has numbered its ranks
    in a way of its own.

    Args:
        store: the rendezvous' one, behind any number of prefixes.
        rank, world_size: of this process in the job's process group.
    """
    if (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) != (str(rank), str(world_size)):
        return []
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    count = min(store.add(EXIT_COUNT, 0), _READ)
    known = [NUMBERED_EXIT.format(number) for number in range(1, count + 1)]
    return sorted(int(store.get(key)) for key in known if store.check([key]))
