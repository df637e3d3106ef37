"""Time of a zerolite step by phase, on rank 0, beside the same step computed alone.

    python benchmarks/profile_step.py --stage 1

The lines add up to the whole step. `CPU` is the processor time of the thread that trains: on a machine with other work
it is the steadier figure, and where it is smaller than the wall time the thread has waited.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import options
from benchmarks.engines import make_zerolite_engine
from benchmarks.model import ModelSize, build_model, make_batches
from benchmarks.options import positive
from benchmarks.ranks import join_group
from benchmarks.setting import CLIP, Setting, optimizer_for

WARMUP = 6  # steps before anything is counted: stage 3 then follows its plan
# The phases of a step, in order, and what each does; a phase may use what the one before gave.
Phases = dict[str, Callable[..., object]]


class PhaseTimer:
    """Wall and thread-CPU milliseconds of each phase, one entry a step."""

    def __init__(self, phases: Phases) -> None:
        self.phases = phases
        self.spent: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor, count: bool) -> None:
        """Run the phases: the first gets the batch, the second the loss, the others nothing."""
        loss: object = None
        for number, (name, run) in enumerate(self.phases.items()):
            wall, cpu = time.perf_counter(), time.thread_time()
            result = run(*([tokens, targets], [loss], [])[min(number, 2)])
            if count:
                self.spent[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - cpu)))
            loss = result if number == 0 else None

    def table(self) -> dict[str, tuple[float, float]]:
        """Medians, and their sum."""
        found = {name: tuple(map(statistics.median, zip(*spent, strict=True))) for name, spent in self.spent.items()}
        return found | {"sum": tuple(map(sum, zip(*found.values(), strict=True)))}


def alone(size: ModelSize) -> Phases:
    model = build_model(size)
    optimizer = optimizer_for(model, fused=True)
    return {
        "forward": model,
        "backward": torch.Tensor.backward,
        "norm and finiteness": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP),
        "update": optimizer.step,
        "clear": optimizer.zero_grad,
    }


def with_zerolite(size: ModelSize, setting: Setting, stage: int, bucket: int | None) -> Phases:
    sizes = {} if bucket is None else {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    engine = make_zerolite_engine(build_model(size), setting, stage, **sizes)
    return {
        "forward": engine,
        "backward": engine.backward,
        "wait for reductions": engine.reduce_gradients,
        "norm and finiteness": lambda: engine.clip_gradients(CLIP),
        "update": engine.step,  # with the all-gather of parameters, and without gradients at its end
    }


def rank_main(rank: int, setting: Setting, size: ModelSize, args: argparse.Namespace, store: str) -> None:
    join_group(rank, setting, store)
    timers = PhaseTimer(alone(size)), PhaseTimer(with_zerolite(size, setting, args.stage, args.bucket))
    batches = make_batches(size, setting.micro_batch, rank)
    for number in range(args.rounds):
        warmup = 2 if number else WARMUP
        for timer in timers:
            dist.barrier()
            for step in range(warmup + args.steps):
                timer.step(*batches[step % len(batches)], count=step >= warmup)
    if rank == 0:
        print(render(*(timer.table() for timer in timers), args.stage))
    dist.destroy_process_group()


def render(alone: dict[str, tuple[float, float]], together: dict[str, tuple[float, float]], stage: int) -> str:
    lines = [f"{'ms a step, median':<24}{'alone':>8}{'CPU':>8}{f'stage {stage}':>10}{'CPU':>8}{'CPU more':>10}"]
    for name, (wall, cpu) in together.items():
        wall_alone, cpu_alone = alone.get(name, (0.0, 0.0))
        lines.append(f"{name:<24}{wall_alone:8.2f}{cpu_alone:8.2f}{wall:10.2f}{cpu:8.2f}{cpu - cpu_alone:10.2f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=range(4), default=1)
    parser.add_argument("--steps", type=positive, default=6, help="timed steps in a round")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--bucket", type=positive, help="elements in a bucket (default: the engine's own)")
    parser.add_argument("--micro-batch", type=positive, default=2)
    options.add_model(parser)
    args = parser.parse_args(argv)
    size = options.model_size(args, parser)
    setting = Setting("cpu", args.dtype, args.micro_batch, args.nproc)
    with tempfile.TemporaryDirectory(prefix="zerolite-profile-") as directory:
        arguments = (setting, size, args, str(Path(directory) / "store"))
        mp.start_processes(rank_main, args=arguments, nprocs=args.nproc, start_method="forkserver")
    return 0


if __name__ == "__main__":
    sys.exit(main())
