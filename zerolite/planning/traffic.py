"""Traffic of a step by kind and dimension, within nodes and between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zerolite.planning.rank_grid import Grid, messages_between_nodes, ring_between_nodes
from zerolite.planning.result import Traffic

if TYPE_CHECKING:
    from zerolite.comm import CollectiveCall

MESSAGES = ("send", "receive")
ON_HOST = "control"  # tag of the small exchanges between processes on the host, which are no collectives


def summarize(
    calls: Iterable[CollectiveCall], grid: Grid, nodes: int | None = None, stage: int = 0, looped: bool = False
) -> list[Traffic]:
    """Return one row for each operation, tag and dimension, the one that sends the most bytes first.

    Collectives are assumed to be rings in rank order, and ranks fill node after node. So the share of the bytes that
    leaves a node is the share of the ring's links that does. NCCL may choose trees for small tensors, which send as
    much. Exchanges on the host are left out.

    Args:
        calls: the calls of one rank.
        grid: all ranks.
        nodes: number of nodes; None: traffic between nodes is unknown.
        stage: pipeline stage of the rank.
        looped: the last pipeline stage also sends to the first one.
    """
    kinds: dict[tuple[str, str, str, int], list[CollectiveCall]] = {}
    for call in calls:
        if call.tag != ON_HOST:
            kinds.setdefault((call.op, call.tag, call.dimension, call.ranks), []).append(call)
    rows = []
    for (op, tag, dimension, ranks), same in kinds.items():
        nbytes = sum(call.nbytes for call in same)
        sent, across = _sent(op, nbytes, ranks), None
        if nodes is not None:
            messages = op in MESSAGES or dimension == "pipe"
            part = messages_between_nodes(grid, nodes, stage, looped) if messages else None
            across = int(sent * (ring_between_nodes(grid, nodes, dimension) if part is None else part))
        amounts = {"count": len(same), "nbytes": nbytes, "unaligned": sum(call.unaligned for call in same)}
        rows.append(Traffic(op=op, tag=tag, dimension=dimension, ranks=ranks, sent=sent, inter_node=across, **amounts))
    return sorted(rows, key=lambda row: (-row.sent, row.dimension, row.op, row.tag))


def _sent(op: str, nbytes: int, ranks: int) -> int:
    """Return the bytes that each rank of a ring sends (Patarasu and Yuan, 2009; nccl-tests, doc/PERFORMANCE.md)."""
    if op == "receive":
        return 0
    if op in ("broadcast", "send"):
        return nbytes
    part = nbytes * (ranks - 1) // ranks
    return 2 * part if op == "all_reduce" else part
