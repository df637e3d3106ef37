"""The swap file: tensors on disk that two ways lead to, space that is really there and really goes, errors that say
what is wrong; and spans of tensors that are read together."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.toolkit.disks import small_disk
from zerolite.offload.placement import SPAN_ALIGNMENT
from zerolite.offload.swap_file import SwapFile
from zerolite.ops.async_io import AsyncIO, UnexpectedEnd
from zerolite.utils.accelerator import host_memory
from zerolite.zero.stage3.shard_reader import tensor_spans

KEY = "zero_optimization.offload_optimizer.nvme_path"
BLOCK = 4096
MIB = 1 << 20


@pytest.fixture(scope="module")
def io() -> Iterator[AsyncIO]:
    with AsyncIO(block_size=4 * BLOCK, queue_depth=4) as io:
        yield io


@pytest.fixture
def file(io: AsyncIO, tmp_path: Path) -> Iterator[SwapFile]:
    file = SwapFile(tmp_path, io, 3, KEY)
    yield file
    file.close()


def staging(nbytes: int) -> torch.Tensor:
    return host_memory(-(-nbytes // BLOCK) * BLOCK, pin=False)[:nbytes]


def fill(tensor: torch.Tensor, generator: random.Random) -> torch.Tensor:
    content = torch.Generator().manual_seed(generator.randrange(1 << 30))
    return tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=content))


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_both_ways_to_a_tensor_show_the_same(
    place: str, direct: bool, io: AsyncIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk through everything that can be done with three tensors of odd sizes, beside tensors in memory."""
    directory = tmp_path if place == "disk" else Path("/dev/shm")
    if not directory.is_dir():
        pytest.skip("there is no /dev/shm")
    if not direct:
        monkeypatch.setattr(SwapFile, "_open_direct", lambda self: None)
    file = SwapFile(directory, io, 0, KEY)
    if direct and not file.direct:
        pytest.skip(f"no direct I/O in {directory}")
    chance = random.Random(7)
    sizes = (5, 3 * BLOCK, 41 * BLOCK + 17)
    tensors, models = [file.zeros(n) for n in sizes], [torch.zeros(n, dtype=torch.uint8) for n in sizes]
    for _ in range(150):
        tensor, model, size = chance.choice(list(zip(tensors, models, sizes, strict=True)))
        start = chance.randrange(-(-size // BLOCK)) * BLOCK
        end = min(start + chance.randint(1, 12) * BLOCK, size)
        what = chance.randrange(5)
        if what == 0:
            low = chance.randrange(size)
            fill(model[low : low + 9000], chance)
            tensor[low : low + 9000] = model[low : low + 9000]
        elif what == 1:
            source = fill(staging(end - start), chance)
            file.write(tensor[start:end], source).wait()
            model[start:end] = source
        elif what == 2:
            into = staging(end - start)
            file.read(tensor[start:end], into).wait()
            assert torch.equal(into, model[start:end])
        elif what == 3:
            assert torch.equal(tensor, model)
        else:
            file.drop_page_cache()
    assert all(map(torch.equal, tensors, models))
    file.close()
    assert all(map(torch.equal, tensors, models))  # they live on


def test_space_is_allocated_at_once_and_comes_back(file: SwapFile) -> None:
    def on_disk() -> int:
        return os.stat(f"/proc/self/fd/{file._fd}").st_blocks * 512

    first, second, third = (file.zeros(MIB + 5) for _ in range(3))
    allocated = 3 * (MIB + BLOCK)
    assert file.nbytes == allocated <= on_disk()
    file.write(second, staging(MIB + 5).fill_(9)).wait()
    del second
    assert on_disk() <= allocated - MIB
    again = file.zeros(MIB + 5)
    assert file.nbytes == allocated and not again.any()
    assert first.data_ptr() != again.data_ptr() != third.data_ptr()
    del first, again, third
    kept = file.zeros(7)
    assert not kept.any() and file.nbytes == BLOCK


def test_directories_that_cannot_be_used(io: AsyncIO, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, words in (
        (tmp_path / "missing", "does not exist; make it or name another one"),
        (tmp_path / "file", "is not a directory; make it or name another one"),
        (Path("/proc"), "expected a directory in which files can be made, and making one in /proc failed:"),
    ):
        with pytest.raises(OSError, match=words) as raised:
            SwapFile(place, io, 0, KEY)
        assert KEY in str(raised.value) and str(place) in str(raised.value)
    (tmp_path / "gone").mkdir()
    file = SwapFile(tmp_path / "gone", io, 0, KEY)
    (tmp_path / "gone").rmdir()  # nothing is in it
    assert not file.zeros(MIB).any()
    file.close()


def test_file_systems_without_direct_io(
    io: AsyncIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def without(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", without)
    with caplog.at_level(logging.WARNING, "zerolite"):
        files = [SwapFile(tmp_path, io, 0, KEY) for _ in range(2)]
    assert caplog.text.count("does not allow direct I/O (Invalid argument)") == 1
    assert str(tmp_path) in caplog.text and KEY in caplog.text
    for file in files:
        assert not file.direct
        offloaded = file.zeros(9999)
        file.write(offloaded, staging(9999).fill_(4)).wait()
        assert offloaded.eq(4).all()
        file.close()


def in_fork(work: Callable[[], None]) -> int:
    """The id of a process that has done the work, and waits."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)  # the others were not forked
            work()
            os.write(writer, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_nothing_is_left_by_a_process_that_is_killed(tmp_path: Path) -> None:
    def free() -> int:
        return os.statvfs(disk).f_bfree * os.statvfs(disk).f_frsize

    def work() -> None:
        file = SwapFile(disk, AsyncIO(block_size=BLOCK), 0, KEY)
        offloaded = file.zeros(500_000).fill_(1)
        kept.extend((file, offloaded, file.write(offloaded, staging(500_000))))

    kept: list[object] = []
    with small_disk(tmp_path / "disk", "1m") as disk:
        before = free()
        pid = in_fork(work)
        assert free() <= before - 500_000 and not list(disk.iterdir())
        kill(pid)
        deadline = time.monotonic() + 20  # the kernel ends what was under way after the process
        while free() < before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert free() == before


def test_a_fork_does_not_touch_its_parents_file(io: AsyncIO, tmp_path: Path) -> None:
    file = SwapFile(tmp_path, io, 0, KEY)
    tensors = [file.zeros(5000).fill_(6)]

    def work() -> None:
        with pytest.raises(RuntimeError, match="a fork"):
            file.zeros(1)
        with pytest.raises(RuntimeError):
            file.drop_page_cache()
        file.close()
        tensors.clear()

    kill(in_fork(work))
    assert tensors[0].eq(6).all()
    into = staging(5000)
    file.read(tensors[0], into).wait()
    assert into.eq(6).all()
    file.close()


def test_a_file_that_somebody_cut(file: SwapFile) -> None:
    """An error where the bytes are missed, not a signal."""
    offloaded, into = file.zeros(20 * BLOCK), staging(20 * BLOCK)
    os.truncate(f"/proc/self/fd/{file._fd}", 7 * BLOCK)
    with pytest.raises(UnexpectedEnd) as raised:
        file.read(offloaded, into).wait()
    for words in ("reading 81920 bytes at byte 0", f"of rank 3 in {file.directory}", "the file ends at byte 28672"):
        assert words in str(raised.value)
    file.write(offloaded, into.fill_(3)).wait()  # makes it whole
    assert offloaded.eq(3).all()


def test_an_error_of_the_disk(file: SwapFile) -> None:
    offloaded = file.zeros(2 * BLOCK)
    fd = file._fd if file._direct is None else file._direct
    kept = os.dup(fd)
    os.dup2(os.open("/dev/null", os.O_RDONLY), fd)
    transfer = file.write(offloaded, staging(2 * BLOCK))
    for _ in range(2):
        with pytest.raises(OSError, match="writing 8192 bytes at byte 0 of the swap file of rank 3 in .* Bad file"):
            transfer.wait()
    os.dup2(kept, fd)
    os.close(kept)
    file.write(offloaded, staging(2 * BLOCK).fill_(1)).wait()
    assert offloaded.eq(1).all()


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
