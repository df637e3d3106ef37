"""Plans of tensor parallelism: the arithmetic of grids, and plans against real runs."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.planning.jobs import planned
from tests.planning.test_plan_is_right import MEASURED, assert_right
from tests.toolkit.pool import Pools
from zerolite.config import ConfigError
from zerolite.planning.make import plan
from zerolite.planning.result import PlanError
from zerolite.planning.traffic import Grid, between_nodes, summarize

# -------------------------------------------------------------------- arithmetic


def leaving(grid: Grid, nodes: int, dimension: str, ranks: int, op: str = "all_gather", moves: int = 0) -> Fraction:
    """Return the share of what a collective sends that leaves the nodes."""
    groups = grid.groups(dimension, ranks)
    return sum(
        (sum(between_nodes(op, moves, group, grid.world_size // nodes), Fraction()) for group in groups), Fraction()
    ) / Fraction(grid.world_size)


def test_which_part_leaves_the_node() -> None:
    grid = Grid(data=2, tensor=4)
    assert grid.groups("tensor", 4) == grid.groups("model", 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert grid.groups("data", 2) == [[0, 4], [1, 5], [2, 6], [3, 7]] and grid.groups("world", 8) == [list(range(8))]
    assert leaving(grid, 1, "tensor", 4) == leaving(grid, 2, "tensor", 4) == 0
    assert leaving(grid, 4, "tensor", 4) == Fraction(1, 2)  # 2 ranks a node: every other link
    assert (leaving(grid, 1, "data", 2), leaving(grid, 2, "data", 2)) == (0, 1)
    assert leaving(Grid(data=8), 2, "data", 8) == Fraction(1, 4)
    sets = Grid(data=8)
    assert list(sets.groups("shard", 4)) == list(sets.groups("expert", 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(sets.groups("replicate", 2)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert list(sets.groups("expert data", 4)) == list(sets.groups("data", 4)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert (leaving(sets, 2, "shard", 4), leaving(sets, 2, "replicate", 2)) == (0, 1)
    # Of 7 others of an all-to-all 4 are on the other node. One of 4 keys and values leaves it, and swapped halves all.
    assert leaving(sets, 2, "expert", 8, "all_to_all") == Fraction(4, 7)
    rings = Grid(data=16, sequence=8)
    assert list(rings.groups("ring", 4))[:3] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14]]
    assert leaving(rings, 4, "ring", 4, "permute", moves=1) == Fraction(1, 2)
    assert leaving(rings, 4, "ring", 4, "permute", moves=2) == leaving(rings, 4, "ring", 4, "permute") == 1


def call(op: str, tag: str, nbytes: int, dimension: str = "data", ranks: int = 8) -> Any:
    return SimpleNamespace(op=op, tag=tag, nbytes=nbytes, dimension=dimension, ranks=ranks, unaligned=0, moves=1)


@pytest.mark.parametrize(
    ("op", "nbytes", "dimension", "ranks", "sent", "between"),
    [("all_reduce", 1000, "tensor", 4, 1500, 0), ("all_reduce", 80, "data", 2, 80, 80),
     ("all_reduce", 80, "world", 8, 140, 35)],
)  # fmt: skip
def test_traffic_by_dimension(op: str, nbytes: int, dimension: str, ranks: int, sent: int, between: int) -> None:
    (row,) = summarize([call(op, "tag", nbytes, dimension, ranks)], Grid(2, 4), 2)
    assert (row.op, row.dimension, row.sent, row.inter_node) == (op, dimension, sent, between)


# -------------------------------------------------------------------- plans


TENSOR = {"tensor_parallel": {"size": 2}}


PEAK = 0.03
"""When a bucket goes relative to what the model allocates depends on the other ranks, by a bucket or two."""
REST = 0.05
"""The profiler misses what threads of gloo release, by a tensor or two."""


REAL: dict[str, tuple[int, str, dict[str, Any]]] = {  # ranks, job and settings
    "tensor, stage 0": (4, "even gpt", {"stage": 0, **TENSOR}),
    "tensor, stage 1": (2, "even gpt", {"stage": 1, **TENSOR}),
    "tensor, stage 2": (4, "even gpt", {"stage": 2, **TENSOR}),
    "tensor, stage 3": (4, "even gpt", {"stage": 3, **TENSOR}),
    "tensor, 16 bits": (2, "even gpt", {"stage": 1, "precision": "bf16", "accumulation": 2, **TENSOR}),
    "sequence parallelism": (2, "even gpt", {"stage": 1, "tensor_parallel": {"size": 2, "sequence_parallel": True}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REAL)
def test_a_plan_of_a_grid_is_right(pools: Pools, case: str) -> None:
    """Plans of all ranks against a real run."""
    world, kind, setting = REAL[case]
    ranks = pools(world).run(MEASURED, {"kind": kind, "buckets": "small", **setting}, timeout=180)
    for rank, measured in enumerate(ranks):
        assert_right(planned(kind, world, rank, buckets="small", **setting), measured, PEAK, rest=REST)


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def small(**blocks: Any) -> dict[str, Any]:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    return {**sizes, "optimizer": {"type": "Adam"}, **blocks}


@pytest.mark.slow
def test_what_cannot_be_planned_is_said() -> None:
    with pytest.raises(ConfigError, match="got 4 processes for 1 × 3 = 3"):
        plan(stack, small(tensor_parallel={"size": 3}), 4)
    with pytest.raises(PlanError, match="without a pipeline, got pipeline.stages 2: plan the layers of one stage"):
        plan(stack, small(pipeline={"stages": 2}), 4)
