"""Spans of tensors that are read from disk together."""

from __future__ import annotations

import random

import pytest
import torch

from zerolite.offload.placement import SPAN_ALIGNMENT
from zerolite.zero.stage3.shard_reader import tensor_spans

CPU = torch.device("cpu")


@pytest.mark.parametrize("alignment", [1, SPAN_ALIGNMENT])
@pytest.mark.parametrize("seed", range(3))
def test_spans_cover_every_tensor_once_and_little_else(seed: int, alignment: int) -> None:
    rng = random.Random(seed)
    tensors = []
    for _ in range(3):
        memory = torch.arange(60_000)
        position = 0
        while position < 40_000:
            numel = rng.choice([0, 1, 8, 500, 6000])
            tensors.append(memory.narrow(0, position, numel))
            position += numel + rng.choice([0, 0, 5, SPAN_ALIGNMENT - 1, SPAN_ALIGNMENT, 9000])
    rng.shuffle(tensors)
    found = tensor_spans(tensors, alignment)
    assert sorted(i for span in found for i in span.indices) == [i for i, t in enumerate(tensors) if t.numel()]
    for span in found:
        assert span.start % alignment == 0
        copied = span.memory(tensors).clone()
        assert len(copied) == span.numel
        for index, view in span.views(tensors, copied).items():
            assert torch.equal(view, tensors[index])
        wanted = sum(tensors[index].numel() for index in span.indices)
        assert span.numel < wanted + len(span.indices) * SPAN_ALIGNMENT
