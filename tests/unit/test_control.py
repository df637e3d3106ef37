"""Agreement of ranks on the host: few messages, whatever their number."""

from __future__ import annotations

import pytest

from zerolite.comm import dry_topology, record
from zerolite.comm.control import rounds
from zerolite.pipe.runner import READY, StepBarrier


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7, 8, 12, 1000])
def test_every_rank_learns_the_largest_number_in_log2_rounds(world: int) -> None:
    plans = [rounds(rank, world) for rank in range(world)]
    most = (world - 1).bit_length()
    known = [rank * 7919 % 1009 for rank in range(world)]
    largest = max(known)
    for k in range(most):
        for rank, plan in enumerate(plans):
            to, source = plan[k]
            assert plans[to][k][1] == rank and plans[source][k][0] == rank  # every message is waited for
        known = [max(own, known[plan[k][1]]) for own, plan in zip(known, plans, strict=True)]
    assert known == [largest] * world and all(len(plan) == most for plan in plans)


def test_a_pipeline_step_meets_in_no_group_of_all_ranks() -> None:
    for pipe, tensor, groups in (
        (4, 1, [("pipe", 4), ("data", 256)]),
        (2, 2, [("pipe", 2), ("tensor", 2), ("data", 256)]),
    ):
        meeting = StepBarrier(dry_topology("nccl", 5, 1024, pipe=pipe, tensor=tensor))
        with record() as recorder:
            meeting.begin("train_batch", READY, None, 1, 2)
            meeting.end("train_batch", None)
        assert [(call.dimension, call.ranks) for call in recorder.calls] == groups * 2
        assert {call.numel for call in recorder.calls} <= {1, 3, 6}
