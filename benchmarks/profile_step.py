"""Where the time of a zerolite step goes on rank 0, beside the same step computed alone.

    python benchmarks/profile_step.py --stage 1

Time is given to the innermost phase that is running, so the lines add up to the whole step. `CPU` is the processor time
of the thread that trains: on a machine with other work it is the steadier figure, and where it is smaller than the wall
time the thread has waited.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.competitors import Setting, make_zerolite_engine, optimizer_for
from benchmarks.model import ModelSize, build_model, make_batches
from benchmarks.workers import join_group

WARMUP = 6  # steps before anything is counted: stage 3 then follows its plan


class PhaseTimer:
    """Exclusive wall and thread-CPU time of nested phases; one entry per step and phase."""

    def __init__(self) -> None:
        self.steps: list[dict[str, tuple[float, float]]] = []
        self._current: dict[str, list[float]] = {}
        self._stack: list[str] = []
        self._last = (0.0, 0.0)

    def _charge(self) -> None:
        now = (time.perf_counter(), time.thread_time())
        if self._stack:
            spent = self._current[self._stack[-1]]
            spent[0] += now[0] - self._last[0]
            spent[1] += now[1] - self._last[1]
        self._last = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    @contextmanager
    def step(self) -> Iterator[None]:
        self._current = defaultdict(lambda: [0.0, 0.0])
        with self.phase("other"):
            yield
        self.steps.append({name: (wall, cpu) for name, (wall, cpu) in self._current.items()})

    def table(self) -> dict[str, tuple[float, float]]:
        """Phase -> median (wall, CPU) in ms."""
        names = dict.fromkeys(name for step in self.steps for name in step)
        zero = (0.0, 0.0)
        return {
            name: (
                1e3 * statistics.median(step.get(name, zero)[0] for step in self.steps),
                1e3 * statistics.median(step.get(name, zero)[1] for step in self.steps),
            )
            for name in names
        }


Step = Callable[[torch.Tensor, torch.Tensor, PhaseTimer], None]


def _alone(setting: Setting, size: ModelSize) -> Step:
    model = build_model(size)
    optimizer = optimizer_for(model, fused=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor, timer: PhaseTimer) -> None:
        with timer.phase("forward"):
            loss = model(tokens, targets)
        with timer.phase("backward"):
            loss.backward()
        with timer.phase("norm and finiteness"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with timer.phase("update"):
            optimizer.step()
        with timer.phase("clear"):
            optimizer.zero_grad()

    return step


def _zerolite(setting: Setting, size: ModelSize, stage: int, zero: dict[str, Any]) -> Step:
    engine = make_zerolite_engine(build_model(size), setting, stage, zero)

    def step(tokens: torch.Tensor, targets: torch.Tensor, timer: PhaseTimer) -> None:
        with timer.phase("forward"):
            loss = engine(tokens, targets)
        with timer.phase("backward"):
            engine.backward(loss)
        with timer.phase("wait for reductions"):
            engine.reduce_gradients()
        with timer.phase("norm and finiteness"):
            engine.clip_gradients(1.0)
        with timer.phase("update"):
            engine.update()
        with timer.phase("all-gather of parameters"):
            engine.publish()
        with timer.phase("clear"):
            engine.zero_grad()

    return step


def _measure(
    timer: PhaseTimer, step: Step, setting: Setting, size: ModelSize, rank: int, steps: int, warmup: int
) -> None:
    """`steps` timed steps after `warmup` that are thrown away."""
    batches = make_batches(size, setting.micro_batch, rank)
    kept, timer.steps = timer.steps, []
    for number in range(warmup + steps):
        with timer.step():
            step(*batches[number % len(batches)], timer)
    timer.steps = kept + timer.steps[warmup:]


def _rank_main(rank: int, setting: Setting, size: ModelSize, args: argparse.Namespace, store: str) -> None:
    join_group(rank, setting, store)
    zero = {} if args.bucket is None else {"reduce_bucket_size": args.bucket, "allgather_bucket_size": args.bucket}
    alone, together = PhaseTimer(), PhaseTimer()
    alone_step, zerolite_step = _alone(setting, size), _zerolite(setting, size, args.stage, zero)
    for number in range(args.rounds):
        for timer, step in ((alone, alone_step), (together, zerolite_step)):
            dist.barrier()
            _measure(timer, step, setting, size, rank, args.steps, 2 if number else WARMUP)
    if rank == 0:
        print(render(alone.table(), together.table(), args.stage))
    dist.destroy_process_group()


def _sum(table: dict[str, tuple[float, float]]) -> tuple[float, float]:
    return sum(wall for wall, _ in table.values()), sum(cpu for _, cpu in table.values())


def render(alone: dict[str, tuple[float, float]], together: dict[str, tuple[float, float]], stage: int) -> str:
    lines = [f"{'ms a step, median':<24}{'alone':>8}{'CPU':>8}{f'stage {stage}':>10}{'CPU':>8}{'CPU more':>10}"]
    names = list(dict.fromkeys([*together, *alone]))
    zero = (0.0, 0.0)
    for name in names:
        a, b = alone.get(name, zero), together.get(name, zero)
        lines.append(f"{name:<24}{a[0]:8.2f}{a[1]:8.2f}{b[0]:10.2f}{b[1]:8.2f}{b[1] - a[1]:10.2f}")
    a, b = _sum(alone), _sum(together)
    lines.append(f"{'sum':<24}{a[0]:8.2f}{a[1]:8.2f}{b[0]:10.2f}{b[1]:8.2f}{b[1] - a[1]:10.2f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=range(4), default=1)
    parser.add_argument("--nproc", type=int, default=2, help="gloo ranks, one thread each")
    parser.add_argument("--steps", type=int, default=6, help="timed steps in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of zerolite; alone is always fp32")
    parser.add_argument("--bucket", type=int, help="elements in a bucket (default: the engine's own)")
    parser.add_argument("--micro-batch", type=int, default=2)
    for name in ("layers", "width", "heads", "vocab", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(ModelSize, name))
    args = parser.parse_args(argv)
    size = ModelSize(args.layers, args.width, args.heads, args.vocab, args.context)
    setting = Setting("cpu", args.dtype, args.micro_batch, args.nproc)
    with tempfile.TemporaryDirectory(prefix="zerolite-profile-") as directory:
        arguments = (setting, size, args, str(Path(directory) / "store"))
        mp.start_processes(_rank_main, args=arguments, nprocs=args.nproc, start_method="forkserver")
    return 0


if __name__ == "__main__":
    sys.exit(main())
