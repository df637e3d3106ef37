"""Train a byte-level GPT, with everything about the training in a JSON config.

    zerolite --nproc 2 train.py --config configs/zero2.json
    torchrun --nproc-per-node 2 train.py --config configs/zero2.json
    srun --ntasks 2 python train.py --config configs/zero2.json
    python train.py --config configs/zero2.json
    zerolite --nproc 4 train.py --config configs/zero3.json --resume    go on where a run was stopped
    zerolite --nproc 4 train.py --config configs/grid.json              the same on 2 pipeline stages × 2 tensor ranks

The corpus is the source of Python's standard library, unless --data gives another. The run writes metrics.jsonl,
loss.png and checkpoints to --out and prints a generated sample at the end.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zerolite
from data import Corpus, DataError, check_length, crops_at, evenly_spaced, load_corpus, random_crops
from model import GPT, GPTConfig
from report import Report

STARTED = time.perf_counter()
HERE = Path(__file__).resolve().parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT.", allow_abbrev=False)
    add = parser.add_argument
    add("--config", default=str(HERE / "configs" / "zero2.json"), help="zerolite's JSON config (default: %(default)s)")
    add("--data", nargs="+", default=[], metavar="FILE", help="files or directories (default: the standard library)")
    add(
        "--out",
        type=Path,
        default=Path("runs/gpt"),
        help="directory of metrics.jsonl, loss.png and checkpoints (default: %(default)s)",
    )
    add("--resume", action="store_true", help="continue from the newest checkpoint in --out, if there is one")
    add("--steps", type=int, help="optimizer steps (default: total_num_steps of the schedule in the config)")
    add(
        "--max-minutes", type=float, default=2.5, help="stop training after so long; inf = never (default: %(default)s)"
    )
    add("--seed", type=int, default=0, help="of the weights and of the order of the data (default: %(default)s)")
    add("--context", type=int, default=128, help="bytes that the model sees at once (default: %(default)s)")
    add("--layers", type=int, default=4, help="(default: %(default)s)")
    add("--heads", type=int, default=4, help="(default: %(default)s)")
    add("--width", type=int, default=256, help="(default: %(default)s)")
    add("--log-every", type=int, default=10, help="steps between two lines of metrics (default: %(default)s)")
    add("--eval-every", type=int, default=100, help="steps between two validations (default: %(default)s)")
    add("--save-every", type=int, default=100, help="steps between two checkpoints, 0 = none (default: %(default)s)")
    add(
        "--eval-crops",
        type=int,
        default=512,
        help="crops of validation text, all ranks together (default: %(default)s)",
    )
    add("--prompt", default="def ", help="what the generated sample starts with (default: %(default)r)")
    add("--sample-bytes", type=int, default=300, help="length of the generated sample, 0 = none (default: %(default)s)")
    args = parser.parse_args()
    for name in ("context", "layers", "heads", "width", "log_every", "eval_every", "eval_crops"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} expects 1 or more, got {getattr(args, name)}")
    for name in ("steps", "save_every"):
        if (getattr(args, name) or 0) < 0:
            parser.error(f"--{name.replace('_', '-')} expects 0 or more, got {getattr(args, name)}")
    if not args.prompt:
        parser.error("--prompt expects at least one character")
    return args


def main() -> None:
    args = parse_arguments()
    try:
        corpus = load_corpus(args.data)
        check_length(corpus, args.context)
    except DataError as error:
        sys.exit(f"train.py: {error}")

    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(context=args.context, layers=args.layers, heads=args.heads, width=args.width))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = zerolite.initialize(model, args.config)
    steps = args.steps if args.steps is not None else steps_of_schedule(engine)
    checkpoint, progress = None, {}
    if args.resume:
        checkpoint, progress = engine.load_checkpoint(args.out / "checkpoints", missing_ok=True)
    progress = progress or {"step": 0, "crops": 0}
    report = Report(engine, args.out, steps, STARTED, args.max_minutes, progress["step"])
    report.say(describe(corpus, parameters, engine, steps))
    if args.resume:
        report.say(f"resumes from {checkpoint}" if checkpoint else "found no checkpoint to resume from: starts anew")

    train(engine, corpus, steps, args, report, **progress)
    engine.wait_for_checkpoint()
    if args.sample_bytes > 0:
        report.say(generate_sample(engine, model.config, args))
    report.close()
    zerolite.destroy()


def train(
    engine: Any, corpus: Corpus, steps: int, args: argparse.Namespace, report: Report, step: int, crops: int
) -> None:
    """step, crops: how many are behind it, of all processes together."""
    batches = micro_batches(engine, corpus, args, crops)
    crops_of_step = engine.gradient_accumulation_steps * micro_batch_size(engine) * engine.data_parallel_world_size
    if step == 0:
        validate(engine, corpus, 0, args, report)
    while step < steps and not report.out_of_time:
        lr = engine.get_lr()[0]  # this step's: an update moves the schedule on
        report.add(engine.train_batch(batches), tokens=crops_of_step * args.context)
        crops += crops_of_step
        step += 1
        saves = args.save_every > 0 and step % args.save_every == 0
        if step % args.log_every == 0 or saves or step == steps:
            report.log(step, lr)
        last = step == steps or report.out_of_time
        if step % args.eval_every == 0 or last:
            validate(engine, corpus, step, args, report)
        if saves or (args.save_every > 0 and last):
            progress = {"step": step, "crops": crops}
            engine.save_checkpoint(args.out / "checkpoints", client_state=progress, async_save=True)
    if step < steps:
        report.say(f"stopped after {step} of {steps} steps, because --max-minutes {args.max_minutes:g} are over")


def micro_batches(engine: Any, corpus: Corpus, args: argparse.Namespace, crops: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For ever this process's share of what the data-parallel ranks train on, from the crop with that number on.
    Processes with other parts of the same model take the same."""
    size = micro_batch_size(engine)
    first = crops + engine.data_parallel_rank * size
    while True:
        yield random_crops(corpus.train, args.context, first, size, args.seed)
        first += engine.data_parallel_world_size * size


