"""The storage and its files by themselves: any cut is written, any other is read."""

from __future__ import annotations

import errno
import itertools
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import faults
from zerolite.checkpoint import filesystem
from zerolite.checkpoint.boxes import Box
from zerolite.checkpoint.directory import TrainingRun, find
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.filesystem import BLOCK_BYTES, BUFFER_BYTES, CheckedFile, FileEntry, FileWriter
from zerolite.checkpoint.flat_ranges import FlatRange, Shard
from zerolite.checkpoint.reader import CheckpointReader, part_of
from zerolite.checkpoint.safetensors import ToStore, as_bytes, build_header
from zerolite.checkpoint.storage import Commit, write_checkpoint
from zerolite.utils.dtypes import CODES


def shards_of(key: str, tensor: torch.Tensor, boxes: Iterable[Box]) -> list[Shard]:
    return [Shard(key, tuple(tensor.shape), tensor.dtype, box, part_of(tensor, box)) for box in boxes]


def save(directory: Path, shards: Sequence[Shard]) -> CheckpointReader:
    state = {"optimizer": {"type": "AdamW", "groups": []}, "client_state": {}}
    write_checkpoint(directory, "a", shards, {}, Commit(directory, faults.manifest(1, "a"), state, TrainingRun()))
    return CheckpointReader(find(directory))


COLUMNS: list[Box] = [((0, 0), (6, 3)), ((0, 3), (6, 4)), ((0, 7), (6, 3))]  # a tensor-parallel cut of [6, 10]
ROWS: list[Box] = [((0, 0), (1, 10)), ((1, 0), (5, 10))]


def stretched(boxes: Sequence[Box], factor: int) -> list[Box]:
    return [((row, column * factor), (rows, columns * factor)) for (row, column), (rows, columns) in boxes]


@pytest.mark.parametrize("factor", [1, 9_001], ids=["", "several blocks"])  # a checksum is of a block of 1 MiB
@pytest.mark.parametrize("stored", [COLUMNS, ROWS, [((0, 0), (6, 10))]], ids=["columns", "rows", "whole"])
@pytest.mark.parametrize("wanted", [COLUMNS, ROWS, [((2, 5), (3, 2))]], ids=["columns", "rows", "inside"])
def test_any_cut_loads_into_any_other(tmp_path: Path, stored: list[Box], wanted: list[Box], factor: int) -> None:
    stored, wanted = stretched(stored, factor), stretched(wanted, factor)
    tensor = torch.arange(60.0 * factor).reshape(6, 10 * factor)
    reader = save(tmp_path, shards_of("w", tensor, stored))
    for dtype in (torch.float32, torch.float64):  # read straight into the place, and cast on the way
        places = [torch.full(box[1], -1, dtype=dtype) for box in wanted]
        shape = tuple(tensor.shape)
        reader.load([Shard("w", shape, dtype, box, place) for box, place in zip(wanted, places, strict=True)])
        for box, place in zip(wanted, places, strict=True):
            assert torch.equal(place, part_of(tensor, box).to(dtype))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_ranges_of_permuted_memory_are_boxes_of_the_tensor(tmp_path: Path, order: tuple[int, ...], ranks: int) -> None:
    shape = (3, 4, 1, 5)
    tensor = torch.randn([shape[dim] for dim in order]).permute(sorted(range(4), key=order.__getitem__))
    assert tuple(tensor.shape) == shape
    reader = save(tmp_path, faults.shards_of("w", tensor, ranks))
    assert torch.equal(reader.read("w"), tensor)
    contiguous = torch.zeros(60)
    reader.load(list(FlatRange("w", shape, torch.zeros(shape).stride(), 0, contiguous).shards()))
    assert torch.equal(contiguous.view(shape), tensor)


@pytest.mark.parametrize("boxes", [COLUMNS[:2], [*COLUMNS, COLUMNS[0]], [((0, 0), (6, 11))]], ids=str)
def test_parts_that_do_not_make_up_a_tensor_are_not_saved(tmp_path: Path, boxes: list[Box]) -> None:
    shards = [Shard("w", (6, 10), torch.float32, box, torch.zeros(box[1])) for box in boxes]
    with pytest.raises(CheckpointError, match=r"parts of 'w' do not make up its shape \(6, 10\)"):
        save(tmp_path, shards)
    assert [path.name for path in tmp_path.iterdir()] in ([], [".lock"])


