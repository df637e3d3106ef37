"""By default a repeated block is gathered, released and reduced as one, whatever way it is used."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, config
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import snapshot
from zerolite.engine import build_stage3

WIDTH = 6
STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(torch.tanh(self.mix(x)))


class Blocks(nn.Module):
    """``tokens [B, T]`` -> ``[B, T, 11]``. use: how the blocks are called."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.embed = nn.Embedding(models.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, models.VOCABULARY)
        if use == "tied":
            self.head.weight = self.embed.weight
            self.blocks[4].mix = self.blocks[1].mix
            self.blocks[5].feed[0].weight = self.blocks[0].feed[0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(x)

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.use == "inside":  # never by the block's own forward
            return x + block.feed(torch.tanh(block.mix(x)))
        if self.use == "twice":
            return block(block(x))
        if self.use == "checkpointed":
            return checkpoint(block, x, use_reentrant=True)
        return block(x)


def train(config: dict[str, Any], use: str) -> dict[str, Any]:
    """The parameters after a few steps; of the last one the gathers, and the most parameters that were gathered."""
    with patch.object(build_stage3, "AUTO_GRANULARITY", 0):
        engine = zerolite.initialize(models.build(Blocks, use=use), config)
    coordinator, most = engine.coordinator, 0

    def look(*_: Any) -> None:
        nonlocal most
        if coordinator is not None:
            live = [h.numel for h in coordinator.handles if h.status is zerolite.zero.ZeroParamStatus.AVAILABLE]
            most = max(most, sum(live))

    for module in engine.module.modules():
        module.register_forward_hook(look)
    for step in range(STEPS):
        with zerolite.comm.record() as recorder:
            tokens, _ = models.token_batch(step, 0, dist.get_rank())
            engine.backward(engine(tokens).log_softmax(-1).square().mean())
            engine.step()
    found = {"parameters": snapshot(engine), "gathers": recorder.count("all_gather", "parameters")}
    if coordinator is not None:
        found |= {
            "units": [unit.name for unit in coordinator.groups],
            "followed": coordinator.schedule.following,
            "most": most,
        }
    return found


USES = ["forward", "inside", "twice", "tied", "checkpointed"]
UNITS = ["", "embed", *(f"blocks.{index}" for index in range(6)), "head"]
BLOCK = 6 * 7 + 12 * 7 + 6 * 13  # elements
EDGES = 11 * 6 + 11 * 7  # of the embedding and the head


@pytest.mark.fast("forward-2")
@on_ranks(2)
@pytest.mark.parametrize("use", USES)
def test_blocks_in_every_use_give_the_numbers_of_plain_training(use: str) -> None:
    moving = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    kept = {**moving, "stage3_max_reuse_distance": 10 * BLOCK, "stage3_prefetch_bucket_size": 1}
    plain = train(config(0, optimizer=ADAMW), use)
    for zero in (moving, kept):
        result = train(config(3, optimizer=ADAMW, zero=zero), use)
        assert result["units"] == UNITS and result["followed"]
        assert_same_bits(result["parameters"], plain["parameters"], use)


@pytest.mark.fast("forward-2")
@on_ranks(2)
@pytest.mark.parametrize("use", ["forward", "inside"])
def test_at_most_two_blocks_are_whole_at_a_time(use: str) -> None:
    zero = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 1,  # from one call inside a block to the next
        "stage3_prefetch_bucket_size": 1,
    }
    result = train(config(3, zero=zero), use)
    assert BLOCK <= result["most"] <= 2 * BLOCK + EDGES
    # Forward 8 units, backward 7: the head's values are kept, and the embedding's are not needed.
    assert result["gathers"] <= 15
