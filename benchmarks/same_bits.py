"""Hashes of what small runs give, to show that a change of the core leaves every bit where it was.

    python benchmarks/same_bits.py --json before.json                 # at the old commit
    python benchmarks/same_bits.py --compare before.json              # at the new one: names the runs that differ
    python benchmarks/same_bits.py --only "2 ranks, stage 3"          # some of them

A run is five steps of a small model on CPU processes (gloo) with a tied weight, a weight without dimensions, odd sizes
and a parameter that is never used. Its hash covers the losses, the gradient norms, and at the end weights, fp32 masters
and optimizer states. Runs in 16 bits are compared too: the same order of sums gives the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.multiprocessing
from torch import Tensor, nn

import zerolite

WORLDS, STAGES = (1, 2, 3, 4), ("0", "1", "2", "3", "3 whole")
STEPS = 5
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
WAYS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "accumulation in bf16": {"gradient_accumulation_steps": 3, **PRECISIONS["bf16"]},
    "clipping": {"gradient_clipping": 0.05},
    "clipping by the loop": {},
    "weights": {"gradient_accumulation_steps": 2},
    "written values": {},
    "offload": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "overlapped gathers": {"zero_optimization": {"overlap_comm": True}},
    "all-reduce": {"zero_optimization": {"reduce_scatter": False}},
    "SGD": {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}},
    "Lion": {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
    "Adagrad": {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}},
    "torch's AdamW": {},
}
STATES = {
    "AdamW": ("exp_avg", "exp_avg_sq", "step"),
    "SGD": ("momentum_buffer",),
    "Lion": ("exp_avg",),
    "Adagrad": ("step", "sum"),
}


class Net(nn.Module):
    """``tokens [B, T]`` -> a loss: the next token's, by a tied embedding of 37 tokens and width 10."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 10)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 23), nn.GELU(), nn.Linear(23, 10)) for _ in range(3)
        )
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.unused = nn.Parameter(torch.ones(7))
        self.head = nn.Linear(10, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x * self.gain)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def runs(world: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name, config and way of each run on ``world`` ranks."""
    for stage in STAGES:
        name = f"{world} ranks, stage {stage}"
        for precision, more in PRECISIONS.items():
            yield f"{name}, {precision}", _config(stage, more), "plain"
        for way, more in WAYS.items() if world == 2 else ():
            yield f"{name}, {way}", _config(stage, more), way


def _config(stage: str, more: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": int(stage[0]), "reduce_bucket_size": 300, "allgather_bucket_size": 300}
    if stage == "3":
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 900}
    if stage.startswith("3"):
        more = {**more, "zero_optimization": {**more.get("zero_optimization", {})}}
        more["zero_optimization"].pop("overlap_comm", None)
    zero |= more.get("zero_optimization", {})
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, **more, "zero_optimization": zero}


def digest(config: dict[str, Any], way: str) -> str:
    """Train by ``config``, and return the hash on this rank. Called on all ranks."""
    torch.manual_seed(3)
    model, optimizer = Net(), None
    if way == "torch's AdamW":
        del config["optimizer"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    engine = zerolite.initialize(model, config, optimizer=optimizer)
    found = hashlib.sha256()
    for step in range(STEPS):
        for micro in range(engine.gradient_accumulation_steps):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + engine.rank)
            loss = engine(torch.randint(0, 37, (2, 9), generator=generator))
            engine.backward(loss, weight=1 + engine.rank + micro if way == "weights" else None)
            found.update(repr(float(loss.detach())).encode())
        if way == "clipping by the loop":
            nn.utils.clip_grad_norm_(engine.module.parameters(), 0.05)
        engine.step()
        found.update(repr(engine.get_global_grad_norm()).encode())
        if way == "written values":
            with zerolite.zero.GatheredParameters(engine.module, modifier_rank=0), torch.no_grad():
                engine.module.layers[1][1].weight.mul_(0.9)
    _add(found, engine.full_state_dict())
    _add(found, _states(engine, config.get("optimizer", ADAMW)["type"]))
    for parameter in engine.module.parameters():
        _add(found, zerolite.get_full_master(parameter))
    return found.hexdigest()[:16]


def _states(engine: Any, optimizer: str) -> dict[int, dict[str, Tensor]]:
    """Return the full states by the position of their parameter."""
    parameters = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Tensor]] = {}
    for name in STATES[optimizer]:
        for position, value in enumerate(zerolite.get_full_optimizer_state(parameters, name)):
            if value is not None:
                states.setdefault(position, {})[name] = value
    return states


def _add(found: Any, value: Any) -> None:
    """Add a tensor, or a container of tensors, to the hash."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            found.update(str(key).encode())
            _add(found, value[key])
    elif isinstance(value, Tensor):
        found.update(bytes(value.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()))
    else:
        found.update(repr(value).encode())


def _rank(rank: int, world: int, port: int, only: str, out: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(world), ZEROLITE_LOG_LEVEL="error")
    torch.set_num_threads(1)
    for name, config, way in runs(world):
        if only in name:
            found = digest(config, way)
            if rank == 0:
                out[name] = found
    zerolite.destroy()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the hashes there")
    parser.add_argument("--compare", type=Path, help="hashes of another commit, written by --json")
    parser.add_argument("--only", default="", help="run those whose name contains this")
    args = parser.parse_args()
    with torch.multiprocessing.Manager() as manager:
        out = manager.dict()
        for world in WORLDS:
            if any(args.only in name for name, _, _ in runs(world)):
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    port = free.getsockname()[1]
                torch.multiprocessing.spawn(_rank, (world, port, args.only, out), nprocs=world)
        found = dict(out)
    print(f"{len(found)} runs")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.compare is None:
        return 0
    before = json.loads(args.compare.read_text(encoding="utf-8"))
    different = [name for name, value in found.items() if before.get(name) != value]
    print("\n".join(f"differs: {name}" for name in different) or "all bits are the same")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
