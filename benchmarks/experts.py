"""Step time and traffic of a mixture of experts: experts over ranks beside plain ZeRO, on the CPU in one run.

    python benchmarks/experts.py --ranks 2 --experts 32 --chosen 4 --width 256 --tokens 256

The settings take turns in the same processes, on the same batches. Shown are the median of a step's time, the processor
time of all ranks, and the collectives of rank 0's step by purpose, with the bytes of full tensors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import zerolite
from zerolite.comm import record

VOCABULARY = 1024


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Mixing of neighbouring tokens, then a layer of experts."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.chosen, width = options.chosen, options.width
        self.mix, self.norm, self.router = nn.Linear(width, width), nn.RMSNorm(width), nn.Linear(width, options.experts)
        self.experts = zerolite.moe.ExpertParallel(Expert(width, options.hidden) for _ in range(options.experts))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.roll(1, 0))
        rows = self.norm(x)
        weights, index = self.router(rows).softmax(-1).topk(self.chosen)
        return x + self.experts(rows, index, weights / weights.sum(-1, keepdim=True))


class Model(nn.Module):
    """`forward(tokens)` gives the loss of the next token."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:-1], tokens[1:])


def make_engine(options: argparse.Namespace, stage: int, size: int) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": options.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
        "expert_parallel": {"size": size},
    }
    return zerolite.initialize(Model(options), config)


def run_step(engine: Any, step: int, options: argparse.Namespace) -> float:
    """Run a step and return its loss."""
    generator = torch.Generator().manual_seed(step * engine.data_parallel_world_size + engine.data_parallel_rank)
    loss = engine(torch.randint(VOCABULARY, (options.tokens,), generator=generator))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def run_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    """Run all settings on one rank. Rank 0 prints."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "ZEROLITE_DEVICE": "cpu"}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=options.ranks)
    sizes = [size for size in map(int, options.sizes.split(",")) if size > 1]
    settings = {"stage 3": (3, 1), **{f"stage {s}, size {n}": (s, n) for n in sizes for s in (3, 2)}}
    engines = {name: make_engine(options, *setting) for name, setting in settings.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    processor: dict[str, list[float]] = {name: [] for name in engines}
    losses = {}
    for step in range(options.steps + 2):
        for name, engine in engines.items():
            torch.distributed.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            losses[name] = run_step(engine, step, options)
            torch.distributed.barrier()
            if step > 1:  # the first steps learn the order of launches
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - cpu)
    for name, engine in engines.items():
        with record() as recorder:
            run_step(engine, options.steps + 2, options)
        total = torch.tensor(statistics.median(processor[name]))
        torch.distributed.all_reduce(total)
        if rank == 0:
            wall, plain = (statistics.median(seconds[one]) for one in (name, "stage 3"))
            print(f"{name:18} {wall * 1e3:8.1f} ms  {wall / plain:5.2f} of plain stage 3  ", end="")
            print(f"{float(total):6.3f} s of processor time  loss {losses[name]:.4f}")
            for op, tag in sorted(recorder.summary()):
                print(f"    {op:16} {tag:12} {recorder.count(op, tag):4} {recorder.nbytes(op, tag) / 2**20:9.2f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("ranks", 2), ("experts", 32), ("chosen", 4), ("width", 256), ("hidden", 128), ("layers", 4), ("tokens", 256),
        ("steps", 7),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sizes", default="2", help="ranks that have all experts together, such as 2,4")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run_rank, (options, f"{directory}/store"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
