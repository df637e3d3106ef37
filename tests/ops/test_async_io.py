"""Asynchronous I/O: every backend gives the bytes, and the errors, that plain reads and writes give."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from zerolite.ops import async_io
from zerolite.ops.async_io import AsyncIO, UnexpectedEnd
from zerolite.utils.accelerator import host_memory

BLOCK = 4096
GXX = shutil.which("g++") or shutil.which("c++")
backends = pytest.mark.parametrize("backend", ["io_uring", "threads", "python"])


def make(backend: str, **options: int) -> AsyncIO:
    try:
        return AsyncIO(**{"block_size": BLOCK, "backend": backend, **options})  # type: ignore[arg-type]
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def numbers(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@backends
@pytest.mark.parametrize("depth, threads", [(1, 1), (3, 2)])
def test_any_lengths_and_positions(backend: str, depth: int, threads: int, file: int) -> None:
    for nbytes, offset in itertools.product((0, 1, 4095, 4096, 4097, 3 * 4096, 50_003), (0, 1, 4096, 9999)):
        with make(backend, queue_depth=depth, thread_count=threads) as io:
            source, into = numbers(nbytes, offset), torch.empty(nbytes, dtype=torch.uint8)
            io.write(file, source, offset).wait()
            assert os.pread(file, nbytes, offset) == bytes(source.tolist())
            io.read(file, into, offset).wait()
            assert torch.equal(into, source)


@backends
def test_direct_io_of_typed_tensors(backend: str, tmp_path: Path) -> None:
    try:
        fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no direct I/O in {tmp_path}: {error}")
    memory = host_memory(10 * BLOCK, pin=False)
    values = memory.view(torch.float32)[:9999]
    values.normal_()
    expected = values.clone()
    with make(backend, block_size=2 * BLOCK) as io:
        io.write(fd, values, 0, 10 * BLOCK).wait()
        memory.zero_()
        io.read(fd, values, 0, 10 * BLOCK).wait()
        assert torch.equal(values, expected)
        with pytest.raises(UnexpectedEnd, match="failed after 40960 of them: the file ends at byte 40960"):
            io.read(fd, host_memory(20 * BLOCK, pin=False), 0).wait()
        os.ftruncate(fd, 5000)  # in the middle of a block
        with pytest.raises(UnexpectedEnd, match="failed after 5000 of them: the file ends at byte 5000"):
            io.read(fd, values, 0, 10 * BLOCK).wait()
    os.close(fd)


@pytest.mark.parametrize(("backend", "depth"), [("io_uring", 1), ("threads", 32), ("python", 1)])
def test_thousands_of_requests_from_several_threads(backend: str, depth: int, file: int) -> None:
    source, count = numbers(64 * 300), 300
    with make(backend, queue_depth=depth, thread_count=2) as io:

        def work(number: int) -> None:
            order = random.Random(number).sample(range(count), count)
            base = number * source.numel()
            for request in [io.write(file, source[64 * i : 64 * i + 64], base + 64 * i) for i in order]:
                request.wait()
            into = torch.empty_like(source)
            for request in [io.read(file, into[64 * i : 64 * i + 64], base + 64 * i) for i in reversed(order)]:
                request.wait()
            assert torch.equal(into, source)

        with ThreadPoolExecutor(4) as workers:
            list(workers.map(work, range(4)))  # raises what they raise


@backends
def test_end_of_the_file_is_an_error(backend: str, file: int) -> None:
    os.pwrite(file, b"x" * 10_000, 0)
    with make(backend) as io:
        request = io.read(file, torch.empty(40_000, dtype=torch.uint8), 100, file="the swap file")
        for _ in range(2):
            with pytest.raises(UnexpectedEnd) as raised:
                request.wait()
            read = "reading 40000 bytes at byte 100 of the swap file failed after 9900 of them"
            assert raised.value.strerror == f"{read}: the file ends at byte 10000" and request.ended()


@backends
def test_errors_of_the_system(backend: str, file: int, tmp_path: Path) -> None:
    readable = os.open(tmp_path / "file", os.O_RDONLY)
    with make(backend) as io:
        with pytest.raises(OSError, match=r"writing 9 bytes at byte 3 of file \d+ failed .* at byte 3: Bad") as e:
            io.write(readable, numbers(9), 3).wait()
        assert e.value.errno == errno.EBADF
        with pytest.raises(OSError) as e:
            io.read(os.open(tmp_path, os.O_RDONLY), torch.empty(9), 0, 36).wait()
        assert e.value.errno == errno.EISDIR
        io.write(file, numbers(100_000), 0).wait()  # it goes on
    os.close(readable)


def in_a_fork(work: Callable[[], None]) -> None:
    """Let a fork of this process do ``work``, which must not raise there."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@backends
