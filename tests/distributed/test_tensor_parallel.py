"""Layers that are cut against the same layers whole: losses, gradients, random numbers, and what is sent."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.toolkit.pool import CaseFailed, Pools

CASES = "tests.distributed.cases.tensor_parallel"
LOGITS = "tests.distributed.cases.tensor_parallel_logits"

# fp32: a sum in parts rounds differently; a few units in the last place (6e-8), which backward carries on.
LOSS = 1e-6
GRADIENTS = 2e-6

slow = pytest.mark.slow
library = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


def check(results: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks have the same loss, that of the whole model, and their parts of its gradients."""
    assert len({result["value"] for result in results}) == 1
    for result in results:
        assert result["loss"] <= LOSS
        assert {name: off for name, off in result["gradients"].items() if off > GRADIENTS} == {}
    return results[0]


def calls(result: dict[str, Any], when: str) -> dict[str, int]:
    assert {tag for _, tag in result[when]} <= {"tensor"}
    return {op: count for (op, _), count in result[when].items()}


LAYERS = 2
VOCABULARY = 2  # of cross entropy: the largest logits, and the sums


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("vocabulary", [64, pytest.param(67, marks=slow)])
def test_the_example(pools: Pools, world: int, vocabulary: int) -> None:
    result = check(pools(world).run(f"{CASES}:gpt", {"vocabulary": vocabulary}))
    assert calls(result, "forward") == {"all_reduce": 2 * LAYERS + VOCABULARY}
    assert calls(result, "backward") == {"all_reduce": 2 * LAYERS + 1}  # and the head's input
    assert "head.weight" in result["cut"] and len(result["cut"]) == 6 * LAYERS + 1


@slow
def test_one_rank_is_the_model_itself(pools: Pools) -> None:
    (result,) = pools(1).run(f"{CASES}:gpt")
    assert result["loss"] == 0 and not any(result["gradients"].values()) and not result["cut"]
    assert not result["forward"] and not result["backward"]


@pytest.mark.parametrize("world", [pytest.param(2, marks=slow), pytest.param(4, marks=slow)])
def test_the_sequence_in_parts(pools: Pools, world: int) -> None:
    """Each all-reduce is two halves. Besides, the hidden states are cut once and made whole once."""
    result = check(pools(world).run(f"{CASES}:gpt", {"sequence_parallel": True}))
    halves = {"all_gather": 2 * LAYERS + 1, "reduce_scatter": 2 * LAYERS}
    assert calls(result, "forward") == {**halves, "all_reduce": VOCABULARY}
    assert calls(result, "backward") == {**halves, "all_reduce": 1}


@slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["nano", "separate", "fused", "norms"])
def test_ways_of_writing_a_block(pools: Pools, kind: str, tied: bool, sequence_parallel: bool) -> None:
    """nanoGPT's; query, key and value in layers of their own, grouped; fused; norms of heads. An embedding and a head
    with padding_idx, an odd vocabulary and a bias, or one weight."""
    given = {"kind": kind, "tied": tied, "sequence_parallel": sequence_parallel}
    result = check(pools(2).run(f"{CASES}:blocks", given))
    assert ("embed.weight" in result["cut"]) == tied
    rows = 2 if kind == "nano" else 4  # attention alone, or with a feed-forward layer
    backward = calls(result, "backward")
    assert backward["reduce_scatter" if sequence_parallel else "all_reduce"] == (
        rows if sequence_parallel else rows + 1
    )


@slow
def test_more_ranks_than_groups_of_heads(pools: Pools) -> None:
    check(pools(4).run(f"{CASES}:blocks", {"kind": "separate", "kv_heads": 4}))
    for kind in ("separate", "fused", "norms"):
        for sequence_parallel in (False, True):
            given = {"kind": kind, "kv_heads": 2, "sequence_parallel": sequence_parallel}
            check(pools(4).run(f"{CASES}:blocks", given))


@slow
def test_the_embedding_cut_alone_and_the_head_alone(pools: Pools) -> None:
    plan = {"blocks.*.c_attn": "column", "blocks.*.c_proj": "row"}
    for extra in ({"embed": "vocab"}, {"head": "vocab"}, {"head": "colwise_gather_output"}, {}):
        given = {"kind": "nano", "plan": {**plan, **extra}, "vocabulary": 38}
        check(pools(2).run(f"{CASES}:blocks", given))


