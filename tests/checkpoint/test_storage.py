"""The planner and the storage by themselves: any cut is written, any other is read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from zerolite.checkpoint.boxes import Box
from zerolite.checkpoint.directory import find
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.manifest import About
from zerolite.checkpoint.pieces import FlatRange, cut_evenly, empty_shard, whole
from zerolite.checkpoint.planner import Shard
from zerolite.checkpoint.reader import CheckpointReader, Target, part_of
from zerolite.checkpoint.run import TrainingRun
from zerolite.checkpoint.storage import Commit, now, write_checkpoint

STATE: dict[str, Any] = {"optimizer": {"type": "AdamW", "groups": []}, "client_state": {}}


def about(tag: str = "a", steps: int = 1) -> About:
    return About(tag, now(), steps, 1, 0, {}, {}, {}, {}, {}, False)


def commit(directory: Path, tag: str = "a") -> Commit:
    return Commit(directory, about(tag), STATE, TrainingRun())


def shards_of(key: str, tensor: torch.Tensor, boxes: Iterable[Box]) -> list[Shard]:
    return [Shard(key, tuple(tensor.shape), tensor.dtype, box, part_of(tensor, box)) for box in boxes]


def save(directory: Path, shards: Sequence[Shard]) -> CheckpointReader:
    write_checkpoint(directory, "a", shards, {}, commit(directory))
    return CheckpointReader(find(directory))


COLUMNS: list[Box] = [((0, 0), (6, 3)), ((0, 3), (6, 4)), ((0, 7), (6, 3))]  # a tensor-parallel cut of [6, 10]
ROWS: list[Box] = [((0, 0), (1, 10)), ((1, 0), (5, 10))]


@pytest.mark.parametrize("stored", [COLUMNS, ROWS, [((0, 0), (6, 10))]], ids=["columns", "rows", "whole"])
@pytest.mark.parametrize("wanted", [COLUMNS, ROWS, [((2, 5), (3, 2))]], ids=["columns", "rows", "inside"])
def test_any_cut_loads_into_any_other(tmp_path: Path, stored: list[Box], wanted: list[Box]) -> None:
    tensor = torch.arange(60.0).reshape(6, 10)
    reader = save(tmp_path, shards_of("w", tensor, stored))
    for dtype in (torch.float32, torch.float64):  # read straight into the place, and cast on the way
        places = [torch.full(box[1], -1, dtype=dtype) for box in wanted]
        reader.load([Target("w", box, place) for box, place in zip(wanted, places, strict=True)])
        for box, place in zip(wanted, places, strict=True):
            assert torch.equal(place, part_of(tensor, box).to(dtype))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_ranges_of_permuted_memory_are_boxes_of_the_tensor(tmp_path: Path, order: tuple[int, ...], ranks: int) -> None:
    shape = (3, 4, 1, 5)
    tensor = torch.randn([shape[dim] for dim in order]).permute(sorted(range(4), key=order.__getitem__))
    assert tuple(tensor.shape) == shape
    flat = whole("w", tensor)
    shards = [shard for rank in range(ranks) for part in cut_evenly([flat], rank, ranks) for shard in part.shards()]
    reader = save(tmp_path, shards)
    assert torch.equal(reader.read("w"), tensor)
    contiguous = torch.zeros(60)
    reader.load(list(FlatRange("w", shape, torch.zeros(shape).stride(), 0, contiguous).targets()))
    assert torch.equal(contiguous.view(shape), tensor)


def test_even_parts_are_even_and_everything() -> None:
    tensors = [whole(str(i), torch.arange(n, dtype=dtype)) for i, (n, dtype) in enumerate(SIZES)]
    total = sum(t.values.numel() * t.values.element_size() for t in tensors)
    for world_size in range(1, 9):
        parts = [list(cut_evenly(tensors, rank, world_size)) for rank in range(world_size)]
        for tensor in tensors:
            ranges = [(p.start, p.values.numel()) for part in parts for p in part if p.key == tensor.key]
            assert [start for start, _ in ranges] == [sum(n for _, n in ranges[:i]) for i in range(len(ranges))]
            assert sum(n for _, n in ranges) == tensor.values.numel()
        nbytes = [sum(p.values.numel() * p.values.element_size() for p in part) for part in parts]
        assert max(nbytes) - min(nbytes) <= 16 and sum(nbytes) == total


SIZES = [(1, torch.float32), (1000, torch.bfloat16), (7, torch.uint8), (333, torch.float64), (1, torch.int64)]


@pytest.mark.parametrize("boxes", [COLUMNS[:2], [*COLUMNS, COLUMNS[0]], [((0, 0), (6, 11))]], ids=str)
def test_parts_that_do_not_make_up_a_tensor_are_not_saved(tmp_path: Path, boxes: list[Box]) -> None:
    shards = [Shard("w", (6, 10), torch.float32, box, torch.zeros(box[1])) for box in boxes]
    with pytest.raises(CheckpointError, match=r"parts of 'w' do not make up its shape \(6, 10\)"):
        write_checkpoint(tmp_path, "a", shards, {}, commit(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] in ([], [".lock"])


def test_values_that_are_not_as_planned_are_not_saved(tmp_path: Path) -> None:
    shard = Shard("w", (4,), torch.float32, ((0,), (4,)), lambda: torch.zeros(5))
    with pytest.raises(CheckpointError, match="w@0 is not as planned"):
        write_checkpoint(tmp_path, "a", [shard], {}, commit(tmp_path))
    assert not [path for path in tmp_path.iterdir() if path.name != ".lock"]


def test_values_are_asked_for_one_after_the_other(tmp_path: Path) -> None:
    alive: list[int] = []
    most = 0

    def make(number: int) -> torch.Tensor:
        nonlocal most
        tensor = torch.full((1 << 21,), float(number))  # 8 MiB
        alive.append(number)
        most = max(most, len(alive))
        weakref.finalize(tensor.untyped_storage(), alive.remove, number)
        return tensor

    shape = (1 << 21,)
    shards = [Shard(str(n), shape, torch.float32, ((0,), shape), lambda n=n: make(n)) for n in range(6)]  # type: ignore[misc]
    reader = save(tmp_path, shards)
    assert most <= 3 and float(reader.read("5")[0]) == 5


def test_empty_tensors_are_known_and_in_no_file(tmp_path: Path) -> None:
    reader = save(tmp_path, [empty_shard("e", (0, 3), torch.float16), *shards_of("s", torch.tensor(2.5), [((), ())])])
    assert reader.tensors["e"].shape == (0, 3) and reader.tensors["e"].boxes == ()
    assert reader.read("e").shape == (0, 3) and reader.read("e").dtype == torch.float16
    assert float(reader.read("s")) == 2.5
