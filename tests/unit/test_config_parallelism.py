"""The blocks tensor_parallel and pipeline: what is read. Contradictions are in test_config_errors.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.toolkit.config_errors import errors_of
from zerolite.config import load_config

PIPE = {"stages": 2}


def test_deepspeeds_names() -> None:
    config = load_config(
        {
            "tensor_parallel": {"autotp_size": 4, "dtype": "bf16", "tp": {"tp_size": 1}},
            "pipeline": {"stages": "auto", "partition": "best", "seed_layers": False, "pipe_partitioned": True},
        }
    )
    assert config.tensor_parallel.ranks == 4 and config.tensor_parallel.plan == "auto"
    assert config.pipeline.stages == 1 and config.model_ranks == 4
    assert load_config({"tensor_parallel": None, "pipeline": None}).model_ranks == 1


@pytest.mark.parametrize(
    "plan", [3, [], {}, {"a": 3}, {"a": {"parts": 3}}, {"a": {"style": "column", "part": 3}}, "column"]
)
def test_what_is_no_plan(plan: Any) -> None:
    assert list(errors_of({"tensor_parallel": {"size": 2, "plan": plan}})) == ["tensor_parallel.plan"]


def test_a_plan_is_frozen() -> None:
    plan = load_config({"tensor_parallel": {"plan": {"a": {"style": "column"}}}}).tensor_parallel.plan
    for part in (plan, plan["a"]):
        with pytest.raises(TypeError, match="frozen"):
            part["b"] = "row"


@pytest.mark.parametrize("value", ["best", "types:x", 3, None, ""])
def test_partition_methods(value: Any) -> None:
    sentence = errors_of({"pipeline": {"partition_method": value}})["pipeline.partition_method"]
    assert '"parameters", "uniform" or "type:REGEX"' in sentence
    for written, meant in (("Uniform", "uniform"), ("type:Block|Head", "type:Block|Head")):
        assert load_config({"pipeline": {"partition_method": written}}).pipeline.partition_method == meant


def test_chunks_follow_the_schedule() -> None:
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 2), ("dualpipev", 2)):
        assert load_config({"pipeline": {**PIPE, "schedule": schedule}}).pipeline.chunks_per_rank == chunks
    assert load_config({"pipeline": {**PIPE, "schedule": "zero_bubble", "chunks": 1}}).pipeline.chunks_per_rank == 1
