"""Bytes a second of zerolite's asynchronous I/O, beside those of fio (or dd, without fio) past the page cache.

    python benchmarks/async_io.py                                  # 1 GiB in /tmp, 5 rounds
    python benchmarks/async_io.py --directory /mnt/nvme --nbytes 8GiB --queue-depth 32

All overwrite, and then read, the same file, whose space is there from the start; in each round the order is
another one. fio has the same block size and queue depth, and io_uring as its engine; dd has one block under way at a
time. "of fio" (or "of dd") is the median over rounds of the ratio within a round. "CPU" is the share of one core that
the process is busy, waiting included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import harness
from benchmarks.report import positive, render_table
from zerolite.ops.async_io import AsyncIO
from zerolite.utils.pinned_memory import host_memory
from zerolite.utils.sizes import format_size, parse_size

DIRECTIONS = ("write", "read")
GOAL = 0.9  # of the tool's


@dataclass(frozen=True)
class Speed:
    """bytes_per_s: of one pass over the file. cores: busy meanwhile; None where that is not known."""

    bytes_per_s: float
    cores: float | None = None


Pass = Callable[[str], Speed]


@dataclass
class Contender:
    """run: does what a direction of DIRECTIONS says. found: by direction, a speed for each round."""

    name: str
    run: Pass
    found: dict[str, list[Speed]] = field(default_factory=lambda: {direction: [] for direction in DIRECTIONS})


def op(io: AsyncIO, path: Path, nbytes: int) -> Pass:
    """zerolite's, with memory that is there already, as the step has it."""
    memory = host_memory(nbytes, pin=False)
    memory.view(torch.int64).random_()

    def run(direction: str) -> Speed:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            start, busy = time.perf_counter(), time.process_time()
            (io.write if direction == "write" else io.read)(fd, memory, 0).wait()
            elapsed = time.perf_counter() - start
        finally:
            os.close(fd)
        return Speed(nbytes / elapsed, (time.process_time() - busy) / elapsed)

    return run


def fio(path: Path, nbytes: int, block: int, depth: int) -> Pass:
    def run(direction: str) -> Speed:
        command = ["fio", "--name=zerolite", f"--filename={path}", f"--rw={direction}", f"--size={nbytes}"]
        command += [f"--bs={block}", f"--iodepth={depth}", "--ioengine=io_uring", "--direct=1", "--fallocate=none"]
        command += ["--invalidate=0", "--scramble_buffers=0", "--gtod_reduce=1", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return Speed(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]["bw_bytes"])

    return run


def dd(path: Path, nbytes: int, block: int) -> Pass:
    def run(direction: str) -> Speed:
        here = [f"of={path}", "if=/dev/zero", "oflag=direct", "iflag=count_bytes", "conv=notrunc"]
        if direction == "read":
            here = [f"if={path}", "of=/dev/null", "iflag=direct,count_bytes"]
        start = time.perf_counter()
        subprocess.run(["dd", f"bs={block}", f"count={nbytes}", "status=none", *here], check=True)
        return Speed(nbytes / (time.perf_counter() - start))

    return run


def contest(contenders: list[Contender], rounds: int) -> None:
    for contender in contenders:  # not timed: afterwards all of the file has been written
        contender.run("write")
    for number in range(rounds):
        turn = number % len(contenders)
        for direction in DIRECTIONS:
            for contender in contenders[turn:] + contenders[:turn]:
                contender.found[direction].append(contender.run(direction))


@dataclass(frozen=True)
class Row:
    """One contender. Speeds are in GB/s; "of_tool" compares with the first line."""

    name: str
    absent: str | None = None
    write_speed: float | None = None
    write_of_tool: float | None = None
    write_cores: float | None = None
    read_speed: float | None = None
    read_of_tool: float | None = None
    read_cores: float | None = None


def summarise(contender: Contender, tool: Contender) -> Row:
    values: dict[str, float | None] = {}
    for direction, found in contender.found.items():
        cores = [speed.cores for speed in found if speed.cores is not None]
        values[f"{direction}_speed"] = statistics.median(speed.bytes_per_s for speed in found) / 1e9
        values[f"{direction}_of_tool"] = ratio(contender, tool, direction)
        values[f"{direction}_cores"] = statistics.median(cores) if cores else None
    return Row(contender.name, **values)  # type: ignore[arg-type]


def columns(tool: str) -> Iterator[tuple[str, str, str]]:
    yield "", "name", "{}"
    for direction in DIRECTIONS:
        yield f"{direction} GB/s", f"{direction}_speed", "{:.2f}"
        yield f"of {tool}", f"{direction}_of_tool", "{:.2f}"
        yield "CPU", f"{direction}_cores", "{:.1%}"


def ratio(contender: Contender, tool: Contender, direction: str) -> float:
    pairs = zip(contender.found[direction], tool.found[direction], strict=True)
    return statistics.median(mine.bytes_per_s / its.bytes_per_s for mine, its in pairs)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where the file is made")
    parser.add_argument("--nbytes", type=parse_size, default=1 << 30, help="of the file (default: 1GiB)")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--block-size", type=parse_size, default=1 << 20, help="default: 1MiB")
    parser.add_argument("--queue-depth", type=positive, default=8)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--backends", default="io_uring,threads,python", help="comma-separated")
    args = parser.parse_args(argv)
    args.nbytes = -(-args.nbytes // args.block_size) * args.block_size
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    block, depth = args.block_size, args.queue_depth
    with tempfile.NamedTemporaryFile(prefix="zerolite-async-io-", dir=args.directory) as file:
        path = Path(file.name)
        os.posix_fallocate(file.fileno(), 0, args.nbytes)
        use_fio = shutil.which("fio") is not None
        tool = fio(path, args.nbytes, block, depth) if use_fio else dd(path, args.nbytes, block)
        contenders = [Contender("fio" if use_fio else "dd", tool)]
        absent = []
        for backend in args.backends.split(","):
            try:
                io = AsyncIO(block, depth, args.threads, backend=backend)
                contenders.append(Contender(backend, op(io, path, args.nbytes)))
            except RuntimeError as error:
                absent.append(Row(backend, str(error)))
        contest(contenders, args.rounds)
    rows = [summarise(contender, contenders[0]) for contender in contenders]
    print(f"{format_size(args.nbytes)}, blocks of {block} bytes, {depth} in flight, {args.rounds} rounds\n")
    print(render_table(rows + absent, args.markdown, tuple(columns(contenders[0].name))))
    for row in rows[1:]:
        print(f"{row.name}: {row.write_of_tool:.0%} and {row.read_of_tool:.0%} of {rows[0].name}, goal {GOAL:.0%}")
    found = {c.name: {d: [asdict(speed) for speed in c.found[d]] for d in DIRECTIONS} for c in contenders}
    harness.write_json(args, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
