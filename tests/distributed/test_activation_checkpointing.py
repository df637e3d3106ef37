"""Activation checkpointing with an engine, and over a group: all ways give torch's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.configs import ADAMW, PARTITIONED, config
from tests.distributed.test_parity import assert_same_bits
from tests.pool import Pools
from zerolite.utils.memory_items import ACTIVATIONS, DEVICE, HOST

CASES = "tests.distributed.cases.activation_checkpointing"
NBYTES = 32 * 64 * 4  # of an input in fp32
HOST_BLOCK = {"cpu_checkpointing": True}
ONE_BUFFER = {"contiguous_memory_optimization": True, "number_checkpoints": 3}
RUNS: list[dict[str, Any]] = [
    {"how": "none", "block": {}},
    {"how": "torch", "block": {}},
    {"how": "none", "block": {"modules": ["blocks.*"]}},
    {"how": "none", "block": {"modules": ["Block"], **HOST_BLOCK}},
    {"how": "zerolite", "block": {}},
    {"how": "zerolite", "block": {**HOST_BLOCK, **ONE_BUFFER}},
]


def settings(stage: str, precision: str) -> dict[str, Any]:
    zero = None
    if stage == "3-offloaded":
        zero = {**PARTITIONED["moving"], "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    elif stage.startswith("3-"):
        zero = PARTITIONED[stage.partition("-")[2]]
    return {**config(int(stage[0]), precision, 1, 0.0, ADAMW, zero), "train_micro_batch_size_per_gpu": 32}


FAST = {("0", 1, "fp32"), ("3-moving", 2, "fp32")}
STAGES = ("0", "1", "2", "3-moving", "3-tight", "3-one unit", "3-offloaded")
EACH = [(stage, *more) for stage in STAGES for more in ((1, "fp32"), (2, "fp32"), (2, "bf16"), (3, "bf16"))]


@pytest.mark.fast("0-1-fp32")
@pytest.mark.parametrize(
    ("stage", "world", "precision"),
    [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in EACH],
)
def test_every_way_gives_the_same_bits(pools: Pools, stage: str, world: int, precision: str) -> None:
    for rank in pools(world).run(f"{CASES}:train_each", {"config": settings(stage, precision), "runs": RUNS}):
        plain, by_torch, *others = rank
        for number, run in enumerate([by_torch, *others]):
            assert run["losses"] == plain["losses"], number
            assert torch.equal(run["random"], plain["random"])
            assert_same_bits(run["parameters"], plain["parameters"], f"no checkpoint and way {number}")
            assert run["calls"] == by_torch["calls"], number  # stage 3 gathers what it does under torch's
        assert [(ACTIVATIONS, HOST) in run["places"] for run in rank] == [False, False, False, True, False, True]
        of_input = NBYTES if precision == "fp32" else NBYTES // 2
        assert others[1]["places"][ACTIVATIONS, HOST] == 4 * of_input  # three inputs, and the mask beside the first
        assert others[3]["places"][ACTIVATIONS, HOST] == 3 * 2 * of_input  # slots as long as the first


CUT_RUNS: list[dict[str, Any]] = [
    {"how": "torch", "block": {}},
    {"how": "none", "block": {"modules": ["blocks.*"], "partition_activations": True}},
    {"how": "zerolite", "block": {"partition_activations": True, **HOST_BLOCK}},
    {"how": "zerolite", "block": {"partition_activations": True, **HOST_BLOCK, **ONE_BUFFER}},
]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", ["3-moving", pytest.param("0", marks=pytest.mark.slow)])
def test_inputs_are_cut_over_a_group(pools: Pools, stage: str, world: int) -> None:
    arguments = {"config": settings(stage, "fp32"), "runs": CUT_RUNS, "mpu": world == 3}
    for by_torch, *others in pools(world).run(f"{CASES}:train_cut", arguments):
        for run in others:
            assert run["losses"] == by_torch["losses"]
            assert_same_bits(run["parameters"], by_torch["parameters"], "torch's and inputs that are cut")
            assert run["calls"] == by_torch["calls"]
            assert run["gathered"] > 0 == by_torch["gathered"]
        assert (ACTIVATIONS, HOST) not in others[0]["places"]
        part = -(-NBYTES // world // 16) * 16
        slot = -(-(part + -(-part // 512) * 512) // 4096) * 4096
        assert others[2]["places"][ACTIVATIONS, HOST] <= 3 * (slot + 4096)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("one_buffer", [False, True])
def test_a_rank_keeps_its_part(pools: Pools, world: int, host: bool, one_buffer: bool) -> None:
    ranks = pools(world).run(f"{CASES}:cut", {"host": host, "unequal": False, "one_buffer": one_buffer})
    part = 33 * 64 * 4 / world
    for rank in ranks:
        assert rank["message"] == ""
        assert all(torch.equal(a, b) for a, b in zip(*rank["results"], strict=True))
        kept = rank["places"][ACTIVATIONS, HOST if host else DEVICE]
        assert 6 * part <= kept <= 6 * (part + 16 + 512) + 3 * 4096  # of x and the mask, three times
        assert (ACTIVATIONS, DEVICE if host else HOST) not in rank["places"]


@pytest.mark.parametrize("host", [False, True])
def test_unequal_inputs_are_found(pools: Pools, host: bool) -> None:
    for rank in pools(2).run(f"{CASES}:cut", {"host": host, "unequal": True, "one_buffer": False}):
        assert "inputs of the checkpoint of Block to be equal on all ranks" in rank["message"]
        assert "on its rank 1 than on its rank 0" in rank["message"]
