"""The idle share of pipeline schedules, from the time line of layers that sleep, and what they keep for backward.

    python benchmarks/bubble.py                                  # 2 and 4 stages, 8 micro-batches, every schedule
    python benchmarks/bubble.py --stages 4 --micro-batches 16 --schedules gpipe,1f1b --library torch

"idle" is the share of a step in which a rank does nothing, the mean over ranks and the median over steps; "theory" what
the literature says of the schedule; "order" what the recorded order of operations has without any cost of sending.
"kept" counts the micro-batches whose activations the first rank holds at the most: half of one is that of half of its
layers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from benchmarks import harness, memory, options
from benchmarks.options import positive, positives
from benchmarks.report import Row, make_rows, render_table
from benchmarks.schedules import BUILD, SCHEDULES, Job
from benchmarks.setting import Setting
from benchmarks.timeline import Diary, idle_shares, least_idle
from benchmarks.workers import CompetitorFailed, Workers

COLUMNS = (
    ("schedule", "name", "{}"),
    ("stages", "stages", "{}"),
    ("micro-batches", "micro_batches", "{}"),
    ("idle", "idle", "{:.3f}"),
    ("min", "least", "{:.3f}"),
    ("max", "most", "{:.3f}"),
    ("theory", "theory", "{:.3f}"),
    ("order", "order", "{:.3f}"),
    ("kept", "kept", "{:g}"),
    ("kept MB", "kept_bytes", "{:.0f}"),
)


def serve(pipe: Connection, rank: int, setting: Setting, job: Job) -> None:
    """Serve `Workers`. The first reply is of a step that measures memory: parts of the model and bytes that are kept
    for backward on the first rank at the most; then one a step: the events of all ranks."""
    diary = Diary(rank)
    meter = memory.Meter(setting.device)
    with meter:
        step = BUILD[job.library](job, diary)
        step()
        with meter.window():
            step()
    assert meter.peak_bytes is not None and meter.resident_bytes is not None
    pipe.send((diary.most_live, meter.peak_bytes - meter.resident_bytes))
    while pipe.recv() > 0:
        diary.clear()
        dist.barrier()
        step()
        of_all: list[Any] = [None] * setting.world_size
        dist.all_gather_object(of_all, diary.events)
        pipe.send([event for events in of_all for event in events])


def measure(job: Job, steps: int, store: Path) -> Row:
    schedule = SCHEDULES[job.schedule]
    workers = Workers(serve, Setting(world_size=job.stages), (job,), store)
    try:
        kept, kept_bytes = workers.start()
        steps_events = [workers.run(1) for _ in range(steps)]
    finally:
        workers.close()
    idle = [statistics.mean(idle_shares(events)) for events in steps_events]
    orders = [least_idle(events, job.stages * schedule.chunks, schedule.split) for events in steps_events]
    return {
        "stages": job.stages,
        "micro_batches": job.micro_batches,
        "idle": statistics.median(idle),
        "least": min(idle),
        "most": max(idle),
        "theory": schedule.theory(job.stages, job.micro_batches),
        "order": statistics.median(orders),
        "kept": kept / schedule.chunks,
        "kept_bytes": kept_bytes,
    }


def row_of(job: Job, steps: int) -> Row:
    """Measure one schedule, or say why that failed."""
    found: Row = {}
    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="zerolite-bubble-") as directory:
        try:
            found = measure(job, steps, Path(directory) / "store")
        except CompetitorFailed as failure:
            print(f"{job}: {failure}\n{failure.details}", file=sys.stderr)
            absent[job.schedule] = "failed: " + " ".join(str(failure).split())
    print(f"{job.schedule} on {job.stages} stages done", file=sys.stderr, flush=True)
    return make_rows([job.schedule], absent, COLUMNS, lambda name: found)[0]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options.make_parser(__doc__)
    parser.add_argument("--library", choices=tuple(BUILD), default="zerolite", help="torch: its schedules alone")
    options.add_choice(parser, "--schedules", SCHEDULES)
    parser.add_argument("--stages", type=positives, default=[2, 4], help="comma-separated (default: 2,4)")
    parser.add_argument("--micro-batches", type=positives, default=[8], help="comma-separated (default: 8)")
    parser.add_argument(
        "--milliseconds", type=float, default=20.0, help="of a rank's forward; a backward takes two (default: 20)"
    )
    parser.add_argument("--kept-mb", type=float, default=4.0, help="that a rank keeps of a micro-batch (default: 4)")
    parser.add_argument("--steps", type=positive, default=5)
    args = parser.parse_args(argv)
    if min(args.stages) < 2:
        parser.error("--stages: expected 2 or more, got 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    seconds, kept_bytes = args.milliseconds / 1e3, int(args.kept_mb * 1e6)
    rows = [
        row_of(Job(args.library, name, stages, count, seconds, kept_bytes), args.steps)
        for stages in args.stages
        for count in args.micro_batches
        for name in args.schedules
    ]
    about = f"{args.library}, {args.milliseconds:g} ms a forward, {args.steps} steps, {harness.machine()}"
    harness.publish(args, about, [render_table(rows, args.markdown, COLUMNS)], results=rows)
    return 1 if any(row["absent"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
