"""Time one AdamW update, and what a mixed-precision step does around it, beside torch, DeepSpeed and the memory's own.

    python benchmarks/adam.py                                   # 50 M parameters on the CPU
    python benchmarks/adam.py --numel 5000000 --rounds 15 --sections fp32,norm --markdown
    python benchmarks/adam.py --device cuda --numel 500000000   # the limit is a copy on the device

fp32: parameter, gradient and both moments in fp32. bf16: gradient bf16, master and moments fp32, weight bf16; zerolite
takes all of it in one call, others cast and unscale the gradient before their optimizer and cast the weight after it.
tensors: 1,000 tensors of 1,000 elements, in fp32: as segments of one buffer with rows of scalars in turn (so that no
two neighbours are one segment), as tensors of their own, and as one tensor of a million. norm: the sum of squares.

"limit" is no optimizer: on the CPU a loop in C that reads and writes the same fp32 arrays with one addition for each
that is written (-O3 -march=native, as many threads as torch), on CUDA a copy of as many bytes within the device, for
the norm torch's sum. GB/s are the bytes that must move at least, over the median time of a call: what a competitor
moves more than once counts once. All run in one process, in turns; the order turns around every round, and ratios are
medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils.benchmark import Timer

from benchmarks import harness, options
from benchmarks.optimizer_sections import SECTIONS, Contender
from benchmarks.optimizers import Call
from benchmarks.report import Columns, Row, columns_in_use, make_rows, ratio, render_table

TURN_S = 0.1  # calls in a turn take about this long together


def columns(section: str) -> Columns:
    return (
        (section, "name", "{}"),
        ("ms", "ms", "{:.2f}"),
        ("min", "min_ms", "{:.2f}"),
        ("max", "max_ms", "{:.2f}"),
        ("GB/s", "gb_s", "{:.1f}"),
        ("of limit", "to_limit", "{:.2f}"),
        ("x first", "to_first", "{:.2f}"),
    )


def measure(section: str, contenders: dict[str, Contender], rounds: int) -> list[Row]:
    """Time all contenders of a section. "to_first": time over the first one's; "to_limit": share of the limit's
    speed."""
    timers: dict[str, Timer] = {}
    absent: dict[str, str] = {}
    for name, contender in contenders.items():
        try:
            timers[name] = timer_of(contender.make())
        except Exception as error:  # of another library, of a compiler: it keeps its line, with the reason
            absent[name] = " ".join(str(error).split())[:160] or type(error).__name__
    calls = {name: lambda timer=timer: seconds_of(timer) for name, timer in timers.items()}
    times = harness.in_turns(calls, rounds)

    def figures(name: str) -> Row:
        own, median = times[name], statistics.median(times[name])
        return {
            "ms": 1e3 * median,
            "min_ms": 1e3 * min(own),
            "max_ms": 1e3 * max(own),
            "gb_s": contenders[name].bytes / median / 1e9,
            "to_limit": ratio(times.get("limit", []), own),
            "to_first": ratio(own, times.get(next(iter(contenders)), [])),
        }

    return make_rows(contenders, absent, columns(section), figures)


def timer_of(call: Call) -> Timer:
    """Call once, which may fail, and return a timer."""
    call()
    return Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())


def seconds_of(timer: Timer) -> float:
    """Return the time of one call, on average of several."""
    mean: float = timer.blocked_autorange(min_run_time=TURN_S).mean
    return mean


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options.make_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--numel", type=options.positive, default=50_000_000, help="elements (default: 50 million)")
    parser.add_argument("--rounds", type=options.positive, default=9)
    options.add_choice(parser, "--sections", SECTIONS)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    return args


def describe(args: argparse.Namespace) -> str:
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    return (
        f"{args.numel:,} elements on {args.device} ({where}), {torch.get_num_threads()} threads, {args.rounds} rounds, "
        f"torch {torch.__version__}"
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    results = {name: measure(name, SECTIONS[name](args.numel, args.device), args.rounds) for name in args.sections}
    tables = [
        f"\n{render_table(rows, args.markdown, columns_in_use(rows, columns(name)))}" for name, rows in results.items()
    ]
    harness.publish(args, describe(args), tables, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
