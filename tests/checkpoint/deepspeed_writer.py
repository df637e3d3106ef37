"""Checkpoints made by DeepSpeed itself, for the tests of the import. Run by an interpreter that has DeepSpeed:

    python deepspeed_writer.py OUT WORLD_SIZE

Every case of `CASES` is saved in `OUT/<case>`, by a world of `WORLD_SIZE` processes on CPUs. Beside the checkpoint,
rank 0 leaves `expected.pt`: for each parameter what the engine held (its master values and optimizer states), buffers,
the losses of its next steps, and the weights as DeepSpeed's own script consolidates them. Plain data, so that
torch.load(weights_only=True) reads it. Imports nothing of zerolite.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "stage1_bf16": {"stage": 1, "dtype": "bf16"},
    "stage1_bf16_fp32_grads": {"stage": 1, "dtype": "bf16", "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "stage1_elastic": {"stage": 1, "zero": {"elastic_checkpoint": True}},
    "stage2_bf16": {"stage": 2, "dtype": "bf16"},
    "stage2_fp16": {"stage": 2, "dtype": "fp16"},
    "stage2_round_robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "stage2_aligned": {"stage": 2, "dtype": "bf16", "zero": {"parameter_alignment": True}},
    "stage2_sgd": {"stage": 2, "optimizer": "sgd"},
    "stage2_before_any_step": {"stage": 2, "steps": 0},
    "stage2_no_frozen": {"stage": 2, "exclude_frozen_parameters": True},
    "stage3_fp32": {"stage": 3},
    "stage3_bf16": {"stage": 3, "dtype": "bf16"},
    "stage3_sub_groups": {"stage": 3, "zero": {"sub_group_size": 40}},
    "stage3_no_frozen": {"stage": 3, "exclude_frozen_parameters": True},
    "stage3_optimizer_of_config": {"stage": 3, "dtype": "bf16", "optimizer": None},
    "stage1_own_adam": {"stage": 1, "optimizer": "own"},
    "stage2_offload": {"stage": 2, "optimizer": "own", "zero": {"offload_optimizer": {"device": "cpu"}}},
    "stage3_offload": {"stage": 3, "optimizer": "own", "zero": {"offload_optimizer": {"device": "cpu"}}},
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
    """Odd sizes, tied, frozen, unused and one-element parameters (DeepSpeed cannot train 0-dimensional ones), two empty
    ones on demand, and buffers of several dtypes."""

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
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            self.seen += tokens.numel()
            self.mean.add_(0.125)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def make_model(case: dict[str, Any]) -> Model:
    torch.manual_seed(7)
    return Model(empty=case["stage"] < 3)  # several ranks of DeepSpeed's stage 3 cannot gather an empty parameter


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay; the others without and at another learning rate; frozen ones are among them."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.003}]


def make_optimizer(model: nn.Module, kind: str | None) -> torch.optim.Optimizer | None:
    if kind in (None, "own"):
        return None
    if kind == "sgd":
        return torch.optim.SGD(groups_of(model), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(groups_of(model), lr=0.01, betas=(0.9, 0.95), foreach=False)


def make_config(case: dict[str, Any], world_size: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": 2 * world_size,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case["stage"], "reduce_bucket_size": 1000, **case.get("zero", {})},
        **case.get("config", {}),
    }
    kind = case.get("optimizer", "adamw")
    if kind in (None, "own"):  # torch's class or DeepSpeed's, which it compiles
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.02, **({} if kind else {"torch_adam": True})}}
    else:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": [0.01, 0.003]}}
    if case.get("dtype") == "bf16":
        config["bf16"] = {"enabled": True}
    if case.get("dtype") == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
    return config


def tokens_at(step: int, rank: int) -> Tensor:
    return torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(100 * step + rank))


def full_values(engine: Any, states: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
    """Return the engine's full values of each trained parameter. Called on all ranks."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer = engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        # At stages 1 and 2 DeepSpeed notes where the optimizer states are after the first step of the first group, when
        # the others have none, and goes by the order that the parameters have without round_robin_gradients.
        order = getattr(optimizer, "bit16_groups", None)
        optimizer.bit16_groups = getattr(optimizer, "round_robin_bit16_groups", None)
        optimizer._link_all_hp_params()
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
        optimizer.bit16_groups = order
    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad and math.prod(shape_of(param)):
            values = {"master": safe_get_full_fp32_param(param)}
            values |= {state: safe_get_full_optimizer_state(param, state) for state in states}
            found[name] = {key: value.detach().clone().reshape(shape_of(param)) for key, value in values.items()}
    return found


def shape_of(param: Tensor) -> torch.Size:
    return getattr(param, "ds_shape", param.shape)


def frozen_values(engine: Any) -> dict[str, Tensor]:
    """Called on all ranks."""
    import deepspeed

    found = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad or not math.prod(shape_of(param)):
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                found[name] = param.detach().clone()
    return found


def consolidated(directory: Path, exclude_frozen: bool) -> dict[str, Tensor] | None:
    """Run DeepSpeed's script on the checkpoint; None where it refuses its own (bf16 at stage 1)."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    try:
        found = get_fp32_state_dict_from_zero_checkpoint(str(directory), exclude_frozen_parameters=exclude_frozen)
    except ValueError:
        return None
    return {name: value.detach().clone() for name, value in found.items()}


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
    optimizer = make_optimizer(model, case.get("optimizer", "adamw"))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=make_config(case, world_size))
    steps = case.get("steps", STEPS)
    train(engine, 0, steps, rank)
    client_state = {"epoch": 4, "history": [0.5, 0.25], "nested": {"where": Path("/data"), "kept": (1, 2)}}
    exclude = case.get("exclude_frozen_parameters", False)
    engine.save_checkpoint(str(directory), client_state=client_state, exclude_frozen_parameters=exclude)
    states = ("momentum_buffer",) if case.get("optimizer") == "sgd" else ("exp_avg", "exp_avg_sq")
    states = states if steps else ()
    expected: dict[str, Any] = {
        "trained": full_values(engine, states),
        "frozen": frozen_values(engine),
        "buffers": {name: value.detach().clone() for name, value in engine.module.named_buffers()},
        "loss_scale": float(engine.optimizer.loss_scale) if case.get("dtype") == "fp16" else None,
        "lrs": [float(group["lr"]) for group in engine.optimizer.param_groups],
        "skipped_steps": engine.skipped_steps,
    }
    expected["next_losses"] = train(engine, steps, 3, rank)
    if rank == 0:
        expected["consolidated"] = consolidated(directory, exclude)
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


def main() -> None:
    out, world_size = sys.argv[1], int(sys.argv[2])
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run, (world_size, out, f"{directory}/meeting"), nprocs=world_size)


if __name__ == "__main__":
    main()