# -------------------------------------------------------------------- the safetensors format

TENSOR_SHAPES = ((), (0,), (1,), (3, 5), (2, 0, 4), (2, 3, 4))


def any_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits that the dtype can have."""
    numel = math.prod(shape)
    if dtype is torch.bool:
        return (torch.arange(numel) % 3 == 0).view(shape)
    raw = (torch.arange(numel * dtype.itemsize) * 37 % 251).to(torch.uint8)
    return raw.view(dtype).view(shape) if numel else torch.empty(shape, dtype=dtype)


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    kinds = itertools.product(CODES, TENSOR_SHAPES)
    written = {f"{dtype} {shape} ü": any_bits(dtype, shape) for dtype, shape in kinds}
    entries = [ToStore(name, value.dtype, tuple(value.shape)) for name, value in written.items()]
    header, starts = build_header(entries, {"format": "pt"})
    content = bytearray(header)
    for start, value in zip(starts, written.values(), strict=True):
        assert start == len(content)
        content += as_bytes(value)
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    read = library.load_file(path)
    assert read.keys() == written.keys()
    for name, value in written.items():
        assert (read[name].dtype, read[name].shape) == (value.dtype, value.shape), name
        assert bytes(as_bytes(read[name])) == bytes(as_bytes(value)), name
    with pytest.importorskip("safetensors").safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


# -------------------------------------------------------------------- large files

WRITE = os.write


def parts_of(content: bytes, sizes: Sequence[int]) -> Iterator[memoryview]:
    """``content`` in parts of these sizes, again and again, writable and read-only by turns."""
    start, number = 0, 0
    while start < len(content):
        part = content[start : start + sizes[number % len(sizes)]]
        yield memoryview(bytearray(part) if number % 2 else part)
        start, number = start + len(part), number + 1


def write(path: Path, parts: Iterable[memoryview]) -> FileEntry:
    with FileWriter(path) as file:
        for part in parts:
            file.write(part)
        return file.finish()


def cut_short(descriptor: int, data: memoryview) -> int:
    return WRITE(descriptor, data[: max(4096, len(data) // 8192 * 4096)])


SIZED = [(size, {}) for size in (0, 1, 4096, BUFFER_BYTES - 1, BUFFER_BYTES, 3 * BUFFER_BYTES + 77)]


@pytest.mark.parametrize(("size", "changed"), [*SIZED, (BUFFER_BYTES + 9, {"write": cut_short})])
def test_all_bytes_arrive_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, changed: dict[str, Any]
) -> None:
    """Writes may be cut short."""
    content = os.urandom(size)
    for name, value in changed.items():
        monkeypatch.setattr(filesystem.os, name, value)
    entry = write(tmp_path / "a", parts_of(content, [3, 70_000, 1 << 20, 5_000_001, 20_000_000]))
    assert (tmp_path / "a").read_bytes() == content
    blocks = [content[start : start + BLOCK_BYTES] for start in range(0, size, BLOCK_BYTES)]
    assert entry == FileEntry(size, "".join(f"{zlib.crc32(block):08x}" for block in blocks))
    with CheckedFile(tmp_path / "a", entry) as file:
        assert file.read_all() == content


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_error_of_a_write_is_raised(tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) >= failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return WRITE(descriptor, data)

    monkeypatch.setattr(filesystem.os, "write", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write(tmp_path / "a", [memoryview(os.urandom(3 * BUFFER_BYTES))])
    assert caught.value.filename == str(tmp_path / "a") and len(calls) == failing


def test_an_error_of_the_source_of_bytes_is_raised(tmp_path: Path) -> None:
    def broken() -> Iterator[memoryview]:
        yield memoryview(bytes(BUFFER_BYTES + 100))
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write(tmp_path / "a", broken())
