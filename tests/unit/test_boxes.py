"""The number of bytes that a rank writes, known before it writes them."""

from __future__ import annotations

import pytest
import torch

import zerolite
from zerolite.checkpoint.model_state import ModelState


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
    assert written == model.nbytes() == 3 * masters + frozen > 0
