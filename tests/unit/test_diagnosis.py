"""From reports to one message."""

from __future__ import annotations

from collections import deque

import pytest

from zerolite.comm import flight_recorder
from zerolite.diagnostics.diagnosis import Absent, diagnose, first_difference
from zerolite.diagnostics.stack_report import StackReport

NAME = "gathers of parameters"


def at(rank: int, **fields: object) -> StackReport:
    base = {
        "host": f"host{rank}", "process": 100 + rank, "call": "engine.backward()", "line": "train.py:40, in main",
        "inside": "", "module": "", "step": 3, "stack": "  File train.py\n",
        "waits_for": "all_gather for parameters 'a' (4 float32 on each rank)",
    }  # fmt: skip
    return StackReport(rank, **{**base, **fields})  # type: ignore[arg-type]


def test_ranks_in_the_same_place_share_a_line_and_a_stack() -> None:
    text = diagnose("Why.", [at(rank) for rank in range(64)], {})
    assert text.startswith("Why.\n\nWhere the ranks are:\n  ranks 0-63: step 3, in engine.backward()")
    assert text.count("Stack of") == 1
    assert "the messages between them do not get through" in text and "NCCL_SOCKET_IFNAME" in text


def test_the_first_difference_is_the_first_even_if_ranks_remember_other_lengths() -> None:
    short = [(number, f"c{number}") for number in range(90, 101)]
    long = [(number, f"c{number}") for number in range(60, 98)] + [(98, "other"), (99, "c99")]
    (parted,) = first_difference([at(0, collectives={NAME: short}), at(1, collectives={NAME: long})])
    assert parted.sentence == (
        f"They diverge at collective number 98 of the {NAME}: rank 0: c98; rank 1: other (the one before, c97, was the "
        "same)."
    )


def test_what_has_not_come_yet_is_no_entry() -> None:
    ahead, behind = [(1, "c1"), (2, "c2")], [(1, "c1")]
    text = diagnose("", [at(rank, collectives={NAME: seen}) for rank, seen in enumerate((ahead, behind, ahead))], {})
    assert "number 2 of the gathers of parameters: ranks 0 and 2: c2; rank 1: nothing so far" in text


def test_equal_sequences_and_uses_of_different_steps_have_no_difference() -> None:
    same = {NAME: [(1, "c1"), (2, "c2")]}
    assert first_difference([at(0, collectives=same), at(1, collectives=same)]) == []
    assert first_difference([at(0), at(1)]) == []
    one = at(0, executions=[(1, "'a' entered")], schedule_step=7)
    other = at(1, executions=[(1, "'b' entered")], schedule_step=8)
    assert first_difference([one, other]) == []
    assert "leaf_modules" not in diagnose("Why.", [one, other], {})


def test_ranks_in_different_calls_and_steps() -> None:
    metric = at(1, call="engine.reduce()", waits_for="all_gather for metrics")
    text = diagnose("Why.", [at(0), metric], {})
    assert "rank 1 called engine.reduce(), and the others did not: they are in engine.backward()" in text
    forward = at(1, call="the forward", waits_for="all_gather for parameters 'b'")
    assert "(engine.backward(), the forward)" in diagnose("Why.", [at(0), forward], {})
    later = at(1, call="the forward", step=5)
    assert "rank 1 is ahead" in diagnose("Why.", [at(0), later], {})


def test_ranks_in_different_engines() -> None:
    text = diagnose("Why.", [at(0, engine="engine 1"), at(1, engine="engine 2"), at(2, engine="engine 1")], {})
    assert "they are ranks 0 and 2 in engine 1 and rank 1 in engine 2" in text


def test_a_collective_of_torch_on_one_rank() -> None:
    stack = '  File "/x/torch/distributed/distributed_c10d.py", line 4800, in barrier\n'
    alone = at(0, call="", line="train.py:7, in main", waits_for="", stack=stack)
    assert "rank 0 called torch.distributed.barrier at train.py:7" in diagnose("Why.", [alone, at(1)], {})


def test_other_orders_are_not_the_networks_fault() -> None:
    one, other = at(0, collectives={NAME: [(1, "a")]}), at(1, collectives={NAME: [(1, "b")]})
    text = diagnose("Why.", [one, other], {})
    assert "launch their collectives in different orders" in text and "network" not in text


def test_ranks_that_do_not_answer() -> None:
    text = diagnose("Why.", [at(0)], {1: Absent(last="in step 3, 40 s ago"), 2: Absent(last="in step 3, 40 s ago")})
    assert "ranks 1 and 2: no answer, last seen in step 3, 40 s ago: dead, or stuck outside of Python" in text
    assert "ranks 1 and 2 died" in text
    text = diagnose("Why.", [at(0)], {1: Absent()})
    assert "not yet in zerolite.initialize()" in text
    text = diagnose("Why.", [at(0), at(2)], {1: Absent(ended="ended normally after step 2")})
    assert "uneven batches: rank 1 came to the end" in text and "docs/uneven-data.md" in text
    text = diagnose("Why.", [at(0)], {1: Absent(ended="ended with ValueError: x after step 2")})
    assert "rank 1 ended with an exception" in text


def test_an_exception_explains_more_than_a_normal_end() -> None:
    absent = {1: Absent("ended with ValueError: bad data after step 3"), 2: Absent("ended normally after step 3")}
    assert "rank 1 ended with an exception" in diagnose("Why.", [at(0)], absent)


def test_a_marked_function_is_itself() -> None:
    def gather() -> int:
        return 7

    assert flight_recorder.collective(gather) is gather
    assert gather.is_collective  # type: ignore[attr-defined]


def test_a_debug_run_says_in_which_call_the_ranks_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "_RECORDS_CALLS", True)
    monkeypatch.setattr(flight_recorder, "_calls", deque(maxlen=4))

    @flight_recorder.collective
    def save(step: int) -> int:
        return step

    assert [save(step) for step in range(6)] == list(range(6))
    calls = flight_recorder.latest_calls()
    name = "tests.unit.test_diagnosis.test_a_debug_run_says_in_which_call_the_ranks_part.<locals>.save"
    assert calls == [(number, name) for number in (3, 4, 5, 6)]
    reports = [at(0, calls=calls), at(1, calls=[*calls[:-1], (6, "engine.engine.Engine.step")])]
    text = diagnose("Why.", [StackReport.from_json(report.to_json()) for report in reports], {})
    assert f"They diverge at call number 6 that all ranks make: rank 0: {name}; rank 1: engine.engine" in text
