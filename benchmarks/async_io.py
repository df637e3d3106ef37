"""Bytes a second of zerolite's asynchronous I/O, beside those of fio (or dd, without fio) past the page cache.

    python benchmarks/async_io.py                                  # 1 GiB in /tmp, 5 rounds
    python benchmarks/async_io.py --directory /mnt/nvme --nbytes 8GiB --queue-depth 32

All overwrite, and then read, the same file, whose space is there from the start; every second round has the opposite
order. fio has the same block size and queue depth, and io_uring as its engine; dd has one block under way at a time.
"of fio" (or "of dd") is the median over rounds of the ratio within a round. "CPU" is the share of one core that the
process is busy, waiting included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import harness, options
from benchmarks.report import Columns, Row, make_rows, median, ratio, render_table
from zerolite.ops.async_io import AsyncIO
from zerolite.utils.accelerator import host_memory
from zerolite.utils.text import format_size, parse_size

DIRECTIONS = ("write", "read")
GOAL = 0.9  # of the tool's
# One pass over the file in a direction: bytes a second, and the cores that are busy meanwhile where that is known.
Pass = Callable[[str], tuple[float, float | None]]


def op(io: AsyncIO, path: Path, nbytes: int) -> Pass:
    """zerolite's, with memory that is there already, as the step has it."""
    memory = host_memory(nbytes, pin=False)
    memory.view(torch.int64).random_()

    def run(direction: str) -> tuple[float, float]:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            start, busy = time.perf_counter(), time.process_time()
            (io.write if direction == "write" else io.read)(fd, memory, 0).wait()
            elapsed = time.perf_counter() - start
        finally:
            os.close(fd)
        return nbytes / elapsed, (time.process_time() - busy) / elapsed

    return run


def fio(path: Path, nbytes: int, block: int, depth: int, direction: str) -> tuple[float, None]:
    command = ["fio", "--name=zerolite", f"--filename={path}", f"--rw={direction}", f"--size={nbytes}"]
    command += [f"--bs={block}", f"--iodepth={depth}", "--ioengine=io_uring", "--direct=1", "--fallocate=none"]
    command += ["--invalidate=0", "--scramble_buffers=0", "--gtod_reduce=1", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]["bw_bytes"], None


def dd(path: Path, nbytes: int, block: int, direction: str) -> tuple[float, None]:
    here = [f"of={path}", "if=/dev/zero", "oflag=direct", "iflag=count_bytes", "conv=notrunc"]
    if direction == "read":
        here = [f"if={path}", "of=/dev/null", "iflag=direct,count_bytes"]
    start = time.perf_counter()
    subprocess.run(["dd", f"bs={block}", f"count={nbytes}", "status=none", *here], check=True)
    return nbytes / (time.perf_counter() - start), None


def columns(tool: str) -> Columns:
    found = [("", "name", "{}")]
    for direction in DIRECTIONS:
        found.append((f"{direction} GB/s", f"{direction}_gb_s", "{:.2f}"))
        found.append((f"of {tool}", f"{direction}_of_tool", "{:.2f}"))
        found.append(("CPU", f"{direction}_cores", "{:.1%}"))
    return found


def measure(passes: dict[str, Pass], absent: dict[str, str], rounds: int) -> list[Row]:
    """The first of the passes is the tool that the others are compared with."""
    tool = next(iter(passes))
    for run in passes.values():  # not timed: afterwards all of the file has been written
        run("write")
    found: dict[str, Row] = {name: {} for name in passes}
    for direction in DIRECTIONS:
        results = harness.in_turns({name: partial(run, direction) for name, run in passes.items()}, rounds)
        speeds = {name: [speed for speed, _ in own] for name, own in results.items()}
        for name, own in results.items():
            found[name][f"{direction}_gb_s"] = (median(speeds[name]) or 0.0) / 1e9
            found[name][f"{direction}_of_tool"] = ratio(speeds[name], speeds[tool])
            found[name][f"{direction}_cores"] = median(cores for _, cores in own)
            found[name][f"{direction}_bytes_per_s"] = speeds[name]
    return make_rows([*passes, *absent], absent, columns(tool), found.__getitem__)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options.make_parser(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where the file is made")
    parser.add_argument("--nbytes", type=parse_size, default=1 << 30, help="of the file (default: 1GiB)")
    parser.add_argument("--rounds", type=options.positive, default=5)
    parser.add_argument("--block-size", type=parse_size, default=1 << 20, help="default: 1MiB")
    parser.add_argument("--queue-depth", type=options.positive, default=8)
    parser.add_argument("--threads", type=options.positive, default=1)
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
        passes: dict[str, Pass] = {"dd": partial(dd, path, args.nbytes, block)}
        if shutil.which("fio") is not None:
            passes = {"fio": partial(fio, path, args.nbytes, block, depth)}
        absent: dict[str, str] = {}
        for backend in args.backends.split(","):
            try:
                passes[backend] = op(AsyncIO(block, depth, args.threads, backend=backend), path, args.nbytes)
            except RuntimeError as error:
                absent[backend] = str(error)
        rows = measure(passes, absent, args.rounds)
    tool, *ours = (row for row in rows if row["absent"] is None)
    about = f"{format_size(args.nbytes)}, blocks of {block} bytes, {depth} in flight, {args.rounds} rounds\n"
    goals = [
        f"{row['name']}: {row['write_of_tool']:.0%} and {row['read_of_tool']:.0%} of {tool['name']}, goal {GOAL:.0%}"
        for row in ours
    ]
    harness.publish(args, about, [render_table(rows, args.markdown, columns(tool["name"])), *goals], results=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
