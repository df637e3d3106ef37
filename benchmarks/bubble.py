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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import harness, memory
from benchmarks.report import positive, render_table
from benchmarks.setting import Setting
from benchmarks.timeline import Diary, Event, Sleeper, idle_shares, least_idle
from benchmarks.workers import CompetitorFailed, Workers

WIDTH = 64
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


@dataclass(frozen=True)
class Schedule:
    """torch_name: of torch.distributed.pipelining. chunks: parts of the model on a rank. split: gradients of weights
    are computed apart. bubble(p, v): idle time, in units of the time that a forward of a whole rank takes, where the
    two halves of a backward take as long each."""

    torch_name: str
    chunks: int
    split: bool
    bubble: Callable[[int, int], float] | None

    def theory(self, stages: int, micro_batches: int) -> float | None:
        if self.bubble is None:
            return None
        bubble = self.bubble(stages, self.chunks)
        return bubble / (3 * micro_batches + bubble)


# Narayanan et al. 2021, section 2.2: (p - 1)(t_f + t_b), over v where each rank has v parts. Qi et al. 2023, "Zero
# Bubble Pipeline Parallelism", of ZB-H1: (p - 1)(t_f + t_b - t_w), here over v too.
SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe", 1, False, lambda p, v: 3 * (p - 1)),
    "1f1b": Schedule("Schedule1F1B", 1, False, lambda p, v: 3 * (p - 1)),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", 2, False, lambda p, v: 3 * (p - 1) / v),
    "zero_bubble": Schedule("ScheduleInterleavedZeroBubble", 2, True, lambda p, v: (p - 1) / v),
    "zbv": Schedule("ScheduleZBVZeroBubble", 2, True, None),
}
FOLDED = ("zbv",)


@dataclass(frozen=True)
class Job:
    library: str
    schedule: str
    stages: int
    micro_batches: int
    seconds: float
    kept_bytes: int


@dataclass(frozen=True)
class Reply:
    """Events of the step, of all ranks. kept, kept_bytes: parts of the model and bytes at the most at one time on the
    first rank, whose activations wait for their backward."""

    events: list[Event]
    kept: int
    kept_bytes: int


@dataclass(frozen=True)
class Row:
    name: str
    stages: int
    micro_batches: int
    absent: str | None = None
    idle: float | None = None
    least: float | None = None
    most: float | None = None
    theory: float | None = None
    order: float | None = None
    kept: float | None = None
    kept_bytes: int | None = None


def layers_of(job: Job, diary: Diary) -> list[nn.Module]:
    """Each takes as long as the layers of a rank divided by their number."""
    chunks = SCHEDULES[job.schedule].chunks
    seconds, kept = job.seconds / chunks, job.kept_bytes // chunks
    return [Sleeper(part, WIDTH, seconds, kept, diary) for part in range(job.stages * chunks)]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    return iter([(torch.ones(1, WIDTH), torch.zeros(1, WIDTH)) for _ in range(count)])


def build_zerolite(job: Job, layers: list[nn.Module]) -> Callable[[], None]:
    import zerolite

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": job.micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "pipeline": {"stages": job.stages, "schedule": job.schedule, "partition_method": "uniform"},
    }
    engine = zerolite.initialize(nn.Sequential(*layers), config, loss_fn=loss_of)
    return lambda: engine.train_batch(batches(job.micro_batches)) and None


def build_torch(job: Job, layers: list[nn.Module]) -> Callable[[], None]:
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, parts, known = dist.get_rank(), len(layers), SCHEDULES[job.schedule]
    own = [rank + turn * job.stages for turn in range(known.chunks)]
    if job.schedule in FOLDED:
        own = [rank, parts - 1 - rank]
    stages = [PipelineStage(layers[part], part, parts, torch.device("cpu")) for part in own]
    make = getattr(schedules, known.torch_name)
    runner = make(stages if known.chunks > 1 else stages[0], job.micro_batches, loss_fn=loss_of)
    tokens, targets = torch.ones(job.micro_batches, WIDTH), torch.zeros(job.micro_batches, WIDTH)

    def step() -> None:
        has_last = parts - 1 in own
        runner.step(*([tokens] if 0 in own else []), **({"target": targets, "losses": []} if has_last else {}))

    return step


