"""The safetensors format: what is written is what other readers read, and nothing in a file is trusted."""

from __future__ import annotations

import gc
import io
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.safetensors import (
    MAX_HEADER_BYTES,
    ToStore,
    as_bytes,
    build_header,
    read_header,
    tensor_on,
)
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


def test_every_dtype_and_shape_comes_back_with_its_bits() -> None:
    written = tensors()
    file = content(written, {"a": "b"})
    header = read_header(io.BytesIO(file), len(file))
    assert list(header.tensors) == list(written)
    assert header.metadata == {"a": "b"}
    assert header.data_start % 8 == 0
    buffer = bytearray(file)
    for name, stored in header.tensors.items():
        got = tensor_on(buffer, stored.dtype, stored.shape, stored.start)
        assert same_bits(got, written[name]), name
    last = tensor_on(buffer, torch.uint8, (3,), len(buffer) - 3)
    last.fill_(7)
    assert buffer[-3:] == b"\7\7\7"  # a view, not a copy


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


def test_what_the_safetensors_library_writes_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    written = tensors()
    path = tmp_path / "model.safetensors"
    library.save_file(written, path, metadata={"one": "1"})
    buffer = bytearray(path.read_bytes())
    with path.open("rb") as file:
        header = read_header(file, len(buffer))
    assert header.metadata == {"one": "1"}
    assert header.tensors.keys() == written.keys()
    for name, stored in header.tensors.items():
        assert same_bits(tensor_on(buffer, stored.dtype, stored.shape, stored.start), written[name]), name


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


# -------------------------------------------------------------------- files that lie


def tensor(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def lying(header: Any, data: int = 4, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "expected at least 8 bytes, found 0"),
    "short": (b"\0" * 7, "expected at least 8 bytes, found 7"),
    "header beyond the file": (lying({}, 0, 3), "expected a header of 3 bytes, found 2 in the file"),
    "huge header": (lying({}, 0, 2**64 - 1), f"at most {MAX_HEADER_BYTES} bytes, found {2**64 - 1}"),
    "no header": (lying(b"", 4), r"begins with '\{', found b''"),
    "a list": (lying([]), r"begins with '\{'"),
    "cut off": (lying(b'{"a":'), "JSON"),
    "UTF-16": (lying("{}".encode("utf-16-le")), "JSON"),
    "not UTF-8": (lying(b'{"\xff": 1}'), "JSON.*utf-8"),
    "a lone surrogate": (lying(b'{"\\ud800": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}'), "surrogates"),
    "deep": (lying(b'{"a":' + b"[" * 100_000), "JSON"),
    "a name twice": (lying(b'{"a": 1, "b": 2, "a": 3}'), "'a' comes twice"),
    "a key twice": (lying(b'{"a": {"dtype": "U8", "dtype": "I8"}}'), "'dtype' comes twice"),
    "NaN": (lying(b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 4]}}'), "the constant NaN"),
    "many digits": (lying(b'{"a": ' + b"9" * 5000 + b"}"), "a number of 5000 digits"),
    "metadata of numbers": (lying({"__metadata__": {"a": 1}, "b": tensor()}), "to map strings to strings"),
    "metadata in a list": (lying({"__metadata__": ["a"], "b": tensor()}), "to map strings to strings"),
    "no entry": (lying({"a": 4}), "expected dtype, shape and data_offsets, found 4"),
    "no shape": (lying({"a": {"dtype": "U8", "data_offsets": [0, 4]}}), "expected dtype, shape and data_offsets"),
    "more keys": (lying({"a": tensor(strides=[1])}), "expected dtype, shape and data_offsets"),
    "unknown dtype": (lying({"a": tensor("F31")}), "found 'F31'"),
    "dtype of a list": (lying({"a": tensor(["U8"])}), "expected a dtype out of"),
    "negative size": (lying({"a": tensor(shape=[-2, -2])}), "whole numbers from 0 on"),
    "fraction": (lying({"a": tensor(shape=[4.0])}), "whole numbers from 0 on"),
    "true": (lying({"a": tensor(shape=[True, 4])}), "whole numbers from 0 on"),
    "shape of text": (lying({"a": tensor(shape="4")}), "whole numbers from 0 on"),
    "many dimensions": (lying({"a": tensor(shape=[1] * 65 + [4])}), "at most 64"),
    "huge product": (lying({"a": tensor(shape=[2**62, 2**62])}), r"at most 2\*\*63 - 1"),
    "product that wraps": (lying({"a": tensor(shape=[2**32, 2**32, 4])}), r"at most 2\*\*63 - 1"),
    "huge and empty": (lying({"a": tensor(shape=[2**62, 0, 2**62], offsets=[0, 0])}, 0), r"at most 2\*\*63 - 1"),
    "another length": (lying({"a": tensor("F32", [4])}), r"expected 16 bytes for shape \(4,\) of F32, found 4"),
    "negative offset": (lying({"a": tensor(offsets=[-4, 0])}), "within the 4 bytes"),
    "backwards": (lying({"a": tensor(offsets=[4, 0])}), "within the 4 bytes"),
    "three offsets": (lying({"a": tensor(offsets=[0, 4, 4])}), "within the 4 bytes"),
    "behind the end": (lying({"a": tensor(offsets=[1, 5])}), "within the 4 bytes"),
    "overlap": (lying({"a": tensor(), "b": tensor(offsets=[2, 6])}, 6), r"tensor 'b'.*overlaps.*byte \d+"),
    "the same bytes": (lying({"a": tensor(), "b": tensor()}), "overlaps"),
    "a hole": (lying({"a": tensor(), "b": tensor(offsets=[5, 9])}, 9), r"tensor 'b'.*hole"),
    "a hole at the front": (lying({"a": tensor(offsets=[1, 5])}, 5), "hole"),
    "more data": (lying({"a": tensor()}, 5), r"expected \d+ bytes, found \d+ in the file"),
    "data without tensors": (lying({}, 1), r"expected 10 bytes, found 11 in the file"),
    "a name as long as a book": (lying({"a" * 10_000: 1}), r"a… \(10002 characters\): expected dtype"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_lies_is_refused_with_its_name(what: str) -> None:
    file, says = HOSTILE[what]
    with pytest.raises(CheckpointError, match=says) as caught:
        read_header(io.BytesIO(file), len(file), "some/model.safetensors")
    assert str(caught.value).startswith("safetensors file 'some/model.safetensors'")
    assert len(str(caught.value)) < 1000


def test_a_file_is_called_by_its_own_name_and_may_have_shrunk(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(lying({"a": tensor()})[:20])
    with path.open("rb") as file, pytest.raises(CheckpointError, match=r"cut\.safetensors.*found 12 in the file"):
        read_header(file, 200)
