"""Time of one collective on a stated machine, by the algorithms that NCCL and zerolite's gloo communicator use."""

from __future__ import annotations

import math
from typing import NamedTuple

from zerolite.comm.recorder import CollectiveCall
from zerolite.planning.result import GIGA, Machine
from zerolite.planning.traffic import Grid, between_nodes

MICRO = 1e-6


class Cost(NamedTuple):
    """Time of one collective that has its wire for itself.

    Attributes:
        latency: seconds in which the wire is free.
        transfer: seconds in which it uses the wire. Collectives at the same time share it.
        between: the wire is the node's to other nodes; False: the rank's within its node.
    """

    latency: float
    transfer: float
    between: bool


class Wires:
    """Times of the collectives of a job whose ranks fill nodes evenly and in order.

    All ranks take part in like collectives at the same time. So a group with k of a node's r ranks has k / r of the
    node's bandwidth to others: all of it for a ring through all ranks, the share of one rank for ranks that hold the
    same shard.
    """

    def __init__(self, machine: Machine, grid: Grid, nodes: int, messages: bool) -> None:
        """
        Args:
            machine: its speeds.
            grid: all ranks.
            nodes: number of nodes.
            messages: ranks exchange by gloo's messages; False: by NCCL.
        """
        self._machine, self._grid, self._per_node, self.messages = machine, grid, grid.world_size // nodes, messages
        self._groups: dict[tuple[str, int], list[int]] = {}

    def cost(self, call: CollectiveCall) -> Cost:
        """Return the time of a collective.

        NCCL (n ranks on m nodes, P bytes of full tensors, B the bandwidth of the slowest link of the ring, a and b the
        latencies of a hop within a node and between nodes): gather and reduce-scatter are rings, (n - 1) / n P / B and
        n - 1 hops, of which the longest way crosses m (none for m = 1); with one rank a node NCCL from 2.23 on takes
        PAT, of log2(n) hops. An all-reduce is the faster of twice that and of a tree, 2 P / B and
        2 ((n / m - 1) a + log2(m) b). (Bandwidths: nccl-tests, doc/PERFORMANCE.md. Hops: NCCL, src/graph/tuning.cc.)
        An all-to-all has the ring's hops, but every rank sends each other one its part by itself.

        Messages: every rank sends every other one its part, all at once; an all-reduce does that twice, or is gloo's
        ring where the length does not divide or there are two ranks. Within a node parts are copied in memory.
        """
        op, nbytes, ranks = call.op, call.nbytes, call.ranks
        group = self._group(call.dimension, ranks)
        on = [rank // self._per_node for rank in group]
        local, nodes = max(map(on.count, set(on))), len(set(on))
        hop, within = MICRO * self._machine.latency, MICRO * self._machine.intra_latency
        crossed = min(nodes, ranks - 1) if nodes > 1 else 0  # links between nodes on the longest way of a part
        ring = within * (ranks - 1 - crossed) + hop * crossed
        if nodes == ranks and not self.messages:
            ring = hop * math.ceil(math.log2(nodes))
        one_hop = hop if nodes > 1 else within
        part = nbytes * (ranks - 1) / ranks
        if op == "permute":
            leaving = [float(share) for share in between_nodes(op, call.moves, group, self._per_node)]
            most = max(sum(of for of, node in zip(leaving, on, strict=True) if node == one) for one in set(on))
            return self._timed(one_hop, nbytes * most, nbytes, local)
        if op == "broadcast":
            return self._timed(ring, nbytes if nodes > 1 else 0, nbytes, local)
        to_others = nbytes * local * (ranks - local) / ranks
        is_half = call.dtype.itemsize == 2
        own_ring = op == "all_reduce" and (call.numel % ranks or ranks == 2 and not is_half)
        if self.messages and not own_ring:
            times = 2 if op == "all_reduce" else 1
            return self._timed(times * one_hop, times * to_others, times * part, local)
        if op == "all_to_all":
            return self._timed(ring, to_others, part, local)
        if op != "all_reduce":
            return self._timed(ring, part if nodes > 1 else 0, part, local)
        costs = [self._timed(2 * ring, 2 * part if nodes > 1 else 0, 2 * part, local)]
        tree = 2 * (within * (local - 1) + hop * math.ceil(math.log2(nodes)))
        if not self.messages and tree < 2 * ring:
            costs.append(self._timed(tree, 2 * nbytes if nodes > 1 else 0, 2 * nbytes, local))
        return min(costs, key=lambda cost: cost.latency + cost.transfer)

    def _timed(self, latency: float, between: float, own: float, local: int) -> Cost:
        """Return the cost of a collective.

        Args:
            latency: in seconds.
            between: bytes that all of a group's ranks in a node send to other nodes; 0 where the group is in one node.
            own: bytes that a rank sends.
            local: ranks of the group in a node.
        """
        machine = self._machine
        within = 0.0 if machine.intra_bandwidth is None else own / (GIGA * machine.intra_bandwidth)
        if not between:
            return Cost(latency, within, False)
        assert machine.inter_bandwidth is not None, "checked by Machine.lacks"
        across = between * self._per_node / (GIGA * machine.inter_bandwidth * local)
        return Cost(latency, across if self.messages else max(across, within), True)

    def _group(self, dimension: str, ranks: int) -> list[int]:
        """Return a group of this dimension; all are alike."""
        key = dimension, ranks
        if key not in self._groups:
            self._groups[key] = self._grid.groups(dimension, ranks)[0]
        return self._groups[key]
