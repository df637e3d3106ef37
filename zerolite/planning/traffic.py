"""Traffic of a step by kind and dimension of the grid of ranks, within nodes and between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from zerolite.config import ConfigError, ZeroliteConfig
from zerolite.planning.result import Traffic

if TYPE_CHECKING:
    from zerolite.comm import CollectiveCall

MESSAGES = ("send", "receive")
ON_HOST = "control"  # tag of the small exchanges between processes on the host, which are no collectives


class Grid(NamedTuple):
    """Sizes of a grid of pipe × data × tensor ranks, tensor innermost, as in :class:`zerolite.comm.Topology`."""

    pipe: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.pipe * self.data * self.tensor

    def rank(self, pipe: int, data: int, tensor: int) -> int:
        """Return the global rank at these coordinates."""
        return (pipe * self.data + data) * self.tensor + tensor

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return the (pipe, data, tensor) coordinates of ``rank``."""
        return rank // (self.data * self.tensor), rank // self.tensor % self.data, rank % self.tensor

    def groups(self, dimension: str, size: int) -> Iterator[list[int]]:
        """Yield the ranks of each group of "pipe", "data", "tensor", "model" (pipe × tensor) or "world", in order.

        The data ranks may be in sets: neighbours are "shard" or "sequence", ranks of several sets "replicate" or, of
        other sequences, "data". Groups of these have ``size`` ranks.
        """
        neighbours = dimension in ("shard", "sequence")
        if neighbours or dimension == "replicate" or (dimension == "data" and 0 < size < self.data):
            of_set = size if neighbours else self.data // size
            for data in self.groups("data", self.data):
                sets = [data[first : first + of_set] for first in range(0, self.data, of_set)]
                yield from sets if neighbours else map(list, zip(*sets, strict=True))
            return
        inside = {"model": ("pipe", "tensor"), "world": self._fields}.get(dimension, (dimension,))
        found: dict[tuple[int, ...], list[int]] = {}  # by the coordinates in the other dimensions
        for rank in range(self.world_size):
            coordinates = zip(self._fields, self.coordinates(rank), strict=True)
            found.setdefault(tuple(one for name, one in coordinates if name not in inside), []).append(rank)
        yield from found.values()

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self._asdict().items())


def grid_of(config: ZeroliteConfig, world_size: int) -> Grid:
    """Return the grid of ``config``. Raises ConfigError if ``world_size`` ranks cannot form it."""
    pipe, tensor, sequence = config.pipeline.stages, config.tensor_parallel.ranks, config.sequence_parallel.size
    if config.expert_parallel.ranks > 1:
        sentence = (
            f"expected 1 in a plan, which does not spread experts yet, got {config.expert_parallel.ranks}; leave it "
            "out, which plans for all experts on each rank"
        )
        raise ConfigError([("expert_parallel.size", sentence)])
    if world_size % (pipe * tensor):
        path = "pipeline.stages" if pipe > 1 else "tensor_parallel.size"
        sentence = (
            f"expected the number of ranks to be a multiple of pipeline.stages × tensor_parallel.size = {pipe} × "
            f"{tensor} = {pipe * tensor}, got {world_size} ranks"
        )
        raise ConfigError([(path, sentence)])
    grid, shard = Grid(pipe, world_size // (pipe * tensor), tensor), config.zero_optimization.ranks_of_shards
    sets = {config.zero_optimization.key_of_sets: shard or 1, "sequence_parallel.size": sequence}
    for key, size in sets.items():
        if grid.data % size:
            raise ConfigError([(key, f"expected a divisor of the {grid.data} data-parallel ranks, got {size}")])
    return grid


def resolve(config: ZeroliteConfig, world_size: int) -> ZeroliteConfig:
    """Return ``config`` with its batch sizes resolved for the ranks that have samples of their own.

    Raises ConfigError if ``world_size`` ranks cannot form its grid.
    """
    return config.resolve(grid_of(config, world_size).data // config.sequence_parallel.size)


def ring_between_nodes(grid: Grid, nodes: int, dimension: str, size: int) -> Fraction:
    """Return the share of ring traffic that leaves a node. Rings are in rank order, and ranks fill node after node."""
    per_node = grid.world_size // nodes
    links = [(one, other) for group in grid.groups(dimension, size) for one, other in _ring(group)]
    return Fraction(sum(one // per_node != other // per_node for one, other in links), max(len(links), 1))


def messages_between_nodes(grid: Grid, nodes: int, stage: int, looped: bool = False) -> Fraction:
    """Return the share of a pipeline stage's messages that leaves the node.

    The stage sends as much to the stage before it as to the stage after it.

    Args:
        grid: all ranks, which fill node after node.
        nodes: number of nodes.
        stage: the pipeline stage.
        looped: the last stage also sends to the first one.
    """
    per_node = grid.world_size // nodes
    beside = [stage - 1, stage + 1]
    stages = [s % grid.pipe for s in beside] if looped else [s for s in beside if 0 <= s < grid.pipe]
    ranks = [(d, t) for d in range(grid.data) for t in range(grid.tensor)]
    across = sum(grid.rank(stage, *at) // per_node != grid.rank(s, *at) // per_node for s in stages for at in ranks)
    return Fraction(across, max(len(stages) * len(ranks), 1))


def _ring(group: list[int]) -> Iterator[tuple[int, int]]:
    if len(group) > 1:
        yield from zip(group, [*group[1:], group[0]], strict=True)


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
            across = int(sent * (ring_between_nodes(grid, nodes, dimension, ranks) if part is None else part))
        amounts = {"count": len(same), "nbytes": nbytes, "unaligned": sum(call.unaligned for call in same)}
        rows.append(Traffic(op=op, tag=tag, dimension=dimension, ranks=ranks, sent=sent, inter_node=across, **amounts))
    return sorted(rows, key=lambda row: (-row.sent, row.dimension, row.op, row.tag))


def _sent(op: str, nbytes: int, ranks: int) -> int:
    """Return the bytes that each rank of a ring sends (Patarasu and Yuan, 2009; nccl-tests, doc/PERFORMANCE.md)."""
    if op == "receive":
        return 0
    if op in ("broadcast", "send", "permute"):
        return nbytes
    part = nbytes * (ranks - 1) // ranks
    return 2 * part if op == "all_reduce" else part
