"""Save and load the same training states with zerolite and its competitors, in turn, beside what the disk itself does.

    python benchmarks/checkpoint.py                               # 1.06 GB of states, two gloo ranks, in /tmp
    python benchmarks/checkpoint.py --layers 2 --width 256 --rounds 1       # a look at everything in a minute
    python benchmarks/checkpoint.py --competitors zerolite-2,fsdp2 --directory /mnt/scratch --markdown

Every competitor trains the same GPT with AdamW and fp32 masters, in processes of its own, which are started anew for
each of its turns, so that only one occupies memory. Rounds alternate the order. A turn: a save that is not timed; a
save; loads; two asynchronous saves. The steps after a load must give the losses of the steps after the save, or the
competitor has failed, and the exit status is 1.

The disk: right before and after each save, as many processes as ranks write as many bytes: zeros with dd (bs=8M
conv=fsync, "of dd"), the same past the page cache (oflag=direct as well, "of direct"), and random bytes from Python,
with fsync ("of random"); loads stand beside dd reading these. A save counts until its files are on the disk: each
competitor's are synced after its call returned, which costs nothing where it has done so itself (zerolite and
torch.distributed.checkpoint do, DeepSpeed and torch.save do not); "returns" is the time of the call alone. Loads and
reads are from the page cache ("warm") and, where that can be emptied without root, from the disk ("cold"). "MB" is the
size of the competitor's files, and GB/s are of these bytes; "x first" compares times with those of the table's first
line. Ratios are medians over rounds of the ratio within a turn or round.

An asynchronous save stalls training until its call returns; the copy it is compared with is of the same bytes, by all
ranks at once, into memory that has been in use before. "first stall" is of the first one in a process, "stall" of the
second. "adds" is what the second one, its end included, adds to the steps after it, over as many before it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, options
from benchmarks.checkpoint_report import COLUMNS, TABLES, figures, machine
from benchmarks.checkpoint_turn import Plan, serve
from benchmarks.model import ModelSize
from benchmarks.options import positive
from benchmarks.report import make_rows, render_table
from benchmarks.savers import COMPETITORS
from benchmarks.setting import Setting
from benchmarks.workers import Workers

SIZE = ModelSize(layers=7, width=1024, heads=16, vocab=256, context=32)
STATE_BYTES = 12  # a parameter: master, two moments
MOST_FILE_BYTES = 18  # the same, with copies of weights and gradients, as some save them
FILES_AT_ONCE = 4  # a save, and three of the disk's own


class Contest(harness.Contest):
    """Competitors that save and load the same states, each turn with new processes in a directory of its own."""

    def turn(self, name: str, flip: bool) -> Any:
        setting = Setting("cpu", self.args.dtype, self.args.micro_batch, self.args.nproc)
        with tempfile.TemporaryDirectory(prefix="zerolite-checkpoint-", dir=self.args.directory) as directory:
            plan = Plan(options.model_size(self.args), Path(directory), self.args.warmup, self.args.steps, flip)
            workers = Workers(serve, setting, (name, plan), Path(directory) / "store")
            try:
                workers.start()
                return workers.run(1)
            finally:
                workers.close()


def estimated_parameters(size: ModelSize) -> int:
    return 12 * size.layers * size.width**2 + (2 * size.vocab + size.context) * size.width


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options.make_parser(__doc__)
    options.add_choice(parser, "--competitors", COMPETITORS)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), help="on the disk to measure (default: %(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=3, help="of training, after a save (default: %(default)s)")
    parser.add_argument(
        "--warmup", type=positive, default=4, help="steps before; zerolite's stage 3 follows its plan from the fourth"
    )
    options.add_model(parser, SIZE)
    parser.add_argument("--micro-batch", type=positive, default=1, help="sequences a rank and step")
    args = parser.parse_args(argv)
    size = options.model_size(args, parser)
    if shutil.which("dd") is None:
        parser.error("the disk is measured with dd, which is not installed")
    if not os.path.isdir(args.directory):
        parser.error(f"--directory: expected a directory, got '{args.directory}'")
    needed = FILES_AT_ONCE * MOST_FILE_BYTES * estimated_parameters(size)
    free = shutil.disk_usage(args.directory).free
    if free < needed:
        parser.error(
            f"--directory: expected {needed / 1e9:.1f} GB of free space in '{args.directory}' for a model of this "
            f"size, got {free / 1e9:.1f}; give another directory or a smaller model"
        )
    return args


def describe(args: argparse.Namespace) -> str:
    states = STATE_BYTES * estimated_parameters(options.model_size(args)) / 1e9
    return (
        f"{args.nproc} gloo ranks, {args.dtype}, {states:.2f} GB of states, {args.rounds} rounds, {harness.machine()}"
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    with Contest(args, COMPETITORS) as contest:
        contest.run()
    rounds, present = contest.rounds, contest.present()
    first = rounds[present[0]] if present else []
    rows = make_rows(rounds, contest.absent, COLUMNS, lambda name: figures(rounds[name], first, args.steps))
    tables = [f"\n{title}\n{render_table(rows, args.markdown, columns)}" for title, columns in TABLES.items()]
    every = machine([turn for turns in rounds.values() for turn in turns])
    results = {row["name"]: row for row in rows}
    harness.publish(args, describe(args), [every, *tables], results=results, turns=rounds)
    return 1 if contest.failed else 0


if __name__ == "__main__":
    sys.exit(main())
