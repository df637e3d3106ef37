"""The loss of examples/gpt with compressed traffic between sets of ranks, or with optimizer states of 8 bits, beside
the same training without.

    python benchmarks/compressed_loss.py                                 # all three keys, 5 seeds
    python benchmarks/compressed_loss.py --settings plain,states         # AdamW8bit in place of AdamW
    python benchmarks/compressed_loss.py --seeds 3 --settings plain,weights,gradients,loco,all

Every run is `examples/gpt/train.py` on 4 ranks, two sets of two (`zero_hpz_partition_size`), with a learning rate that
falls to 0. Runs of a seed begin with the same weights and see the same crops, whatever the setting. What is compared is
the loss at the end on a fixed large set of validation text. The table has the change over `plain` of the same seed, its
mean over seeds, and the standard error of that mean.

Two lines say what a change means. `order` is the control: a training without compression whose two ranks share the same
crops, so that nothing but the order of sums differs. And the spread of `plain` over seeds.

A run takes minutes, so `--results` keeps each in a file when it ends: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, options
from benchmarks.report import Row, make_rows, render_table

ROOT = Path(__file__).resolve().parents[1]
CROPS = 16  # of a step, over all ranks
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
LOCO = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
SETS = {"stage": 3, "zero_hpz_partition_size": 2}
# Ranks and `zero_optimization` of each line.
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (4, SETS),
    "order": (2, {"stage": 3}),
    "weights": (4, {**SETS, **WEIGHTS}),
    "gradients": (4, {**SETS, **GRADIENTS}),
    "loco": (4, {**SETS, **GRADIENTS, **LOCO}),
    "all": (4, {**SETS, **WEIGHTS, **GRADIENTS, **LOCO}),
    "states": (4, SETS),
}


def config_of(setting: str, steps: int) -> dict[str, Any]:
    """Return the config of examples/gpt at stage 3, with a learning rate that ends at 0."""
    ranks, zero = SETTINGS[setting]
    config = json.loads((ROOT / "examples/gpt/configs/zero3.json").read_text(encoding="utf-8"))
    config["scheduler"]["params"] |= {"total_num_steps": steps, "cos_min_ratio": 0.0}
    if setting == "states":
        config["optimizer"]["type"] = "AdamW8bit"
    return {**config, "train_micro_batch_size_per_gpu": CROPS // ranks, "zero_optimization": zero}


def train(setting: str, seed: int, args: argparse.Namespace) -> float:
    """Run the example once. Return its last validation loss, in nats a byte."""
    with tempfile.TemporaryDirectory(prefix="zerolite-loss-") as directory:
        config = Path(directory, "config.json")
        config.write_text(json.dumps(config_of(setting, args.steps)), encoding="utf-8")
        values = {
            "config": config, "out": directory, "seed": seed, "steps": args.steps, "width": args.width,
            "eval-every": args.steps, "eval-crops": args.eval_crops, "max-minutes": "inf", "save-every": 0,
            "sample-bytes": 0,
        }  # fmt: skip
        command = [sys.executable, "-m", "zerolite.launcher.cli", "--nproc", str(SETTINGS[setting][0])]
        command += [str(ROOT / "examples/gpt/train.py"), *(f"--{name}={value}" for name, value in values.items())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{setting}, seed {seed}: the example ended with {done.returncode}\n{done.stderr[-4000:]}")
        lines = [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]
    return float([line["val_loss"] for line in lines if "val_loss" in line][-1])


def summary(setting: str, losses: dict[int, float], plain: dict[int, float]) -> Row:
    """Return the figures of a line. Changes are in percent."""
    changes = [100 * (loss / plain[seed] - 1) for seed, loss in losses.items()]
    error = statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else None
    return {
        "loss": statistics.mean(losses.values()),
        "spread": None if error is None else 100 * statistics.stdev(losses.values()) / statistics.mean(losses.values()),
        "changes": None if setting == "plain" else "  ".join(f"{change:+.2f}" for change in changes),
        "mean": None if setting == "plain" else statistics.mean(changes),
        "error": None if setting == "plain" else error,
    }


COLUMNS = (
    ("setting", "name", "{}"),
    ("loss", "loss", "{:.4f}"),
    ("spread of seeds, %", "spread", "{:.2f}"),
    ("change of each seed, %", "changes", "{}"),
    ("mean", "mean", "{:+.2f}"),
    ("standard error", "error", "{:.2f}"),
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options.make_parser(__doc__)
    options.add_choice(parser, "--settings", SETTINGS, default=("plain", "order", "all"))
    parser.add_argument("--seeds", type=options.positive, default=5, help="runs of each setting (default: %(default)s)")
    parser.add_argument("--steps", type=options.positive, default=350, help="(default: %(default)s)")
    parser.add_argument("--width", type=options.positive, default=256, help="of the model (default: %(default)s)")
    parser.add_argument("--eval-crops", type=options.positive, default=2048, help="of 128 bytes (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="JSON file of runs that have ended, to go on from")
    args = parser.parse_args(argv)
    if "plain" not in args.settings:
        parser.error("--settings: expected plain among them, which the others are compared with")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    kept: dict[str, float] = {}
    if args.results and args.results.exists():
        kept = json.loads(args.results.read_text(encoding="utf-8"))
    losses: dict[str, dict[int, float]] = {setting: {} for setting in args.settings}
    for seed in range(args.seeds):
        for setting in args.settings:
            key = f"{setting}, seed {seed}, width {args.width}, {args.steps} steps, {args.eval_crops} crops"
            if key not in kept:
                kept[key] = train(setting, seed, args)
                if args.results:
                    args.results.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            losses[setting][seed] = kept[key]
            print(f"{key}: {kept[key]:.4f}", file=sys.stderr, flush=True)
    rows = make_rows(losses, {}, COLUMNS, lambda name: summary(name, losses[name], losses["plain"]))
    about = f"examples/gpt, width {args.width}, {args.steps} steps of {CROPS} crops, {harness.machine()}"
    harness.publish(args, about, [render_table(rows, args.markdown, COLUMNS)], results=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