def test_short_writes_are_continued_until_the_error(backend: str, file: int) -> None:
    """A limit on the length of files cuts the write that crosses it."""
    make(backend).close()

    def write() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        words = "writing 50000 bytes at byte 0 of file .* failed after 10000 of them, at byte 10000: File too"
        with make(backend, queue_depth=1) as io, pytest.raises(OSError, match=words) as caught:
            io.write(file, numbers(50_000), 0).wait()
        assert caught.value.errno == errno.EFBIG

    in_a_fork(write)
    assert os.pread(file, 50_000, 0) == bytes(numbers(50_000)[:10_000].tolist())


@backends
def test_a_fork_is_refused_and_harms_nothing(backend: str, file: int) -> None:
    io = make(backend)
    source = numbers(1_000_000)
    request = io.write(file, source, 0)

    def try_all() -> None:
        nonlocal io, request
        for call in (request.wait, request.ended, lambda: io.read(file, source, 0)):
            with pytest.raises(RuntimeError, match="a fork of it: it has to make an AsyncIO of its own"):
                call()
        io.close()
        request = io = None  # type: ignore[assignment]
        AsyncIO(backend=backend).write(file, torch.ones(7, dtype=torch.uint8), 2_000_000).wait()

    in_a_fork(try_all)
    request.wait()
    assert os.pread(file, 3_000_000, 0) == bytes(source.tolist()) + bytes(1_000_000) + b"\1" * 7
    io.read(file, source.zero_(), 0).wait()
    assert torch.equal(source, numbers(1_000_000))
    io.close()


@backends
def test_closing_waits_for_what_is_under_way(backend: str, file: int) -> None:
    io = make(backend, queue_depth=2)
    source = numbers(2_000_000)
    good = io.write(file, source, 0)
    bad = io.read(file, torch.empty(100, dtype=torch.uint8), 10_000_000)
    io.close()
    assert os.pread(file, 2_000_000, 0) == bytes(source.tolist())
    assert good.ended() and bad.ended()
    good.wait()
    with pytest.raises(UnexpectedEnd):
        bad.wait()
    with pytest.raises(ValueError, match="this AsyncIO is closed"):
        io.read(file, source, 0)
    io.close()


@backends
def test_nobody_needs_to_wait(backend: str, file: int, caplog: pytest.LogCaptureFixture) -> None:
    """A dropped request keeps its memory until it has ended, and a failure is not lost."""
    io = make(backend)
    for start in range(0, 400_000, 40_000):
        io.write(file, numbers(40_000, start), start)
    for start in range(0, 400_000, 40_000):
        assert os.pread(file, 40_000, start) == bytes(numbers(40_000, start).tolist())
    with caplog.at_level(logging.WARNING, "zerolite"):
        io.read(file, numbers(10), 1_000_000)
    assert "A request that was not waited for has failed: [Errno 5] reading 10 bytes at byte 1000000" in caplog.text
    io.close()


def test_arguments_out_of_range() -> None:
    for options, words in (
        ({"block_size": 5000}, "aio.block_size: expected a multiple of 4096 up to 1073741824"),
        ({"block_size": 0}, "got 0"),
        ({"queue_depth": 0}, "aio.queue_depth: expected a number from 1 to 4096, got 0"),
        ({"thread_count": -1}, "aio.thread_count: expected a number from 1 to 4096, got -1"),
        ({"backend": "gds"}, "expected a backend of auto, io_uring, threads, python, got 'gds'"),
    ):
        with pytest.raises(ValueError, match=words):
            AsyncIO(**options)  # type: ignore[arg-type]
    with AsyncIO() as io:
        for tensor, nbytes, words in (
            (torch.empty(4, 4).t()[:2], None, "expected a contiguous tensor on the CPU"),
            (torch.empty(4, device="meta"), None, "expected a contiguous tensor on the CPU"),
            (torch.empty(8)[4:], 17, "expected memory of 17 bytes, got 16"),
            (torch.empty(8), -1, "expected memory of -1 bytes"),
        ):
            with pytest.raises(ValueError, match=words):
                io.read(0, tensor, 0, nbytes)
        with pytest.raises(ValueError, match="expected an open file and a position in it, got 0 and -1"):
            io.read(0, torch.empty(1), -1)


