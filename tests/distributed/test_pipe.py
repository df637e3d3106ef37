"""Pipelines against plain PyTorch on the joint batch: losses, norms and parameters; what is sent; what goes wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.toolkit.pool import Pools
from zerolite.pipe.schedules import available_schedules

CASES = "tests.distributed.cases.pipe"
RELATIVE = 1e-6  # fp32: only the order differs in which micro-batches are summed
HALF = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # a flip of the last place, in what a step's sums come from


def run(pools: Pools, world: int, function: str, **kwargs: Any) -> list[Any]:
    return pools(world).run(f"{CASES}:{function}", kwargs, timeout=180)


def assert_matches(results: list[dict[str, Any]], relative: float = RELATIVE) -> None:
    names = set()
    for result in results:
        assert result["losses"] == results[0]["losses"] and result["norms"] == results[0]["norms"]
        assert result["losses"] == pytest.approx(result["wanted_losses"], rel=relative)
        assert result["norms"] == pytest.approx(result["wanted_norms"], rel=relative)
        for evaluated, wanted in result["evals"]:
            assert evaluated == pytest.approx(wanted, rel=relative)
        for name, value in result["parameters"].items():
            torch.testing.assert_close(value, result["wanted"][name], rtol=relative, atol=relative)
        names |= set(result["parameters"])
    assert names == set(results[0]["wanted"])


@pytest.mark.slow
@pytest.mark.parametrize("sequential", [False, True])
def test_layers_with_buffers_alone(pools: Pools, sequential: bool) -> None:
    results = run(pools, 2, "train", kind="buffers", sequential=sequential)
    assert_matches(results)
    found = {name: value for result in results for name, value in result["buffers"].items()}
    assert set(found) == set(results[0]["wanted_buffers"])
    for name, value in found.items():
        torch.testing.assert_close(value, results[0]["wanted_buffers"][name])


def sent(result: dict[str, Any]) -> Counter[tuple[str, str]]:
    return Counter((op, tag) for op, tag, _ in result["calls"])


# -------------------------------------------------------------------- the same numbers


def test_a_tied_model_on_two_stages(pools: Pools) -> None:
    results = run(pools, 2, "train", kind="tied", lengths=(3, 5))
    assert_matches(results)
    assert results[0]["micro_steps"] == 4 * 4
    for result, others in zip(results, reversed(results), strict=True):
        assert {name.split(".")[1] for name in result["parameters"]} & {
            name.split(".")[1] for name in others["parameters"]
        } == {"0"}
        # One message for each micro-batch and direction, and nothing else but two exchanges on the host, the loss, the
        # norm and the gradient of what is shared.
        assert sent(result) == {
            ("send", "pipe"): 4,
            ("receive", "pipe"): 4,
            ("all_reduce", "control"): 2,
            ("all_reduce", "loss"): 1,
            ("all_reduce", "stats"): 1,
            ("all_reduce", "shared_gradients"): 1,
        }


def test_two_pipelines_meet_along_each_dimension(pools: Pools) -> None:
    results = run(pools, 4, "train", kind="blocks", steps=1)
    assert_matches(results)
    for result in results:
        assert result["met"] == [("pipe", 2), ("data", 2)] * 2


def test_a_model_divided_by_names(pools: Pools) -> None:
    results = run(pools, 2, "train_named", kind="TiedGpt", other_seed=True, mine=True)
    assert_matches(results)
    assert "positions" not in results[1]["parameters"] and "embed.weight" in results[1]["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", available_schedules())
@pytest.mark.parametrize("kind", ["blocks", "tied", "pairs"])
def test_schedules(pools: Pools, schedule: str, kind: str) -> None:
    method = "uniform" if kind == "pairs" else "parameters"
    results = run(pools, 2, "train", kind=kind, schedule=schedule, pipeline={"partition_method": method})
    assert_matches(results)
    if schedule in ("gpipe", "1f1b") and kind != "pairs":
        assert all(sent(result)["send", "pipe"] == sent(result)["receive", "pipe"] == 4 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {"kind": "modules", "sequential": True, "lengths": (3, 5, 2)}),
        (2, {"kind": "tied", "zero": 1}),
        (2, {"kind": "tied", "pipeline": {"activation_checkpoint_interval": 2}}),
        (2, {"kind": "blocks", "pipeline": {"partition_method": "type:block"}}),
        (2, {"kind": "blocks", "schedule": "zero_bubble", "pipeline": {"chunks": 1}}),
        (2, {"kind": "blocks", "schedule": "gpipe", "micro_batches": 1}),
        (2, {"kind": "tied", "stages": 1}),
        (4, {"kind": "tied", "stages": 4}),
        (4, {"kind": "tied", "stages": 4, "schedule": "gpipe", "micro_batches": 3}),
        (4, {"kind": "tied", "zero": 1}),
        (4, {"kind": "tied", "zero": 1, "schedule": "interleaved_1f1b", "lengths": (3, 4)}),
        (4, {"kind": "tied", "zero": 1, "schedule": "zbv"}),
        (4, {"kind": "blocks", "zero": 0, "schedule": "zero_bubble"}),
        (3, {"kind": "tied", "stages": 3, "micro_batches": 5}),
    ],
)
def test_grids_and_options(pools: Pools, world: int, settings: dict[str, Any]) -> None:
    assert_matches(run(pools, world, "train", **settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {"kind": "Checkpointed"}),
        (2, {"kind": "Checkpointed", "schedule": "zbv"}),
        (2, {"kind": "Opened"}),
        (2, {"kind": "Normed"}),
        (2, {"kind": "Caching"}),
        (2, {"kind": "TiedGpt", "schedule": "interleaved_1f1b"}),
        (2, {"kind": "TiedGpt", "schedule": "zero_bubble", "pipeline": {"split": ["blocks.1", "blocks.2", "head"]}}),
        (2, {"kind": "example", "loss": True}),
        (2, {"kind": "gpt2"}),
        (2, {"kind": "llama", "mine": True}),
        (2, {"kind": "llama", "schedule": "zero_bubble"}),
        (4, {"kind": "TiedGpt", "stages": 4}),
        (4, {"kind": "TiedGpt", "zero": 1}),
        (4, {"kind": "gpt2", "zero": 1, "schedule": "interleaved_1f1b"}),
    ],
)
def test_divided_models(pools: Pools, world: int, settings: dict[str, Any]) -> None:
    if settings["kind"] in ("gpt2", "llama"):
        pytest.importorskip("transformers")
    results = run(pools, world, "train_named", **settings)
    assert_matches(results)
    whole, wanted = results[0]["whole"], results[0]["wanted_whole"]
    assert set(whole) == set(wanted)
    for name, value in whole.items():  # buffers too
        torch.testing.assert_close(value, wanted[name], rtol=RELATIVE, atol=RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_half_precision(pools: Pools, precision: str, schedule: str) -> None:
    results = run(pools, 2, "train_half", precision=precision, schedule=schedule)
    assert_matches(results, HALF[precision])
    assert results[0]["dtypes"] == [{"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]]


# -------------------------------------------------------------------- what is held, and what comes out


@pytest.mark.slow
def test_activations_go_with_their_backward(pools: Pools) -> None:
    assert run(pools, 2, "in_flight", schedule="1f1b") == [2, 1]
    assert run(pools, 2, "in_flight", schedule="gpipe") == [6, 6]
    assert run(pools, 2, "in_flight", schedule="1f1b", evaluate=True) == [1, 1]
    assert run(pools, 4, "in_flight", schedule="1f1b") == [4, 3, 2, 1]


@pytest.mark.slow
def test_what_eval_batch_gives(pools: Pools) -> None:
    (loss, *nothing), (same, *something) = run(pools, 2, "outputs")
    assert loss == same and nothing == [True, True] and something == [False, False]


@pytest.mark.slow
def test_parameters_are_asked_for_too_early(pools: Pools) -> None:
    for said in run(pools, 2, "before_initialize"):
        assert "2 ranks" in said and "num_stages=1" in said


# -------------------------------------------------------------------- failures


def test_a_layer_that_fails_is_known_everywhere_and_the_next_step_is_right(pools: Pools) -> None:
    first, second = run(pools, 2, "fail", where=1)
    assert first[0] == "FileNotFoundError: the layer has lost its file"
    assert second[0] == "RuntimeError: engine.train_batch: rank 0 failed: " + first[0]
    late, _ = run(pools, 2, "fail", where=1, at=99)
    assert first[1:] == second[1:] and len(late) == 3
    assert first[1] != late[1]  # it missed a step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "settings", "rank", "step"),
    [
        (2, {"where": 3, "at": 6}, 1, 1),
        (2, {"where": 0, "at": 2, "schedule": "gpipe"}, 0, 0),
        (2, {"where": 2, "at": 3, "schedule": "zbv"}, 1, 0),
        (2, {"where": 1, "at": 1, "schedule": "interleaved_1f1b"}, 1, 0),
        (2, {"where": 1, "backward": True}, 0, 0),
        (2, {"where": 2, "backward": True, "schedule": "zero_bubble"}, 0, 0),
        (4, {"where": 2, "at": 2}, 2, 0),
    ],
)
def test_failures(pools: Pools, world: int, settings: dict[str, Any], rank: int, step: int) -> None:
    said = run(pools, world, "fail", **settings)
    assert said[rank][step].startswith("FileNotFoundError")
    for other in set(range(world // 2)):
        assert said[other][step].startswith(
            ("FileNotFoundError", f"RuntimeError: engine.train_batch: rank {rank} failed")
        )
    for lines in said:
        assert lines[step + 1 :] == said[0][step + 1 :] or settings.get("backward")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_iterators_that_end(pools: Pools, world: int) -> None:
    for said in run(pools, world, "starve", rank=0, have=2):
        assert said.startswith("RuntimeError") and "none any more on rank 0" in said
    for said in run(pools, world, "starve", rank=-1, have=2):
        assert said.startswith("StopIteration")
    *others, last = run(pools, world, "starve", rank=world - 1, have=1, raises=True)
    assert last == "FileNotFoundError: no more shards"
    for said in others:
        assert last in said and f"rank {world - 1}" in said


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("what", "said"), [("values", "other values"), ("shapes", "other shapes"), ("length", "(5, 6)")]
)
def test_stages_read_the_same_data(pools: Pools, what: str, said: str, world: int) -> None:
    """The last rank reads other data; in two pipelines those of the other one are told, too."""
    for sentence in run(pools, world, "differ", what=what):
        assert said in sentence and sentence.startswith(("RuntimeError", "ValueError"))
        assert what == "length" or f"on rank {world - 1} than on rank {world // 2 - 1}" in sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "Skips"}, ["'stem.bias'", "part 0", "'blocks.2'", "skip connection"]),
        ({"kind": "TiedGpt", "pipeline": {"split": ["blocks.7"]}}, ["'blocks.7'", "did you mean blocks.3"]),
        ({"kind": "TiedGpt", "pipeline": {"split": ["blocks.1.up"]}}, ["blocks.0.down.bias", "blocks.1.up"]),
        ({"kind": "TiedGpt", "pipeline": {"split": ["blocks"]}}, ["'blocks'", "called by itself"]),
        ({"kind": "module", "pipeline": {"split": ["layers.2"]}}, ["pipeline.split", "PipelineModule"]),
        ({"kind": "three stages"}, ["num_stages = 2", "got 3"]),
        ({"kind": "broken"}, ["could not be divided", "in_features"]),
        ({"kind": "frozen", "pipeline": {"partition_method": "uniform"}}, ["trained parameter"]),
        ({"kind": "module", "micro_batches": 1}, ["got 1 (", "'1f1b'"]),
        ({"kind": "module", "pipeline": {"schedule": "interleaved_1f1b", "chunks": 4}}, ["= 8", "got 6"]),
    ],
)
def test_what_cannot_be_a_pipeline(pools: Pools, settings: dict[str, Any], said: list[str]) -> None:
    for sentence in run(pools, 2, "refuse", **settings):
        assert all(part in sentence for part in said), sentence
