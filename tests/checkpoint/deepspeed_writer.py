"""Universal checkpoints made by DeepSpeed itself, for the tests of the import. Run by a Python that has DeepSpeed:

    python deepspeed_writer.py OUT WORLD_SIZE

Every case of `CASES` is trained and saved in `OUT/<case>` by `WORLD_SIZE` processes on CPUs, and converted. Beside the
checkpoint, rank 0 leaves `expected.pt` with the losses of its next steps. Imports nothing of zerolite.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 3
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3, "zero": {"sub_group_size": 40}},
    "stage1_bf16": {"stage": 1, "dtype": "bf16"},
    "stage2_fp16": {"stage": 2, "dtype": "fp16"},
    "stage3_offload": {"stage": 3, "zero": OFFLOAD, "own": True},  # its own Adam counts steps elsewhere
    "stage2_no_step": {"stage": 2, "steps": 0},
}


class Block(nn.Module):
    def __init__(self, width: int, frozen: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width + 2)
        self.back = nn.Linear(width + 2, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.linear.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.tanh(self.linear(self.norm(x))))


class Model(nn.Module):
    """Odd sizes, tied, frozen, unused and one-element parameters, two empty ones on demand, and buffers."""

    def __init__(self, empty: bool, width: int = 5, vocabulary: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, frozen=False), Block(width, frozen=True)])
        self.scale = nn.Parameter(torch.tensor([1.25]))
        self.unused = nn.Parameter(torch.linspace(-1, 1, 13))
        if empty:
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.nothing_either = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.linspace(-0.5, 0.5, width))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        x = x + self.mean.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            self.seen += tokens.numel()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def make_model(case: dict[str, Any]) -> Model:
    torch.manual_seed(7)
    return Model(empty=case["stage"] < 3)  # several ranks of DeepSpeed's stage 3 cannot gather an empty parameter


def make_optimizer(model: nn.Module, case: dict[str, Any]) -> torch.optim.Optimizer | None:
    """Matrices with weight decay; the others without and at another learning rate; frozen ones are among them."""
    if case.get("own"):
        return None
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.003},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), foreach=False)


def make_config(case: dict[str, Any], world_size: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": 2 * world_size,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": case["stage"],
            "reduce_bucket_size": 1000,
            # Stage 3 otherwise replaces torch's linear for the rest of the process, in later cases too. DeepSpeed's
            # rounds before it adds the bias, torch's only after it.
            "memory_efficient_linear": False,
            **case.get("zero", {}),
        },
    }
    if case.get("own"):
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.02}}
    else:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": [0.01, 0.003]}}
    if case.get("dtype") == "bf16":
        config["bf16"] = {"enabled": True}
    if case.get("dtype") == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
    return config


def tokens_at(step: int, rank: int) -> Tensor:
    return torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(100 * step + rank))


def train(engine: Any, start: int, count: int, rank: int) -> list[float]:
    """The losses of ``count`` steps on one rank's samples, from step ``start`` on."""
    losses = []
    for step in range(start, start + count):
        loss = engine(tokens_at(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def write_case(directory: Path, case: dict[str, Any], rank: int, world_size: int) -> None:
    import deepspeed

    model = make_model(case)
    optimizer = make_optimizer(model, case)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=make_config(case, world_size))
    steps = case.get("steps", STEPS)
    train(engine, 0, steps, rank)
    client_state = {"epoch": 4, "history": [0.5, 0.25], "nested": {"kept": (1, 2)}}
    engine.save_checkpoint(str(directory), tag="native", client_state=client_state)
    expected: dict[str, Any] = {
        "loss_scale": float(engine.optimizer.loss_scale) if case.get("dtype") == "fp16" else None,
        "lrs": [float(group["lr"]) for group in engine.optimizer.param_groups],
        "next_losses": train(engine, steps, 3, rank),
    }
    if rank == 0:
        torch.save(expected, directory / "expected.pt")
    engine.destroy()


def run(rank: int, world_size: int, out: str, meeting: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    # It takes no CPU to be able to compute in fp16; torch's kernels are.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    for name, case in CASES.items():
        write_case(Path(out) / name, case, rank, world_size)
    torch.distributed.destroy_process_group()


def convert(directory: str) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    folders = {"input_folder": f"{directory}/native", "output_folder": f"{directory}/universal"}
    flags = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    main(argparse.Namespace(**folders, **flags, num_extract_workers=1, num_merge_workers=1))


def main() -> None:
    out, world_size = sys.argv[1], int(sys.argv[2])
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run, (world_size, out, f"{directory}/meeting"), nprocs=world_size)
    for name in CASES:
        convert(f"{out}/{name}")


if __name__ == "__main__":
    main()
