"""Bytes sent in a step by kind and dimension, within nodes and between them. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Protocol

from zerolite.planning.places import Grid, messages_between_nodes, ring_between_nodes
from zerolite.planning.result import Traffic

MESSAGES = ("send", "receive")
ON_HOST = "control"  # the tag of the few numbers that hosts tell each other beside all collectives


class CollectiveLike(Protocol):
    """See :class:`zerolite.comm.CollectiveCall`."""

    @property
    def op(self) -> str: ...

    @property
    def tag(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def dimension(self) -> str: ...

    @property
    def ranks(self) -> int: ...

    @property
    def unaligned(self) -> int: ...


def summarize(
    calls: Iterable[CollectiveLike], grid: Grid, nodes: int | None = None, stage: int = 0, looped: bool = False
) -> list[Traffic]:
    """One row for each operation, purpose and dimension, in the order of the bytes sent.

    Args:
        stage: of the pipeline, whose calls they are.
        looped: whether its last stage sends to the first one, too.

    Rings in the order of ranks, which fill one node after the other: the part of them that leaves a node is that of
    their links. What hosts tell each other is left out. NCCL may choose trees for small tensors, which send as much.
    """
    counts: dict[tuple[str, str, str, int], list[int]] = {}
    for call in calls:
        if call.tag == ON_HOST:
            continue
        entry = counts.setdefault((call.op, call.tag, call.dimension, call.ranks), [0, 0, 0])
        entry[0] += 1
        entry[1] += call.nbytes
        entry[2] += call.unaligned
    rows = []
    for (op, tag, dimension, ranks), (count, nbytes, unaligned) in counts.items():
        sent, across = _sent(op, nbytes, ranks), None
        if nodes is not None:
            across = int(sent * _part_between(op, dimension, grid, nodes, stage, looped))
        amounts = {"count": count, "nbytes": nbytes, "sent": sent, "unaligned": unaligned}
        rows.append(Traffic(op=op, tag=tag, dimension=dimension, ranks=ranks, inter_node=across, **amounts))
    return sorted(rows, key=lambda row: (-row.sent, row.dimension, row.op, row.tag))


def _part_between(op: str, dimension: str, grid: Grid, nodes: int, stage: int, looped: bool) -> Fraction:
    if op in MESSAGES or dimension == "pipe":
        return messages_between_nodes(grid, nodes, stage, looped)
    return ring_between_nodes(grid, nodes, dimension)


def _sent(op: str, nbytes: int, ranks: int) -> int:
    """Bytes that each rank of a ring sends (Patarasu and Yuan, 2009; nccl-tests, doc/PERFORMANCE.md)."""
    if op == "receive":
        return 0
    if op in ("broadcast", "send"):
        return nbytes
    part = nbytes * (ranks - 1) // ranks
    return 2 * part if op == "all_reduce" else part
