"""Data-parallel ranks whose shards have replicas: groups made by hand, for an engine that is made as usual."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from zerolite.comm import Communicator, Topology, create_communicator, topology
from zerolite.comm.process_group import SECOND_GROUP

CPU = torch.device("cpu")
PAIRS = {"shard": [[0, 1], [2, 3]], "replicate": [[0, 2], [1, 3]]}


@functools.cache  # groups live as long as the worker, like those of the grid
def _group(name: str) -> dist.ProcessGroup:
    return dist.new_subgroups_by_enumeration(PAIRS[name], group_desc=SECOND_GROUP)[0]


def _communicator(name: str) -> Communicator:
    return create_communicator(CPU, _group(name)).serve(name, dist.get_rank() == 0)


@contextlib.contextmanager
def two_replicas() -> Iterator[None]:
    """Context in which engines of four ranks split their states over two, of which there are two pairs."""
    data_topology = topology.data_topology

    def replicated(comm: Communicator) -> Topology:
        pairs = {name: _communicator(name) for name in PAIRS}
        return dataclasses.replace(data_topology(comm), **pairs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "data_topology", replicated)
        yield
