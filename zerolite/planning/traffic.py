"""Traffic of a step by kind and dimension of the grid of ranks, within nodes and between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from zerolite.planning.result import Traffic

if TYPE_CHECKING:
    from zerolite.comm import CollectiveCall, Topology

ON_HOST = "control"  # tag of the small exchanges between processes on the host, which are no collectives


class Grid(NamedTuple):
    """Sizes of a grid of data × tensor ranks, tensor innermost, as in :class:`zerolite.comm.Topology`.

    ``sequence`` of the data ranks, neighbours, have parts of the same sequences. ``expert`` of all ranks, neighbours,
    have all experts together: those of whole tensor groups.
    """

    data: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1

    @classmethod
    def of(cls, topology: Topology) -> Grid:
        """Return the sizes of a job's grid."""
        made = topology.data, topology.tensor, topology.sequence, topology.expert
        return cls(*(comm.world_size for comm in made))

    @property
    def world_size(self) -> int:
        return self.data * self.tensor

    def groups(self, dimension: str, size: int) -> list[list[int]]:
        """Return the ranks of each group of ``size`` ranks, in order.

        Neighbours among all ranks are "tensor" and "expert". The data ranks are in sets in several ways: neighbours are
        "shard" or "sequence"; those at one place of all sets are "replicate", "expert data", or of other sequences
        "data"; "ring" are some of a sequence's, and "expert shard" those of a "shard" with the same experts.
        """
        ranks = list(range(self.world_size))
        if dimension == "world":
            return [ranks]
        if dimension in ("tensor", "model", "expert"):
            return [ranks[first : first + size] for first in range(0, self.world_size, size)]
        data_groups = [ranks[place :: self.tensor] for place in range(self.tensor)]
        apart = {"ring": self.sequence // size, "expert shard": max(1, self.expert // self.tensor)}
        apart |= dict.fromkeys(("replicate", "expert data", "data"), self.data // size)
        step = apart.get(dimension, 1)
        blocks = [
            group[first : first + size * step] for group in data_groups for first in range(0, self.data, size * step)
        ]
        return [block[place::step] for block in blocks for place in range(step)]


def between_nodes(op: str, moves: int, group: list[int], per_node: int) -> list[Fraction]:
    """Return the share of what each rank of a group sends that leaves its node, which has ``per_node`` ranks.

    An all-to-all sends as much to every other rank, a permute all to one rank, and a ring all to the next one.

    Args:
        op: the collective.
        moves: see :class:`~zerolite.comm.recorder.CollectiveCall`.
        group: the ranks, in order.
    """
    nodes, size = [rank // per_node for rank in group], len(group)
    if op == "all_to_all":
        local = Counter(nodes)
        return [Fraction(size - local[node], max(size - 1, 1)) for node in nodes]
    targets = nodes[::-1] if op == "permute" and not moves else nodes[moves or 1 :] + nodes[: moves or 1]
    return [Fraction(node != target) for node, target in zip(nodes, targets, strict=True)]


def summarize(calls: Iterable[CollectiveCall], grid: Grid, nodes: int | None = None) -> list[Traffic]:
    """Return one row for each operation, tag and dimension, the one that sends the most bytes first.

    Collectives are assumed to be rings in rank order, and ranks fill node after node. NCCL may choose trees for small
    tensors, which send as much. Exchanges on the host are left out.

    Args:
        calls: the calls of one rank.
        grid: all ranks.
        nodes: number of nodes; None: traffic between nodes is unknown.
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
            by_moves: Counter[int] = Counter()
            for call in same:
                by_moves[call.moves] += call.nbytes
            groups, part = grid.groups(dimension, ranks), Fraction(0)
            for moves, of_moves in by_moves.items():
                shares = [sum(between_nodes(op, moves, group, grid.world_size // nodes)) for group in groups]
                part += of_moves * Fraction(sum(shares), grid.world_size)
            across = int(sent * part / max(nbytes, 1))
        amounts = {"count": len(same), "nbytes": nbytes, "unaligned": sum(call.unaligned for call in same)}
        rows.append(Traffic(op=op, tag=tag, dimension=dimension, ranks=ranks, sent=sent, inter_node=across, **amounts))
    return sorted(rows, key=lambda row: (-row.sent, row.dimension, row.op, row.tag))


def _sent(op: str, nbytes: int, ranks: int) -> int:
    """Return the bytes that each rank of a ring sends (Patarasu and Yuan, 2009; nccl-tests, doc/PERFORMANCE.md)."""
    if op in ("broadcast", "permute"):
        return nbytes
    part = nbytes * (ranks - 1) // ranks
    return 2 * part if op == "all_reduce" else part
