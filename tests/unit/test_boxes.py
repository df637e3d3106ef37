"""Ranges of flattened tensors as boxes, compared with torch's own indexing."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch

import zerolite
from zerolite.checkpoint.boxes import Box, BoxIndex, boxes_of_range, covers, intersection
from zerolite.checkpoint.flat_ranges import FlatRange
from zerolite.tensor_parallel.shard_spec import ShardSpec

SHAPES = [(), (1,), (7,), (1, 1), (3, 4), (5, 1), (1, 5), (2, 3, 4), (3, 1, 2), (2, 2, 3, 2), (2, 1, 2, 1, 3)]
EMPTY = [(0,), (0, 5), (5, 0), (2, 0, 3)]


def ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    numel = math.prod(shape)
    return ((start, end - start) for start in range(numel + 1) for end in range(start, numel + 1))


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (low, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, low, size)
    return tensor


@pytest.mark.parametrize("shape", SHAPES)
def test_every_range_is_its_boxes_in_order(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    for start, numel in ranges(shape):
        boxes = list(boxes_of_range(shape, start, numel))
        parts = [cut(tensor, box).reshape(-1) for box in boxes]
        assert all(len(offsets) == len(sizes) == len(shape) for offsets, sizes in boxes)
        assert all(min(sizes, default=1) > 0 for _, sizes in boxes)
        values = torch.cat(parts) if parts else torch.empty(0)
        assert values.tolist() == list(range(start, start + numel)), (start, numel)
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
        for part in parts:  # contiguous in the flattened tensor
            assert (part - part[0]).tolist() == list(range(len(part)))


@pytest.mark.parametrize("seed", range(2))
def test_the_index_finds_what_a_search_through_all_finds(seed: int) -> None:
    chance = random.Random(seed)
    shape = (11, 7, 3)
    numel = math.prod(shape)
    cuts = sorted({0, numel, *(chance.randrange(numel) for _ in range(9))})
    boxes = [box for low, high in itertools.pairwise(cuts) for box in boxes_of_range(shape, low, high - low)]
    chance.shuffle(boxes)
    assert covers(boxes, shape)
    index = BoxIndex(boxes)
    for _ in range(200):
        offsets = tuple(chance.randrange(n) for n in shape)
        wanted = (offsets, tuple(chance.randint(1, n - low) for n, low in zip(shape, offsets, strict=True)))
        expected = {i: common for i, box in enumerate(boxes) if (common := intersection(box, wanted)) is not None}
        assert dict(index.meeting(wanted)) == expected
        assert sum(math.prod(sizes) for _, sizes in expected.values()) == math.prod(wanted[1])


def test_what_covers_a_tensor_and_what_does_not() -> None:
    assert covers([((), ())], ())
    assert not covers([], ())
    assert covers([((0, 0), (1, 4)), ((1, 0), (2, 4))], (3, 4))
    assert not covers([((0, 0), (1, 4))], (3, 4))
    assert not covers([((0, 0), (3, 5))], (3, 4))
    assert not covers([((0, -1), (3, 4))], (3, 4))
    assert not covers([((0, 0), (3, 4)), ((0, 0), (3, 0))], (3, 4))
    assert not covers([((0,), (1,))], (0,))


@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY])
def test_a_range_has_the_bytes_of_its_shards(shape: tuple[int, ...]) -> None:
    values = torch.zeros(math.prod(shape), dtype=torch.bfloat16)
    specs: list[ShardSpec | None] = [None]
    for dim, length in enumerate(shape):  # rank 1 of 2; the last rows are padding
        full, rows = (*shape[:dim], 2 * length - length // 2, *shape[dim + 1 :]), ((0, length, length - length // 2),)
        specs.append(ShardSpec(full, dim, rows, length, 1, 2))
    for spec, (start, numel) in itertools.product(specs, ranges(shape)):
        part = FlatRange("w", shape, torch.empty(shape).stride(), start, values[start : start + numel], spec)
        assert part.nbytes == sum(shard.nbytes for shard in part.shards())


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
    model = engine.checkpointer.components.model
    shards, _ = model.shards(exclude_frozen=False)
    assert any(shard.key.startswith("optimizer/") for shard in shards)
    assert engine.checkpointer.nbytes() == sum(shard.nbytes for shard in shards) > 0
