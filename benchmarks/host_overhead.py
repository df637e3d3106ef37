"""Cost of each library for the host: step time of a stack of tiny layers over that of plain PyTorch.

    python benchmarks/host_overhead.py                            # 100 and 400 layers, everyone, one process each
    python benchmarks/host_overhead.py --competitors zerolite-3,zerolite-3-w64 --layers 100 --rounds 3
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
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, options
from benchmarks.report import Row, disagreement, make_rows, ratio, render_table
from benchmarks.setting import Setting
from benchmarks.tiny_competitors import COMPETITORS
from benchmarks.tiny_layers import BATCH, WIDTH
from benchmarks.tiny_turn import Turn, serve_stack
from benchmarks.workers import Workers

REFERENCE = "plain"
SETTING = Setting(world_size=1)
LOSS_TOLERANCE = 1e-5  # of the first loss, which grows with the layers
LEAST_WARMUP = 5  # stage 3 follows its plan from then on
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

    def figures(self, name: str) -> Row:
        """Times are of a step: medians over steps within a turn, then over pairs. Ratios and differences are to plain
        PyTorch: `to_plain` and `us_per_layer` without what pretended collectives took, the others with it."""
        pairs, ready = self.rounds[name], self.started[name]
        plain = [median(turn.step_s) for turn, _ in pairs]
        wall = [median(turn.step_s) for _, turn in pairs]
        fake = [median(turn.fake_s) for _, turn in pairs]
        own = [w - f for w, f in zip(wall, fake, strict=True)]
        cpu = [turn.cpu_s / len(turn.step_s) for _, turn in pairs]
        return {
            "layers": self.layers,
            "step_ms": 1e3 * median(wall),
            "min_ms": 1e3 * min(seconds for _, turn in pairs for seconds in turn.step_s),
            "cpu_ms": 1e3 * median(cpu),
            "fake_ms": 1e3 * median(fake) if any(fake) else None,
            "gathers": ready.gathers,
            "reductions": ready.reductions,
            "us_per_layer": 1e6 * median(o - p for o, p in zip(own, plain, strict=True)) / self.layers,
            "cpu_to_plain": ratio(cpu, [turn.cpu_s / len(turn.step_s) for turn, _ in pairs]),
            "wall_to_plain": ratio(wall, plain),
            "to_plain": ratio(own, plain),
            "turns": [{"plain": asdict(turn), "competitor": asdict(mine)} for turn, mine in pairs],
        }

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


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options.make_parser(__doc__)
    options.add_choice(parser, "--competitors", COMPETITORS)
    parser.add_argument(
        "--layers", type=options.positives, default=[100, 400], help="comma-separated (default: 100,400)"
    )
    parser.add_argument("--rounds", type=options.positive, default=7)
    parser.add_argument("--steps", type=options.positive, default=10, help="timed steps of a turn")
    parser.add_argument(
        "--warmup", type=options.positive, default=8, help=f"steps before the first round, {LEAST_WARMUP} or more"
    )
    args = parser.parse_args(argv)
    if args.warmup < LEAST_WARMUP:
        parser.error(f"--warmup: expected {LEAST_WARMUP} or more, got {args.warmup}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    rows: list[Row] = []
    disagreements: list[str] = []
    for layers in args.layers:
        with Contest(args, layers) as contest:
            contest.start(REFERENCE)
            contest.run()
        rows += make_rows(args.competitors, contest.absent, COLUMNS, contest.figures)
        disagreements += contest.disagreements()
    about = (
        f"one process and one thread each, fp32, {BATCH} x {WIDTH} a step, {args.rounds} rounds of {args.steps} steps, "
        f"{harness.machine()}"
    )
    harness.publish(args, about, [render_table(rows, args.markdown, COLUMNS)], disagreements, results=rows)
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