BUILD = {"zerolite": build_zerolite, "torch": build_torch}


def serve(pipe: Connection, rank: int, setting: Setting, job: Job) -> None:
    """Serve `Workers`: one reply for the step that measures memory, then one a step."""
    diary = Diary(rank)
    meter = memory.Meter(setting.device)
    with meter:
        step = BUILD[job.library](job, layers_of(job, diary))
        step()
        with meter.window():
            step()
    assert meter.peak_bytes is not None and meter.resident_bytes is not None
    pipe.send(Reply([], diary.most_live, meter.peak_bytes - meter.resident_bytes))
    while pipe.recv() > 0:
        diary.clear()
        dist.barrier()
        step()
        of_all: list[Any] = [None] * setting.world_size
        dist.all_gather_object(of_all, diary.events)
        pipe.send(Reply([event for events in of_all for event in events], diary.most_live, 0))


def measure(job: Job, steps: int, store: Path) -> Row:
    known = SCHEDULES[job.schedule]
    head = (job.schedule, job.stages, job.micro_batches)
    workers = Workers(serve, Setting(world_size=job.stages), (job,), store)
    try:
        started = workers.start()
        replies = [workers.run(1) for _ in range(steps)]
    except CompetitorFailed as failure:
        print(f"{head}: {failure}\n{failure.details}", file=sys.stderr)
        return Row(*head, absent="failed: " + " ".join(str(failure).split()))
    finally:
        workers.close()
    idle = [statistics.mean(idle_shares(reply.events)) for reply in replies]
    orders = [least_idle(reply.events, job.stages * known.chunks, known.split) for reply in replies]
    return Row(
        *head,
        idle=statistics.median(idle),
        least=min(idle),
        most=max(idle),
        theory=known.theory(job.stages, job.micro_batches),
        order=statistics.median(orders),
        kept=started.kept / known.chunks,
        kept_bytes=started.kept_bytes,
    )


def numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--library", choices=tuple(BUILD), default="zerolite", help="torch: its schedules alone")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--stages", type=numbers, default=[2, 4], help="comma-separated (default: 2,4)")
    parser.add_argument("--micro-batches", type=numbers, default=[8], help="comma-separated (default: 8)")
    parser.add_argument(
        "--milliseconds", type=float, default=20.0, help="of a rank's forward; a backward takes two (default: 20)"
    )
    parser.add_argument("--kept-mb", type=float, default=4.0, help="that a rank keeps of a micro-batch (default: 4)")
    parser.add_argument("--steps", type=positive, default=5)
    args = parser.parse_args(argv)
    args.schedules = harness.pick(parser, "--schedules", args.schedules, SCHEDULES)
    if min(args.stages) < 2:
        parser.error("--stages: expected 2 or more, got 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="zerolite-bubble-") as directory:
        for stages in args.stages:
            for count in args.micro_batches:
                for name in args.schedules:
                    kept = int(args.kept_mb * 1e6)
                    job = Job(args.library, name, stages, count, args.milliseconds / 1e3, kept)
                    rows.append(measure(job, args.steps, Path(directory) / f"store-{len(rows)}"))
                    print(f"{name} on {stages} stages done", file=sys.stderr, flush=True)
    about = f"{args.library}, {args.milliseconds:g} ms a forward, {args.steps} steps, {harness.machine()}"
    table = render_table(rows, args.markdown, COLUMNS)
    harness.publish(args, about, [table], [], results=[asdict(row) for row in rows])
    return 1 if any(row.absent for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
