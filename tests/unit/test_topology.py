"""The grid of ranks, in numbers; groups of real processes are in tests/distributed/test_grid.py."""

from __future__ import annotations

import pytest
import torch

from zerolite.comm import create_topology, dry_topology
from zerolite.comm.topology import place


@pytest.mark.parametrize("world,pipe,tensor", [(1, 1, 1), (8, 2, 2), (12, 3, 2), (4, 1, 4), (6, 6, 1)])
def test_every_rank_has_a_place_of_its_own(world: int, pipe: int, tensor: int) -> None:
    places = [place(rank, world, pipe, tensor) for rank in range(world)]
    data = world // pipe // tensor
    assert places == [(p, d, t) for p in range(pipe) for d in range(data) for t in range(tensor)]


def test_the_docstrings_picture() -> None:
    topology = dry_topology("nccl", 5, 8, pipe=2, tensor=2)
    assert topology.place == (1, 0, 1)
    assert [c.world_size for c in (topology.world, topology.data, topology.tensor, topology.pipe, topology.model)] == [
        8,
        2,
        2,
        2,
        4,
    ]
    assert topology.model.rank == 3 and not topology.trivial
    assert [c.dimension for c in (topology.data, topology.tensor, topology.pipe, topology.model)] == [
        "data",
        "tensor",
        "pipe",
        "model",
    ]


def test_sizes_that_do_not_divide() -> None:
    world = dry_topology("nccl", 0, 6).world
    with pytest.raises(ValueError, match=r"multiple of pipeline.stages × tensor_parallel.size, got 6 .* 2 × 2 = 4"):
        create_topology(world, torch.device("cpu"), pipe=2, tensor=2)