def test_python_takes_over_where_there_is_no_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, file: int
) -> None:
    monkeypatch.setattr(async_io, "unavailable_reason", lambda: "There is no compiler for the test.")
    with caplog.at_level(logging.WARNING, "zerolite"):
        for _ in range(2):
            with AsyncIO() as io:
                assert io.backend == "python"
                io.write(file, numbers(10_000), 0).wait()
    assert caplog.text.count("Python's threads do it instead: There is no compiler for the test.") == 1
    with pytest.raises(RuntimeError, match="Asynchronous I/O with threads is not available: There is no compiler"):
        AsyncIO(backend="threads")


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
static int calls;
long syscall(long number, ...) {
  static long (*real)(long, ...);
  if (!real) *(void**)&real = dlsym(RTLD_NEXT, "syscall");
  va_list list;
  long a[6];
  va_start(list, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
  if (number == 425 && getenv("SHIM_NO_RING")) return errno = EPERM, -1;
  if (number == 426 && getenv("SHIM_TROUBLE") && ++calls % 3) return errno = calls % 3 == 1 ? EINTR : EBUSY, -1;
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"""

SHIMMED = """
import json, os, sys, torch
from zerolite.ops.async_io import AsyncIO
from zerolite.utils.accelerator import host_memory
options = json.loads(sys.argv[1])
io = AsyncIO(block_size=4096, queue_depth=8, **options)
fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT | os.O_DIRECT)
source, into = (host_memory(200 * 4096, False).view(torch.int64) for _ in range(2))
source.random_()
io.write(fd, source, 0).wait()
io.read(fd, into, 0).wait()
io.close()
print(io.backend, torch.equal(source, into))
"""


@pytest.mark.slow
@pytest.mark.skipif(GXX is None, reason="no C++ compiler on the PATH")
def test_trouble_with_io_uring(tmp_path: Path) -> None:
    """A library stands between csrc/aio and the system calls of io_uring."""
    make("io_uring").close()
    (tmp_path / "shim.c").write_text(SHIM)
    compiler = [str(GXX), "-x", "c", "-shared", "-fPIC", "shim.c", "-o", "shim.so", "-ldl"]
    subprocess.run(compiler, cwd=tmp_path, check=True)

    def run(options: dict[str, object], trouble: str) -> str:
        command = [sys.executable, "-c", SHIMMED, json.dumps(options), str(tmp_path / "file")]
        environment = {**os.environ, "LD_PRELOAD": str(tmp_path / "shim.so"), trouble: "1"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        return result.stdout.strip() or result.stderr

    assert run({}, "SHIM_NO_RING") == "threads True"
    assert run({"thread_count": 3}, "SHIM_TROUBLE") == "io_uring True"
    refused = run({"backend": "io_uring"}, "SHIM_NO_RING")
    assert "cannot have io_uring: Operation not permitted. Containers often forbid" in refused


@pytest.mark.slow
def test_a_program_that_ends_in_the_middle(tmp_path: Path) -> None:
    """Requests that were begun are finished."""
    code = f"""
import os, sys, torch
from zerolite.ops.async_io import AsyncIO
io = AsyncIO(block_size=4096, queue_depth=2, backend=sys.argv[1])
fd = os.open({str(tmp_path / "file")!r}, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
requests = [io.write(fd, torch.full((100_000,), 5, dtype=torch.uint8), 100_000 * i) for i in range(50)]
"""
    for backend in ("threads", "io_uring", "python"):
        subprocess.run([sys.executable, "-c", code, backend], check=True, timeout=60)
        assert (tmp_path / "file").read_bytes() == b"\5" * 5_000_000
