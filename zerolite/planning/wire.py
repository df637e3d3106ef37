"""Time of one collective on a stated machine, by the algorithms that NCCL and zerolite's gloo communicator use."""

from __future__ import annotations

import math
from typing import NamedTuple

from zerolite.planning.result import GIGA, Machine
from zerolite.planning.traffic import Grid

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
        self._spans: dict[tuple[str, int], tuple[int, int]] = {}

    def cost(self, op: str, nbytes: int, dimension: str, ranks: int, numel: int, half: bool) -> Cost:
        """Return the time of a collective.

        NCCL (n ranks on m nodes, P bytes of full tensors, B the bandwidth of the slowest link of the ring, a and b the
        latencies of a hop within a node and between nodes): gather and reduce-scatter are rings, (n - 1) / n P / B and
        n - 1 hops, of which the longest way crosses m (none for m = 1); with one rank a node NCCL from 2.23 on takes
        PAT, of log2(n) hops. An all-reduce is the faster of twice that and of a tree, 2 P / B and
        2 ((n / m - 1) a + log2(m) b). (Bandwidths: nccl-tests, doc/PERFORMANCE.md. Hops: NCCL, src/graph/tuning.cc.)

        Messages: every rank sends every other one its part, all at once; an all-reduce does that twice, or is gloo's
        ring where the length does not divide or there are two ranks. Within a node parts are copied in memory.

        Args:
            op: as in :class:`~zerolite.comm.recorder.CollectiveCall`, like ``nbytes``, ``dimension``, ``ranks`` and
                ``numel``.
            half: elements have 16 bits.
        """
        local, nodes = self._span(dimension, ranks)
        hop, within = MICRO * self._machine.latency, MICRO * self._machine.intra_latency
        crossed = min(nodes, ranks - 1) if nodes > 1 else 0  # links between nodes on the longest way of a part
        ring = within * (ranks - 1 - crossed) + hop * crossed
        if nodes == ranks and not self.messages:
            ring = hop * math.ceil(math.log2(nodes))
        own_ring = not self.messages or op == "all_reduce" and (numel % ranks or ranks == 2 and not half)
        if op in ("send", "receive", "broadcast", "permute"):
            latency, transfer = ring if op == "broadcast" else max(hop if nodes > 1 else 0, within), float(nbytes)
        elif not own_ring:
            times = 2 if op == "all_reduce" else 1
            across = local * (ranks - local) / ranks
            latency, transfer = times * (hop if nodes > 1 else within), times * nbytes * (across or (ranks - 1) / ranks)
        else:
            latency, transfer = ring, nbytes * (ranks - 1) / ranks
            if op == "all_reduce":
                latency, transfer = 2 * latency, 2 * transfer
                tree = 2 * (within * (local - 1) + hop * math.ceil(math.log2(nodes))) if not self.messages else latency
                if tree < latency:
                    return self._faster(Cost(latency, transfer, nodes > 1), Cost(tree, 2.0 * nbytes, nodes > 1), local)
        return self._timed(Cost(latency, transfer, nodes > 1), local)

    def _faster(self, one: Cost, other: Cost, local: int) -> Cost:
        return min((self._timed(cost, local) for cost in (one, other)), key=lambda cost: cost.latency + cost.transfer)

    def _timed(self, cost: Cost, local: int) -> Cost:
        """Return ``cost``, whose transfer is in bytes over a ring's link, with its transfer in seconds."""
        machine = self._machine
        within = math.inf if machine.intra_bandwidth is None else machine.intra_bandwidth
        bandwidth = within
        if cost.between:
            assert machine.inter_bandwidth is not None, "checked by Machine.lacks"
            share = machine.inter_bandwidth * local / self._per_node
            bandwidth = share if self.messages else min(within, share)
        return cost._replace(transfer=cost.transfer / (GIGA * bandwidth))

    def _span(self, dimension: str, ranks: int) -> tuple[int, int]:
        """Return the most ranks of a group in one node, and the number of nodes that it is on."""
        key = dimension, ranks
        if key not in self._spans:
            nodes = [rank // self._per_node for rank in next(self._grid.groups(dimension, ranks))]
            self._spans[key] = max(map(nodes.count, set(nodes))), len(set(nodes))
        return self._spans[key]
