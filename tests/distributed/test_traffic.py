"""What is sent, as recorded: neither a collective nor a byte more than the stage needs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.distributed.configs import ADAMW, config
from tests.distributed.test_parity import assert_same_bits
from tests.pool import Pools

CASES = "tests.distributed.cases.traffic"
BYTES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2, "torch.float64": 8}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_collectives_and_bytes_of_a_step(pools: Pools, world: int, accumulation: int, precision: str) -> None:
    for stage in (0, 1, 2):
        setting = config(stage, precision, accumulation, 0.4, ADAMW)
        for result in pools(world).run(f"{CASES}:calls_per_step", {"config": setting}):
            calls = result["calls"]
            gradients = [call for call in calls if call[4] == "gradients"]
            parameters = [call for call in calls if call[4] == "parameters"]
            others = [call for call in calls if call[4] not in ("gradients", "parameters")]
            passes = accumulation if stage == 2 else 1
            buckets = len(gradients) // passes
            assert buckets >= 3, "the test needs several buckets"
            assert Counter(call[0] for call in gradients) == {
                ("all_reduce" if stage == 0 else "reduce_scatter"): buckets * passes
            }
            assert Counter(call[0] for call in parameters) == ({} if stage == 0 else {"all_gather": buckets})
            assert [(call[0], call[4]) for call in others] == [("all_reduce", "stats")]
            assert others[0][3] < 1000
            # Each slot of a bucket is padded to 32 elements, a bucket to 32 × world: what is left is the model, once
            # per pass and phase.
            padding = 32 * (16 + buckets * world)
            sent = sum(call[1] for call in gradients) / passes
            assert result["numel"] <= sent <= result["numel"] + padding
            if stage:
                assert sum(call[1] for call in parameters) == sent
            for call in calls:
                assert call[3] == call[1] * BYTES[call[2]]
            dtype = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]
            assert {call[2] for call in parameters} <= {dtype}
            # Stages 0 and 1 sum several 16-bit gradients in fp32 before they send them; a single one travels as it is.
            if accumulation == 1 or stage == 2:
                assert {call[2] for call in gradients} == {dtype}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_process_sends_nothing(pools: Pools, stage: int) -> None:
    assert pools(1).run(f"{CASES}:calls_per_step", {"config": config(stage)})[0]["calls"] == []


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rank_0s_values_become_everyones(pools: Pools, stage: int, precision: str) -> None:
    ranks = pools(3).run(f"{CASES}:initial_sync", {"config": config(stage, precision), "same": False})
    assert not torch.equal(ranks[0]["mine"]["net.first.weight"], ranks[1]["mine"]["net.first.weight"])
    for result in ranks:
        for name, value in result["parameters"].items():
            assert torch.equal(value, ranks[0]["mine"][name].to(value.dtype)), name
        assert_same_bits(result["buffers"], {name: ranks[0]["mine"][name] for name in result["buffers"]}, "buffers")
        assert {name: buffer.dtype for name, buffer in result["buffers"].items()} == {
            "offset": torch.float32,
            "calls": torch.int64,
            "wide": torch.float64,
        }


def test_equal_models_are_checked_and_not_sent(pools: Pools) -> None:
    for stage in (0, 2):
        for result in pools(3).run(f"{CASES}:initial_sync", {"config": config(stage), "same": True}):
            assert not [call for call in result["calls"] if call[0] == "broadcast"]
            assert sum(call[3] for call in result["calls"]) < 1000
            for name, value in result["parameters"].items():
                assert torch.equal(value, result["mine"][name])


def test_different_models_are_refused_on_all_ranks(pools: Pools) -> None:
    for message in pools(2).run(f"{CASES}:different_models", {"config": config(1)}):
        assert "different models" in message


def test_buffers_are_sent_before_each_training_forward_if_asked(pools: Pools) -> None:
    for rank, result in enumerate(
        pools(2).run(f"{CASES}:buffers_after_training", {"config": config(1), "broadcast": True})
    ):
        assert torch.equal(result["offset"], torch.zeros(3)), rank
        assert result["calls"] == 2  # one training and one evaluation forward, from rank 0's zero
        assert result["broadcasts"] > 0
        assert result["in evaluation"] == 0
    for rank, result in enumerate(
        pools(2).run(f"{CASES}:buffers_after_training", {"config": config(1), "broadcast": False})
    ):
        assert torch.equal(result["offset"], torch.full((3,), float(rank)))
        assert result["calls"] == 10 * rank + 2
        assert result["broadcasts"] == 0
