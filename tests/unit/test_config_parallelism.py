"""The blocks tensor_parallel and pipeline: what is read, and what contradicts what."""

from __future__ import annotations

from typing import Any

import pytest

from zerolite.config import ConfigError, load_config

PIPE = {"stages": 2}


def errors_of(source: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return dict(caught.value.errors)


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
    "plan", [3, [], {}, {"a": 3}, {"a": {"parts": 3}}, {"a": {"style": "column", "part": 3}}, {3: "column"}, "column"]
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
    assert '"parameters", "uniform", "profile" or "type:REGEX"' in sentence
    for written, meant in (("Uniform", "uniform"), ("type:Block|Head", "type:Block|Head")):
        assert load_config({"pipeline": {"partition_method": written}}).pipeline.partition_method == meant


@pytest.mark.parametrize(
    ("source", "path", "said"),
    [
        ({"pipeline": PIPE, "zero_optimization": {"stage": 2}}, "zero_optimization.stage", "once for every micro-b"),
        ({"pipeline": PIPE, "zero_optimization": {"stage": 3}}, "zero_optimization.stage", "gather all parameters"),
        ({"pipeline": {**PIPE, "chunks": 2}}, "pipeline.chunks", 'expected 1 with pipeline.schedule = "1f1b"'),
        ({"pipeline": {**PIPE, "chunks": 1, "schedule": "interleaved_1f1b"}}, "pipeline.chunks", "expected 2 or more"),
        ({"pipeline": {**PIPE, "chunks": 3, "schedule": "zbv"}}, "pipeline.chunks", "expected 2 with"),
        ({"pipeline": {**PIPE, "split": ["a", "b"]}}, "pipeline.split", "expected 1 name"),
        ({"pipeline": {**PIPE, "split": ["a"], "schedule": "interleaved_1f1b"}}, "pipeline.split", "expected 3 names"),
        ({"tensor_parallel": {"size": 2, "autotp_size": 4}}, "tensor_parallel.autotp_size", "leave one of the two"),
        (
            {
                "tensor_parallel": {"size": 2},
                "elasticity": {"enabled": True, "micro_batch_sizes": [2], "max_train_batch_size": 8},
            },
            "elasticity.enabled",
            "takes 2 ranks",
        ),
        (
            {
                "tensor_parallel": {"size": 2, "sequence_parallel": True},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            },
            "zero_optimization.offload_optimizer.device",
            "tensor_parallel.sequence_parallel",
        ),
    ],
)
def test_contradictions(source: dict[str, Any], path: str, said: str) -> None:
    errors = errors_of(source)
    assert list(errors) == [path]
    assert said in errors[path]


def test_chunks_follow_the_schedule() -> None:
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 2), ("dualpipev", 2)):
        assert load_config({"pipeline": {**PIPE, "schedule": schedule}}).pipeline.chunks_per_rank == chunks
    assert load_config({"pipeline": {**PIPE, "schedule": "zero_bubble", "chunks": 1}}).pipeline.chunks_per_rank == 1
