"""Large files past the page cache: the bytes, the errors, and file systems that have no such thing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from zerolite.checkpoint import direct_write
from zerolite.checkpoint.direct_write import BATCH_BYTES
from zerolite.checkpoint.filesystem import batches_of, write_file

SIZES = [0, 1, 4096, BATCH_BYTES - 1, BATCH_BYTES, 3 * BATCH_BYTES + 77]


def batches(content: bytes, sizes: Sequence[int]) -> Iterator[list[memoryview]]:
    """``content`` from parts of these sizes, again and again, writable and read-only by turns."""
    return batches_of(_parts(content, sizes))


def _parts(content: bytes, sizes: Sequence[int]) -> Iterator[memoryview]:
    start, number = 0, 0
    while start < len(content):
        part = content[start : start + sizes[number % len(sizes)]]
        yield memoryview(bytearray(part) if number % 2 else part)
        start, number = start + len(part), number + 1


@pytest.mark.parametrize("size", SIZES)
def test_all_bytes_arrive_in_order(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    write_file(tmp_path / "a", batches(content, [3, 70_000, 1 << 20, 5_000_001]), directly=True)
    assert (tmp_path / "a").read_bytes() == content


@pytest.mark.parametrize("served", ["not taken", "not served"])
def test_without_direct_access(tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(2 * BATCH_BYTES + 5)
    if served == "not taken":
        monkeypatch.setattr(direct_write.os, "O_DIRECT", 0)
    else:
        write = os.write

        def refuse(descriptor: int, data: memoryview) -> int:
            if direct_write.fcntl.fcntl(descriptor, direct_write.fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return write(descriptor, data)

        monkeypatch.setattr(direct_write.os, "write", refuse)
    write_file(tmp_path / "a", batches(content, [1 << 20]), directly=True)
    assert (tmp_path / "a").read_bytes() == content


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_error_of_the_thread_is_raised(tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = os.write, []

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) >= failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(direct_write.os, "write", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_file(tmp_path / "a", batches(os.urandom(3 * BATCH_BYTES), [1 << 20]), directly=True)
    assert caught.value.filename == str(tmp_path / "a") and len(calls) == failing


def test_an_error_of_whoever_gives_the_bytes_is_raised(tmp_path: Path) -> None:
    def broken() -> Iterator[list[memoryview]]:
        yield [memoryview(bytes(100))]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_file(tmp_path / "a", broken(), directly=True)


def test_writes_that_are_cut_short_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(
        direct_write.os, "write", lambda fd, data: write(fd, data[: max(4096, len(data) // 8192 * 4096)])
    )
    content = os.urandom(BATCH_BYTES + 9)
    write_file(tmp_path / "a", batches(content, [1 << 20]), directly=True)
    assert (tmp_path / "a").read_bytes() == content