@library
@slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "GPT2", "Gemma2", "Mixtral", "GPTNeoX"])
def test_models_of_hugging_face(pools: Pools, family: str, tied: bool, sequence_parallel: bool) -> None:
    given = {"family": family, "tied": tied, "sequence_parallel": sequence_parallel}
    result = check(pools(2).run(f"{CASES}:hugging_face", given, timeout=180.0))
    embedding = any("embed" in name or "wte" in name for name in result["cut"])
    cuts = 2 if family != "Mixtral" else 1  # experts stay whole
    counted = calls(result, "backward")
    assert counted["all_reduce"] == 1 + (0 if sequence_parallel else cuts * LAYERS)
    forward = calls(result, "forward")["all_reduce"]
    assert forward == VOCABULARY + embedding + (0 if sequence_parallel else cuts * LAYERS)


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=slow), pytest.param(4, marks=slow)])
def test_layers_by_themselves(pools: Pools, world: int) -> None:
    for found in pools(world).run(f"{CASES}:direct_layers"):
        assert {name: off for name, off in found.items() if off > LOSS} == {}
        assert len(found) >= 32


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=slow), pytest.param(4, marks=slow)])
def test_cross_entropy(pools: Pools, world: int) -> None:
    """All options, dtypes, and vocabularies of which some ranks have nothing."""
    for found in pools(world).run(f"{CASES}:cross_entropies"):
        assert {name: off for name, off in found.items() if off > LOSS} == {}


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=slow), pytest.param(4, marks=slow)])
def test_what_is_done_with_logits(pools: Pools, world: int) -> None:
    for found in pools(world).run(f"{LOGITS}:operations"):
        assert {name: off for name, off in found.items() if off > LOSS} == {}


@slow
def test_writes_to_logits_that_would_be_lost(pools: Pools) -> None:
    for messages in pools(2).run(f"{LOGITS}:refusals"):
        assert [message.split(" on ")[0] for message in messages[:2]] == ["expected no mul_", "expected no __setitem__"]
        assert [message[:26] for message in messages[2:]] == [
            "Target 11 is out of bounds",
            "Target -1 is out of bounds",
        ]


@pytest.mark.parametrize("checkpoint", ["", pytest.param("reentrant", marks=slow), pytest.param("not", marks=slow)])
@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=slow)])
def test_random_numbers(pools: Pools, checkpoint: str, sequence_parallel: bool) -> None:
    """Inside of what is cut each rank has its own; outside all have the same, unless each has a part of the sequence.
    Blocks that are computed anew draw the same ones."""
    given = {"checkpoint": checkpoint, "sequence_parallel": sequence_parallel}
    results = pools(2).run(f"{CASES}:random_numbers", given)
    assert len({result["inside"] for result in results}) == 2
    assert len({result["outside"] for result in results}) == (2 if sequence_parallel else 1)
    assert len({result["state"] for result in results}) == 1
    for result in results:
        assert result["loss"] == result["again"] == results[0]["loss"]
        assert result["equal gradients"] and result["advanced"] and result["state"] == result["state again"]


@slow
def test_a_failure_inside_leaves_the_common_random_numbers(pools: Pools) -> None:
    one, other = pools(2).run(f"{CASES}:failure_inside")
    assert one == other


@slow
def test_the_first_ranks_values_and_random_numbers(pools: Pools) -> None:
    for found in pools(2).run(f"{CASES}:different_ranks"):
        assert found == {"values": True, "numbers": True}


@slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_nothing_is_kept(pools: Pools, sequence_parallel: bool) -> None:
    for found in pools(2).run(f"{CASES}:memory", {"sequence_parallel": sequence_parallel}):
        assert found["alive after"] == [] and found["alive without gradients"] == []
        assert found["growth"] < 500  # the smallest activation takes 1536; the record of fences grows by some numbers


@pytest.mark.parametrize("stage", [0, 2])
def test_a_model_that_is_written_with_the_layers(pools: Pools, stage: int) -> None:
    for losses, wanted in pools(2).run(f"{CASES}:own_layers", {"stage": stage}):
        assert losses == pytest.approx(wanted, rel=1e-6)


@pytest.mark.fast("False")
@pytest.mark.parametrize("sequence", [False, True])
def test_a_second_engine_on_the_same_model(pools: Pools, sequence: bool) -> None:
    assert max(pools(2).run(f"{CASES}:again", {"sequence": sequence, "other": False})) < 1e-6
    with pytest.raises(CaseFailed, match="as it was when the layers of .* were cut for an earlier engine"):
        pools(2).run(f"{CASES}:again", {"sequence": sequence, "other": True})
