"""Train the same GPT under zerolite and its competitors, in turn, and print what each costs.

    python benchmarks/compare.py                    # the known setting: two gloo ranks, fp32, 17.2 M parameters
    python benchmarks/compare.py --competitors compute,ddp,zerolite-1 --rounds 3 --markdown
    python benchmarks/compare.py --competitors torch-tp,zerolite-tp,torch-pp-1f1b,zerolite-pp-1f1b --heads 8 --layers 8
    python benchmarks/compare.py --device cuda --nproc 8 --dtype bf16 --layers 24 --width 2048 --heads 16 --context 1024

Every competitor has processes of its own, which sleep while another runs. Rounds alternate the order, and ratios are
taken within a round, so that a machine that slows down for a while favours none. Losses must agree, or the exit
status is 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import harness, options
from benchmarks.compare_table import COLUMNS, figures
from benchmarks.competitors import COMPETITORS
from benchmarks.engines import build_zerolite, zerolite_config
from benchmarks.model import build_model, make_batches
from benchmarks.options import positive
from benchmarks.report import columns_in_use, disagreement, make_rows, render_table
from benchmarks.setting import Setting
from benchmarks.training import RoundResult, serve_gpt
from benchmarks.workers import Workers

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


class Contest(harness.Contest):
    """Competitors that train the same model."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, COMPETITORS)
        self.setting = Setting(
            args.device, args.dtype, args.micro_batch, args.nproc, args.nvme_path, args.pipeline_micro_batches
        )
        self.size = options.model_size(args)

    def make(self, name: str, store: Path) -> Workers:
        return Workers(serve_gpt, self.setting, (name, self.size, self.args.warmup), store)

    def turn(self, name: str, flip: bool) -> RoundResult:
        result: RoundResult = super().turn(name, flip)
        if self.args.restart:
            self.workers.pop(name).close()
        return result

    def losses(self, name: str) -> list[float]:
        """Losses of the warm-up and of the first round."""
        return [*self.started[name].losses, *self.rounds[name][0].losses]

    def disagreements(self) -> list[str]:
        """Sentences about competitors whose losses are not the reference's.

        A rank that trains alone shares only the first loss with the others.
        """
        losses = {name: self.losses(name) for name in self.present()}
        together = [name for name in losses if COMPETITORS[name].communicates]
        if not together:
            return []
        reference, tolerance = together[0], LOSS_TOLERANCE[self.setting.dtype]
        found = []
        for name, values in losses.items():
            length = None if name in together else 1
            sentence = disagreement(values[:length], losses[reference][:length], tolerance)
            if sentence:
                found.append(f"{name}: {sentence} ({reference})")
        return found


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options.make_parser(__doc__)
    default = [name for name, competitor in COMPETITORS.items() if not competitor.extra]
    options.add_choice(parser, "--competitors", COMPETITORS, default)
    parser.add_argument("--nvme-path", default=Setting.nvme_path, help="where those that offload to disk do")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--steps", type=positive, default=8, help="timed steps of each competitor in a round")
    parser.add_argument(
        "--warmup",
        type=positive,
        default=6,
        help="steps before the first round, not timed; zerolite's stage 3 follows its plan from the fourth on",
    )
    options.add_model(parser)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu: gloo, one thread a rank; cuda: NCCL"
    )
    parser.add_argument("--micro-batch", type=positive, default=2, help="sequences a rank and step")
    parser.add_argument(
        "--pipeline-micro-batches",
        type=positive,
        help="into how many pipelines divide the sequences of all ranks (default: one each)",
    )
    parser.add_argument(
        "--restart",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="start each competitor afresh every round, so that only one occupies memory at a time (default: on CUDA)",
    )
    parser.add_argument(
        "--plan", action="store_true", help="train nothing: print the peak that zerolite's plan gives for its lines"
    )
    args = parser.parse_args(argv)
    options.model_size(args, parser)
    sequences = args.nproc * args.micro_batch
    args.pipeline_micro_batches = args.pipeline_micro_batches or sequences
    if sequences % args.pipeline_micro_batches:
        parser.error(
            f"--pipeline-micro-batches must divide the {sequences} sequences of a step, got "
            f"{args.pipeline_micro_batches}"
        )
    if args.device == "cuda" and not args.plan and torch.cuda.device_count() < args.nproc:
        parser.error(f"--device cuda needs one GPU a rank: {args.nproc} ranks, {torch.cuda.device_count()} GPUs")
    if args.restart is None:
        args.restart = args.device == "cuda"
    return args


def describe(args: argparse.Namespace) -> str:
    backend = "gloo" if args.device == "cpu" else "NCCL"
    return (
        f"{args.nproc} {backend} ranks on {args.device}, {args.dtype}, {args.micro_batch} x {args.context} tokens "
        f"a rank, {args.rounds} rounds of {args.steps} steps, {harness.machine()}"
    )


def print_plans(args: argparse.Namespace) -> None:
    """Print the planned peak of a step, which is compared with "peak MB". It needs no device and no memory."""
    from zerolite.planning.make import plan

    setting, size = Setting(args.device, args.dtype, args.micro_batch, args.nproc), options.model_size(args)
    for name in args.competitors:
        competitor = COMPETITORS[name]
        if competitor.build is not build_zerolite:
            continue
        made = plan(
            lambda: build_model(size),
            zerolite_config(setting, **competitor.options),
            args.nproc,
            device=args.device,
            batch=lambda: make_batches(size, args.micro_batch, rank=0, count=1)[0],
        )
        print(f"{name:<24}{made.step_peak.bytes / 1e6:12.0f} MB at the peak of a step", flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.plan:
        print_plans(args)
        return 0
    with Contest(args) as contest:
        contest.run()
        rows = make_rows(args.competitors, contest.absent, COLUMNS, lambda name: figures(contest, name))
        disagreements = contest.disagreements()
    table = render_table(rows, args.markdown, columns_in_use(rows, COLUMNS))
    harness.publish(args, describe(args), [table], disagreements, results={row["name"]: row for row in rows})
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
