"""[pure] Logical collectives of one step to bytes by kind, within nodes and between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from zerolite.planning.result import Traffic


class Call(Protocol):
    """See :class:`zerolite.comm.CollectiveCall`."""

    @property
    def op(self) -> str: ...

    @property
    def tag(self) -> str: ...

    @property
    def nbytes(self) -> int: ...


def summarize(calls: Iterable[Call], world_size: int, nodes: int | None) -> list[Traffic]:
    """One row for each operation and purpose, in the order of the bytes sent.

    Rings in the order of ranks, which fill one node after the other: of a node's ranks one sends to another node, so
    that 1 / (ranks of a node) of what a rank sends on average leaves the node, if there are several. NCCL may choose
    trees for small tensors, which send as much.
    """
    counts: dict[tuple[str, str], list[int]] = {}
    for call in calls:
        entry = counts.setdefault((call.op, call.tag), [0, 0])
        entry[0] += 1
        entry[1] += call.nbytes
    rows = []
    for (op, tag), (count, nbytes) in counts.items():
        sent = _sent(op, nbytes, world_size)
        between = None if nodes is None else (sent * nodes // world_size if nodes > 1 else 0)
        rows.append(Traffic(op=op, tag=tag, count=count, nbytes=nbytes, sent=sent, inter_node=between))
    return sorted(rows, key=lambda row: (-row.sent, row.op, row.tag))


def _sent(op: str, nbytes: int, world_size: int) -> int:
    """Bytes that each rank of a ring sends (Patarasu and Yuan, 2009; nccl-tests, doc/PERFORMANCE.md)."""
    if op == "broadcast":
        return nbytes
    part = nbytes * (world_size - 1) // world_size
    return 2 * part if op == "all_reduce" else part
