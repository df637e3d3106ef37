"""The safetensors format: what is written is what other readers read."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch

from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.safetensors import ToStore, as_bytes, build_header
from zerolite.utils.dtypes import CODES

SHAPES = ((), (0,), (1,), (3, 5), (2, 0, 4), (2, 3, 4))


def values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits that the dtype can have."""
    numel = math.prod(shape)
    if dtype is torch.bool:
        return (torch.arange(numel) % 3 == 0).view(shape)
    raw = (torch.arange(numel * dtype.itemsize) * 37 % 251).to(torch.uint8)
    return raw.view(dtype).view(shape) if numel else torch.empty(shape, dtype=dtype)


def tensors() -> dict[str, torch.Tensor]:
    return {
        f"{str(dtype).removeprefix('torch.')}.{number} ü": values(dtype, shape)
        for dtype in CODES
        for number, shape in enumerate(SHAPES)
    }


def content(of: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    entries = [ToStore(name, value.dtype, tuple(value.shape)) for name, value in of.items()]
    header, starts = build_header(entries, metadata)
    result = bytearray(header)
    for start, value in zip(starts, of.values(), strict=True):
        assert start == len(result)
        result += as_bytes(value)
    return bytes(result)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bytes(as_bytes(one)) == bytes(as_bytes(other))


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    written = tensors()
    path = tmp_path / "model.safetensors"
    path.write_bytes(content(written, {"format": "pt"}))
    read = library.load_file(path)
    assert read.keys() == written.keys()
    assert all(same_bits(read[name], value) for name, value in written.items())
    with pytest.importorskip("safetensors").safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_bytes_of_a_tensor_keep_its_memory_alive() -> None:
    tensor = torch.arange(1 << 18, dtype=torch.int32)
    view = as_bytes(tensor)
    expected = bytes(view)
    del tensor
    gc.collect()
    others = [torch.full((1 << 18,), -1, dtype=torch.int32) for _ in range(4)]  # would take the memory if it were free
    assert bytes(view) == expected
    assert len(others) == 4


@pytest.mark.parametrize("tensor", [torch.zeros(3, 4).t(), torch.zeros(2, dtype=torch.complex64).conj()])
def test_bytes_of_what_is_not_in_memory_as_it_reads_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected a contiguous CPU tensor"):
        as_bytes(tensor)


def test_a_dtype_that_the_format_lacks_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'wave' is of torch.complex128.*bfloat16"):
        build_header([ToStore("wave", torch.complex128, (2,))])


@pytest.mark.parametrize("names", [("a", "a"), ("__metadata__",)])
def test_names_that_a_header_cannot_have_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="each tensor's name once"):
        build_header([ToStore(name, torch.uint8, (1,)) for name in names])
