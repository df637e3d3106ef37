"""Agreement of ranks on the host: few messages, whatever their number."""

from __future__ import annotations

from zerolite.comm import dry_topology, record
from zerolite.pipe.runner import READY, StepBarrier


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
