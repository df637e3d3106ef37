"""What each library costs the host: step time of a stack of tiny layers over that of plain PyTorch.

    python benchmarks/host_overhead.py                            # 100 and 400 layers, everyone, one process each
    python benchmarks/host_overhead.py --competitors zerolite-3,zerolite-3-w64 --layers 100 --rounds 3
    python benchmarks/host_overhead.py --profile zerolite-3-w64-modules --layers 100
    python benchmarks/host_overhead.py --layers 10000 --competitors zerolite-0,zerolite-1-w64,zerolite-2-w64

A layer has four parameters, so a quarter of "us a layer" is what a parameter costs above plain PyTorch.

A layer is LayerNorm(32), Linear(32, 32) and a residual; 8 rows are a batch; one thread. Every competitor has one
process of its own, which sleeps while another runs. Each of its turns stands next to a turn of plain PyTorch, before it
and after it in alternate rounds, and ratios are taken within such a pair.

zerolite-3: stage 3 with stage3_param_persistence_threshold 0. "-modules": a unit per module that owns parameters
(stage3_module_granularity_threshold 0), each with a gather and a reduction of its own (stage3_prefetch_bucket_size 1,
reduce_bucket_size 1), instead of one for the whole small stack; "-reshard": also gathered anew for every use
(stage3_max_reuse_distance 0). "-w64": as rank 0 of 64 ranks, with a communicator that sends nothing. What
that one does instead of sending (it copies shards, so that numbers stay finite) is the "fake ms", which "x plain" and
"us a layer" leave out. "x plain CPU" compares processor time, all threads, collectives included: where other work keeps
the machine busy it is the one to read.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import harness
from benchmarks.competitors import Setting
from benchmarks.report import disagreement, render_table
from benchmarks.tiny_layers import BATCH, COMPETITORS, WIDTH, Ready, Turn, make_inputs, prepare, serve_stack, train
from benchmarks.tiny_layers import warm_up as warm_up_trainee
from benchmarks.workers import Workers, join_group

REFERENCE = "plain"
SETTING = Setting(world_size=1)
LOSS_TOLERANCE = 1e-5  # of the first loss, which grows with the layers
LEAST_WARMUP = 5  # stage 3 follows its plan from then on


@dataclass(frozen=True)
class Row:
    """One competitor at one number of layers. Times are of a step. Ratios and differences are to plain PyTorch:
    `to_plain` and `us_per_layer` without what pretended collectives took, `wall_to_plain` and `cpu_to_plain` with it.
    `gathers` and `reductions` count launches of a step."""

    name: str
    layers: int
    absent: str | None = None
    step_ms: float | None = None
    min_ms: float | None = None
    cpu_ms: float | None = None
    fake_ms: float | None = None
    gathers: int | None = None
    reductions: int | None = None
    us_per_layer: float | None = None
    cpu_to_plain: float | None = None
    wall_to_plain: float | None = None
    to_plain: float | None = None


COLUMNS = (
    ("competitor", "name", "{}"),
    ("layers", "layers", "{}"),
    ("step ms", "step_ms", "{:.2f}"),
    ("min", "min_ms", "{:.2f}"),
    ("CPU ms", "cpu_ms", "{:.2f}"),
    ("fake ms", "fake_ms", "{:.2f}"),
    ("gathers", "gathers", "{}"),
    ("reductions", "reductions", "{}"),
    ("us a layer", "us_per_layer", "{:.1f}"),
    ("x plain CPU", "cpu_to_plain", "{:.2f}"),
    ("x plain, all", "wall_to_plain", "{:.2f}"),
    ("x plain", "to_plain", "{:.2f}"),
)


class Contest(harness.Contest):
    """The competitors at one number of layers. A turn is a pair: of plain PyTorch and of the competitor, next to each
    other in time."""

    def __init__(self, args: argparse.Namespace, layers: int) -> None:
        super().__init__(args, COMPETITORS)
        self.layers = layers

    def make(self, name: str, store: Path) -> Workers:
        return Workers(serve_stack, SETTING, (name, self.layers, self.args.warmup), store)

    def turn(self, name: str, flip: bool) -> tuple[Turn, Turn]:
        self.start(name)
        order = (name, REFERENCE) if flip else (REFERENCE, name)
        first, second = (self.workers[each].run(self.args.steps) for each in order)
        return (second, first) if flip else (first, second)

    def measure(self) -> list[Row]:
        with self:
            self.start(REFERENCE)
            self.run()
        return [self._row(name) for name in self.rounds]

    def _row(self, name: str) -> Row:
        if name in self.absent:
            return Row(name, self.layers, absent=self.absent[name])
        return summarise(name, self.layers, self.started[name], self.rounds[name])

    def disagreements(self) -> list[str]:
        """Sentences about competitors whose losses in the warm-up are not plain PyTorch's, where they should be."""
        found = []
        for name in self.present():
            if not COMPETITORS[name].communicates:
                continue
            reference = self.started[REFERENCE].losses
            sentence = disagreement(self.started[name].losses, reference, LOSS_TOLERANCE * reference[0])
            if sentence:
                found.append(f"{name}, {self.layers} layers: {sentence} ({REFERENCE})")
        return found


