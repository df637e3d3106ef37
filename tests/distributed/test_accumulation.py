"""No micro-batch is ever lost, however the loop is written; and graphs that are not a plain chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import models, reference
from tests.distributed.configs import ADAMW, SGD, config, dynamic_fp16
from tests.distributed.test_parity import assert_same_bits
from tests.pool import Pools

CASES = "tests.distributed.cases.accumulation"
# The ways differ in where 1/4 is multiplied and in what is summed before it is reduced. Three steps of SGD with lr
# 0.05 and gradients of order 1: a rounding error of one fp32 unit in the last place (6e-8) per sum stays far below; a
# lost micro-batch moves a weight by 1e-2.
FP32_TOLERANCE = 1e-6
# bf16: the sums are fp32 at every stage, but dividing a loss by 4 before or after is exact, so what differs is one
# rounding of the weights.
BF16_TOLERANCE = 2.0**-7


@pytest.mark.fast("0-fp32", "1-bf16", "2-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_way_to_write_a_window_gives_the_same_update(pools: Pools, stage: int, precision: str) -> None:
    results = pools(2).run(f"{CASES}:window_in_many_ways", {"base": config(stage, precision, accumulation=4, clip=0.4)})
    batches = [
        [[models.token_batch(step, micro, rank) for rank in range(2)] for micro in range(4)] for step in range(3)
    ]
    wanted = reference.train(models.build(models.OddModel), models.token_loss, batches, precision, SGD, 0.4)
    tolerance = FP32_TOLERANCE if precision == "fp32" else BF16_TOLERANCE
    for name, result in results[0].items():
        assert_same_bits(result["parameters"], results[1][name]["parameters"], f"{name}: two ranks")
        assert result["steps"] == 3, name
        assert result["norms"] == pytest.approx(wanted.norms, rel=tolerance), name
        for parameter, value in wanted.parameters.items():
            torch.testing.assert_close(
                result["parameters"][parameter].float(),
                value,
                rtol=tolerance,
                atol=tolerance / 8,
                msg=lambda m, n=name, p=parameter: f"{n}, {p}: {m}",
            )


@pytest.mark.parametrize(("contained", "plain"), [(1, False), (3, True)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_flushed_window_is_the_mean_of_what_it_contains(
    pools: Pools, stage: int, contained: int, plain: bool
) -> None:
    setting = config(stage, "fp32", accumulation=4, clip=0.4, divide_plain_backward=plain)
    result = pools(2).run(f"{CASES}:partial_window", {"config": setting, "contained": contained})[0]
    sizes = (contained, 4)
    batches = [
        [[models.token_batch(step, micro, rank) for rank in range(2)] for micro in range(count)]
        for step, count in enumerate(sizes)
    ]
    first = reference.train(models.build(models.OddModel), models.token_loss, batches[:1], "fp32", SGD, 0.4)
    both = reference.train(models.build(models.OddModel), models.token_loss, batches, "fp32", SGD, 0.4)
    assert result["flushed"]["norm"] == pytest.approx(first.norms[0], rel=1e-6)
    assert (result["flushed"]["steps"], result["steps"]) == (1, 2)
    torch.testing.assert_close(result["flushed"]["parameters"], first.parameters, rtol=0, atol=FP32_TOLERANCE)
    torch.testing.assert_close(result["then"], both.parameters, rtol=0, atol=FP32_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [None, True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_weight_shared_by_two_checkpointed_blocks(pools: Pools, stage: int, overlap: bool | None) -> None:
    """Its gradient comes twice in a backward; a bucket reduced after the first would lose the second."""
    # Buckets of one parameter each: the shared weight's bucket is complete long before its second contribution.
    setting = config(stage, zero={"overlap_comm": overlap, "reduce_bucket_size": 1})
    for reentrant in (True, False):
        kwargs = {"config": setting, "model": "SharedCheckpointed", "steps": 4, "sizes": {"reentrant": reentrant}}
        results = pools(2).run(f"{CASES}:float_training", kwargs)
        batches = [[[models.float_batch(step, 0, rank) for rank in range(2)]] for step in range(4)]
        model = models.build(models.SharedCheckpointed, reentrant=reentrant)
        wanted = reference.train(model, models.square_loss, batches, "fp32", SGD)
        torch.testing.assert_close(results[0]["parameters"], wanted.parameters, rtol=0, atol=FP32_TOLERANCE)


BRANCHES = {
    "the same layer unused on all ranks": [["left", "left"]] * 4,
    "a layer unused on one rank": [["left", "right"]] * 4,
    "another layer each step": [["left", "left"], ["right", "right"], ["left", "left"], ["right", "right"]],
    "another layer on each rank and step": [["left", "right"], ["right", "right"], ["right", "left"], ["left", "left"]],
}


@pytest.mark.fast("the same layer unused on all ranks-SGD-True", "another layer each step-SGD-True")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("branches", BRANCHES.values(), ids=BRANCHES.keys())
def test_unused_parameters(pools: Pools, branches: list[list[str]], optimizer: Any, overlap: bool) -> None:
    """A parameter that no rank used keeps its value (no weight decay, no momentum); one that some ranks used gets
    their mean with zeros."""
    model = models.build(models.TwoBranches)
    torch_optimizer = reference.make_optimizer(optimizer[0], list(model.parameters()), optimizer[1])
    for step, ranks in enumerate(branches):
        torch_optimizer.zero_grad()
        for rank, branch in enumerate(ranks):
            x, y = models.float_batch(step, 0, rank)
            (torch.nn.functional.mse_loss(model(x, branch), y) / len(ranks)).backward()
        torch_optimizer.step()
    tolerance = FP32_TOLERANCE if optimizer is SGD else 0.02 * ADAMW[1]["lr"]
    for stage in (0, 1, 2):
        setting = config(stage, optimizer=optimizer, zero={"overlap_comm": overlap, "reduce_bucket_size": 1})
        kwargs = {"config": setting, "model": "TwoBranches", "branches": branches}
        results = pools(2).run(f"{CASES}:float_training", kwargs)
        assert_same_bits(results[0]["parameters"], results[1]["parameters"], "two ranks")
        wanted = {name: p.detach() for name, p in model.named_parameters()}
        torch.testing.assert_close(results[0]["parameters"], wanted, rtol=0, atol=tolerance)


@pytest.mark.fast("0-False", "1-True", "2-False")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_exception_in_the_middle_of_backward(pools: Pools, stage: int, overlap: bool) -> None:
    setting = config(stage, zero={"overlap_comm": overlap, "reduce_bucket_size": 1})
    failed = pools(2).run(f"{CASES}:exception_in_backward", {"config": setting})
    wanted = pools(2).run(f"{CASES}:without_step", {"config": setting, "steps": [0, 1, 3]})
    assert failed[0]["steps"] == wanted[0]["steps"] == 3
    for rank in range(2):
        assert_same_bits(failed[rank]["parameters"], wanted[0]["parameters"], f"rank {rank}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_dropped_gradients_leave_no_trace(pools: Pools, stage: int) -> None:
    for setting in (config(stage), config(stage, "bf16"), config(stage, fp16=dynamic_fp16())):
        dropped = pools(2).run(f"{CASES}:dropped_gradients", {"config": setting})
        wanted = pools(2).run(f"{CASES}:without_step", {"config": setting, "steps": [0, 1, 2]})
        assert dropped[0]["steps"] == 3
        assert_same_bits(dropped[0]["parameters"], wanted[0]["parameters"], "dropped gradients")


def test_unused_parameters_are_an_error_if_the_config_says_so(pools: Pools) -> None:
    for stage in (0, 1, 2):
        setting = config(stage, zero={"ignore_unused_parameters": False})
        for message in pools(2).run(f"{CASES}:message_of", {"config": setting, "model": "OddModel", "what": "unused"}):
            assert "unused" in message
            assert "ignore_unused_parameters" in message
            assert "up.weight" not in message


@pytest.mark.parametrize(
    ("what", "stage", "expected"),
    [
        ("sparse", 0, ["embed.weight", "sparse"]),
        ("sparse", 2, ["embed.weight", "sparse"]),
        ("not elementwise", 3, ["Adafactor", "stage"]),
        ("foreign parameters", 1, ["param group 0", "model.parameters()"]),
    ],
)
def test_misuse_is_told_in_a_sentence(pools: Pools, what: str, stage: int, expected: list[str]) -> None:
    for message in pools(2).run(f"{CASES}:message_of", {"config": config(stage), "model": "OddModel", "what": what}):
        for word in expected:
            assert word in message, message
