"""Train the same GPT under zerolite and its competitors, in turn, and print what each costs.

    python benchmarks/compare.py                    # the known setting: two gloo ranks, fp32, 17.2 M parameters
    python benchmarks/compare.py --competitors compute,ddp,zerolite-1 --rounds 3 --markdown
    python benchmarks/compare.py --competitors torch-tp,zerolite-tp,torch-pp-1f1b,zerolite-pp-1f1b --heads 8 --layers 8
    python benchmarks/compare.py --device cuda --nproc 8 --dtype bf16 --layers 24 --width 2048 --heads 16 --context 1024

Every competitor has processes of its own, which sleep while another runs. Rounds alternate the order, and ratios are
taken within a round, so that a machine that slows down for a while favours nobody. Losses must agree, or the exit
status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.competitors import COMPETITORS, Setting
from benchmarks.model import ModelSize
from benchmarks.report import Row, columns_in_use, disagreement, positive, render_table, summarise
from benchmarks.workers import CompetitorFailed, RoundResult, Started, Workers, serve_gpt

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


class Contest:
    """The competitors that take part, what they measured, and why the others do not."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.setting = Setting(
            args.device, args.dtype, args.micro_batch, args.nproc, args.nvme_path, args.pipeline_micro_batches
        )
        self.size = ModelSize(args.layers, args.width, args.heads, args.vocab, args.context)
        self.workers: dict[str, Workers] = {}
        self.started: dict[str, Started] = {}
        self.rounds: dict[str, list[RoundResult]] = {name: [] for name in args.competitors}
        self.absent: dict[str, str] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="zerolite-compare-")
        self._stores = 0

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *exc: object) -> None:
        for workers in self.workers.values():
            workers.close()
        self._directory.cleanup()

    def present(self) -> list[str]:
        return [name for name in self.args.competitors if name not in self.absent]

    def start(self, name: str) -> None:
        """Start a competitor's processes, or note why it is absent."""
        missing = COMPETITORS[name].missing()
        if missing:
            self.absent[name] = missing
            return
        self._stores += 1
        store = Path(self._directory.name) / f"store-{self._stores}"
        workers = Workers(serve_gpt, self.setting, (name, self.size, self.args.warmup), store)
        self.workers[name] = workers
        try:
            self.started[name] = workers.start()
        except CompetitorFailed as failure:
            self.drop(name, failure)

    def drop(self, name: str, failure: CompetitorFailed) -> None:
        print(f"{name} failed: {failure}\n{failure.details}", file=sys.stderr)
        self.absent[name] = "failed: " + " ".join(str(failure).split())
        self.workers.pop(name).close()

    def run_round(self, number: int) -> None:
        """One turn for everyone; every second round runs in the opposite order."""
        order = self.present() if number % 2 == 0 else self.present()[::-1]
        for name in order:
            if name not in self.workers:
                self.start(name)
            if name in self.absent:
                continue
            try:
                self.rounds[name].append(self.workers[name].run(self.args.steps))
            except CompetitorFailed as failure:
                self.drop(name, failure)
                continue
            if self.args.restart:
                self.workers.pop(name).close()

    def disagreements(self) -> list[str]:
        """Sentences about competitors whose losses are not the reference's.

        A rank that trains alone shares only the first loss with the others.
        """
        losses = {name: self.started[name].losses + self.rounds[name][0].losses for name in self.present()}
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ",".join(name for name, competitor in COMPETITORS.items() if not competitor.extra)
    every = ", ".join(COMPETITORS)
    parser.add_argument("--competitors", default=default, help=f"comma-separated, of: {every} (default: {default})")
    parser.add_argument("--nvme-path", default=Setting.nvme_path, help="where those that offload to disk do")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--steps", type=positive, default=8, help="timed steps of each competitor in a round")
    parser.add_argument(
        "--warmup",
        type=positive,
        default=6,
        help="steps before the first round, not timed; zerolite's stage 3 follows its plan from the fourth on",
    )
    parser.add_argument("--nproc", type=positive, default=2, help="ranks")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="compute dtype; masters are fp32")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu: gloo, one thread a rank; cuda: NCCL"
    )
    parser.add_argument("--micro-batch", type=positive, default=2, help="sequences a rank and step")
    parser.add_argument(
        "--pipeline-micro-batches",
        type=positive,
        help="into how many pipelines divide the sequences of all ranks (default: one each)",
    )
    for name in ("layers", "width", "heads", "vocab", "context"):
        parser.add_argument(f"--{name}", type=positive, default=getattr(ModelSize, name))
    parser.add_argument(
        "--restart",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="start each competitor afresh every round, so that only one occupies memory at a time (default: on CUDA)",
    )
    parser.add_argument("--json", metavar="OUT", help="write everything measured to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args(argv)
    args.competitors = [name.strip() for name in args.competitors.split(",") if name.strip()]
    unknown = [name for name in args.competitors if name not in COMPETITORS]
    if unknown or not args.competitors:
        parser.error(f"--competitors: expected names of {default}, got {', '.join(unknown) or 'none'}")
    if args.width % args.heads:
        parser.error(f"--width must be a multiple of --heads, got {args.width} and {args.heads}")
    sequences = args.nproc * args.micro_batch
    args.pipeline_micro_batches = args.pipeline_micro_batches or sequences
    if sequences % args.pipeline_micro_batches:
        parser.error(
            f"--pipeline-micro-batches must divide the {sequences} sequences of a step, got "
            f"{args.pipeline_micro_batches}"
        )
    if args.device == "cuda" and torch.cuda.device_count() < args.nproc:
        parser.error(f"--device cuda needs one GPU a rank: {args.nproc} ranks, {torch.cuda.device_count()} GPUs")
    if args.restart is None:
        args.restart = args.device == "cuda"
    return args


def describe(args: argparse.Namespace) -> str:
    backend = "gloo" if args.device == "cpu" else "NCCL"
    return (
        f"{args.nproc} {backend} ranks on {args.device}, {args.dtype}, {args.micro_batch} x {args.context} tokens "
        f"a rank, {args.rounds} rounds of {args.steps} steps, torch {torch.__version__}, {os.cpu_count()} cores, "
        f"{platform.machine()}"
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    with Contest(args) as contest:
        for number in range(args.rounds):
            contest.run_round(number)
            print(f"round {number + 1} of {args.rounds} done", file=sys.stderr, flush=True)
        tokens, peers = args.nproc * args.micro_batch * args.context, {c.name: c.peer for c in COMPETITORS.values()}
        rows = summarise(contest.started, contest.rounds, contest.absent, tokens, peers)
        disagreements = contest.disagreements()
    print(describe(args))
    print(render_table(rows, args.markdown, columns_in_use(rows)))
    for sentence in disagreements:
        print(f"LOSSES DISAGREE: {sentence}")
    if args.json:
        _write_json(Path(args.json), args, rows, contest, disagreements)
    return 1 if disagreements else 0


def _write_json(
    path: Path, args: argparse.Namespace, rows: list[Row], contest: Contest, disagreements: list[str]
) -> None:
    results: dict[str, Any] = {}
    for row in rows:
        entry: dict[str, Any] = row.as_dict()
        if row.absent is None:
            entry["losses"] = contest.started[row.name].losses + contest.rounds[row.name][0].losses
            entry["step_s"] = [result.step_s for result in contest.rounds[row.name]]
        results[row.name] = entry
    document = {
        "setting": vars(args),
        "description": describe(args),
        "results": results,
        "disagreements": disagreements,
    }
    path.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
