"""Ranges as boxes, and the number of bytes that a rank writes, known before it writes them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import zerolite
from zerolite.checkpoint.boxes import boxes_of_range
from zerolite.checkpoint.model_state import ModelState
from zerolite.checkpoint.reader import part_of

SHAPES = [(), (1,), (7,), (1, 1), (3, 4), (5, 1), (1, 5), (2, 3, 4), (3, 1, 2), (2, 2, 3, 2), (0,), (0, 5), (2, 0, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_range_is_a_few_boxes_in_its_order(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    for start, end in itertools.combinations_with_replacement(range(tensor.numel() + 1), 2):
        parts = [part_of(tensor, box).flatten() for box in boxes_of_range(shape, start, end - start)]
        assert torch.cat([tensor.flatten()[:0], *parts]).tolist() == list(range(start, end))
        assert len(parts) <= max(1, 2 * len(shape) - 1)


class Mixed(torch.nn.Module):
    """Parameters that are trained, frozen, empty, scalar and channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(7, 5).requires_grad_(False)
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.empty = torch.nn.Parameter(torch.ones(0, 3))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("bf16", [False, True])
def test_an_engine_writes_the_bytes_of_its_shards(stage: int, bf16: bool) -> None:
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}, "train_micro_batch_size_per_gpu": 1}
    engine = zerolite.initialize(Mixed(), {**config, "optimizer": {"type": "Adam"}})
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    engine.step()
    model = ModelState(engine._parts)
    shards, _ = model.shards(exclude_frozen=False)
    assert any(shard.key.startswith("optimizer/") for shard in shards)
    written = sum(shard.nbytes for shard in shards)
    masters = sum(parameter.numel() * 4 for parameter in engine.module.parameters() if parameter.requires_grad)
    frozen = sum(p.numel() * p.element_size() for p in engine.module.parameters() if not p.requires_grad)
    assert written == 3 * masters + frozen > 0
