"""Repeated blocks as units of stage 3, in models that use them in every way."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolite
from tests import models
from tests.distributed.cases.training import snapshot
from zerolite.engine import build_stage3

WIDTH = 6
STEPS = 4


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        x = x + self.feed(torch.tanh(self.mix(x)))
        for index, expert in enumerate(self.experts):
            x = x if index == skip else x + expert(x)
        return x


class Blocks(nn.Module):
    """``tokens [B, T]`` -> ``[B, T, 11]``. use: how the blocks are called."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.embed = nn.Embedding(models.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(3 if use == "experts" else 0) for _ in range(6))
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
        if self.use == "experts":  # each rank leaves out another one
            return block(x, dist.get_rank())
        if self.use in ("checkpointed", "reentrant"):
            return checkpoint(block, x, use_reentrant=self.use == "reentrant")
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
            "units": [unit.name for unit in coordinator.units],
            "followed": coordinator.schedule.following,
            "most": most,
        }
    return found