def summarise(name: str, layers: int, ready: Ready, pairs: list[tuple[Turn, Turn]]) -> Row:
    """Medians: over steps within a turn, then over pairs."""
    plain = [statistics.median(turn.step_s) for turn, _ in pairs]
    wall = [statistics.median(turn.step_s) for _, turn in pairs]
    fake = [statistics.median(turn.fake_s) for _, turn in pairs]
    median = statistics.median
    return Row(
        name=name,
        layers=layers,
        step_ms=1e3 * median(wall),
        min_ms=1e3 * min(seconds for _, turn in pairs for seconds in turn.step_s),
        cpu_ms=1e3 * median(turn.cpu_s / len(turn.step_s) for _, turn in pairs),
        fake_ms=1e3 * median(fake) if any(fake) else None,
        gathers=ready.gathers,
        reductions=ready.reductions,
        us_per_layer=1e6 * median(w - f - p for w, f, p in zip(wall, fake, plain, strict=True)) / layers,
        cpu_to_plain=median((turn.cpu_s / len(turn.step_s)) / (p.cpu_s / len(p.step_s)) for p, turn in pairs),
        wall_to_plain=median(w / p for w, p in zip(wall, plain, strict=True)),
        to_plain=median((w - f) / p for w, f, p in zip(wall, fake, plain, strict=True)),
    )


def profile(args: argparse.Namespace) -> None:
    """cProfile, by processor time, over some steps of one competitor in this process, at the first number of layers."""
    with tempfile.TemporaryDirectory(prefix="zerolite-overhead-") as directory:
        join_group(0, SETTING, str(Path(directory) / "store"))
        trainee, inputs = prepare(args.profile, args.layers[0]), make_inputs()
        ready = warm_up_trainee(trainee, inputs, args.warmup)
        turn = train(trainee, inputs, args.steps)
        print(
            f"{args.profile}, {args.layers[0]} layers: {1e3 * statistics.median(turn.step_s):.2f} ms a step without "
            f"the profiler, {1e3 * statistics.median(turn.fake_s):.2f} of it in pretended collectives; launches a "
            f"step: {ready.gathers} gathers, {ready.reductions} reductions"
        )
        profiler = cProfile.Profile(time.process_time)
        profiler.runcall(train, trainee, inputs, args.steps)
        pstats.Stats(profiler).sort_stats(args.sort).print_stats(args.top)
        torch.distributed.destroy_process_group()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    default = ",".join(COMPETITORS)
    parser.add_argument("--competitors", default=default, help=f"comma-separated, of: {default} (default: all)")
    parser.add_argument("--layers", default="100,400", help="numbers of layers, comma-separated (default: 100,400)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn")
    parser.add_argument("--warmup", type=int, default=8, help=f"steps before the first round, {LEAST_WARMUP} or more")
    parser.add_argument("--profile", metavar="NAME", choices=list(COMPETITORS), help="run cProfile on one competitor")
    parser.add_argument("--top", type=int, default=30, help="functions that --profile prints")
    parser.add_argument("--sort", default="tottime", help="their order: tottime (default), cumtime, ncalls")
    args = parser.parse_args(argv)
    args.competitors = harness.pick(parser, "--competitors", args.competitors, COMPETITORS)
    try:
        args.layers = [int(text) for text in args.layers.split(",")]
    except ValueError:
        parser.error(f"--layers: expected numbers separated by commas, got {args.layers}")
    for name, value, least in (
        ("layers", min(args.layers), 1),
        ("rounds", args.rounds, 1),
        ("steps", args.steps, 1),
        ("warmup", args.warmup, LEAST_WARMUP),
    ):
        if value < least:
            parser.error(f"--{name}: expected {least} or more, got {value}")
    return args


def describe(args: argparse.Namespace) -> str:
    return (
        f"one process and one thread each, fp32, {BATCH} x {WIDTH} a step, {args.rounds} rounds of {args.steps} steps, "
        f"{harness.machine()}"
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.profile:
        profile(args)
        return 0
    contests = [Contest(args, layers) for layers in args.layers]
    rows = [row for contest in contests for row in contest.measure()]
    disagreements = [sentence for contest in contests for sentence in contest.disagreements()]
    turns = [
        {"name": name, "layers": contest.layers, "plain": asdict(plain), "competitor": asdict(turn)}
        for contest in contests
        for name, pairs in contest.rounds.items()
        for plain, turn in pairs
    ]
    table = render_table(rows, args.markdown, COLUMNS)
    harness.publish(args, describe(args), [table], disagreements, results=[asdict(row) for row in rows], turns=turns)
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