def validate(engine: Any, corpus: Corpus, step: int, args: argparse.Namespace, report: Report) -> None:
    """The mean loss over crops spread evenly over the validation text. Each rank takes the same number of batches."""
    report.pause()
    size, ranks = micro_batch_size(engine), engine.data_parallel_world_size
    rounds = math.ceil(args.eval_crops / (size * ranks * engine.gradient_accumulation_steps))
    batches = rounds * engine.gradient_accumulation_steps
    starts = evenly_spaced(corpus.validation, args.context, batches * size * ranks)[engine.data_parallel_rank :: ranks]
    own = (crops_at(corpus.validation, args.context, starts[n * size : (n + 1) * size]) for n in range(batches))
    loss = sum(float(engine.eval_batch(own)) for _ in range(rounds)) / rounds
    report.log_validation(step, loss)


def generate_sample(engine: Any, config: GPTConfig, args: argparse.Namespace) -> str:
    """Called on all ranks, even though one prints: a parameter may be spread over them."""
    prompt = torch.tensor([list(args.prompt.encode())], device=engine.device)
    engine.eval()
    model = engine.module
    if engine.pipeline_stages > 1:  # no rank has all layers
        model = GPT(config).to(engine.device).eval()
        model.load_state_dict(engine.full_state_dict())
    tokens = model.generate(prompt, args.sample_bytes, seed=args.seed)
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    return f"a sample of {args.sample_bytes} bytes after {args.prompt!r}:\n{'-' * 80}\n{text}\n{'-' * 80}"


def steps_of_schedule(engine: Any) -> int:
    scheduler = engine.config.scheduler
    steps = scheduler.params.get("total_num_steps") if scheduler is not None else None
    if steps is None:
        sys.exit("train.py: expected --steps, because the config has no schedule with total_num_steps")
    return int(steps)


def micro_batch_size(engine: Any) -> int:
    return engine.train_micro_batch_size_per_gpu or 8  # null in the config means that the loop decides


def describe(corpus: Corpus, parameters: int, engine: Any, steps: int) -> str:
    sizes = (engine.pipeline_stages, engine.data_parallel_world_size, engine.tensor_parallel_world_size)
    grid = f" ({sizes[0]} stages × {sizes[1]} data × {sizes[2]} tensor)" if sizes[1] < engine.world_size else ""
    return (
        f"{parameters / 1e6:.2f} million parameters; {len(corpus.train) / 1e6:.1f} MB of training text in "
        f"{corpus.train_files} files, {len(corpus.validation) / 1e6:.1f} MB of validation text in "
        f"{corpus.validation_files}; processes: {engine.world_size}{grid}, ZeRO stage: "
        f"{engine.config.zero_optimization.stage}, steps: {steps}"
    )


if __name__ == "__main__":
    main()
