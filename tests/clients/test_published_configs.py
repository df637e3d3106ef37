"""Published DeepSpeed configs, filled as accelerate and Trainer fill them: each loads and trains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerolite.compat.deepspeed as deepspeed
from tests.clients.published_configs import CONFIGS
from tests.toolkit.ranks import on_ranks

pytestmark = pytest.mark.slow
HIDDEN, MICRO = 16, 2

FILLED: dict[str, Any] = {
    "train_batch_size": 2 * 2 * MICRO,
    "train_micro_batch_size_per_gpu": MICRO,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16.enabled": True,
    "fp16.enabled": False,
    "zero_optimization.reduce_bucket_size": HIDDEN * HIDDEN,
    "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * HIDDEN * HIDDEN),
    "zero_optimization.stage3_param_persistence_threshold": 10 * HIDDEN,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
    "optimizer.params.lr": 1e-2,
    "optimizer.params.betas": [0.9, 0.99],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 1e-2,
    "scheduler.params.warmup_num_steps": 2,
    "scheduler.params.total_num_steps": 10,
}
"""What the clients write for "auto". They leave every other "auto" as it is."""


def fill(values: dict[str, Any], path: str = "") -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            fill(value, f"{path}{key}.")
        elif isinstance(value, str) and value == "auto":
            values[key] = FILLED.get(path + key, value)


def as_the_client(config: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    if config.get("gradient_accumulation_steps") == 1 and config.get("train_batch_size") == "auto":
        config["train_batch_size"] = 2 * MICRO
    if "bf16" not in config and config.get("fp16", {}).get("enabled") == "auto":
        config["fp16"]["enabled"] = True
    fill(config)
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys():
        config["train_micro_batch_size_per_gpu"] = MICRO  # Trainer of 2021
    return config


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().pow(2).mean()


def data(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(MICRO, HIDDEN, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def plain_losses(config: dict[str, Any], accumulation: int, steps: int) -> list[float]:
    """The losses of rank 0 in plain PyTorch, in fp32, with the config's optimizer, schedule and clipping."""
    model, params = Net(), dict(config.get("optimizer", {}).get("params", {"lr": 1e-2}))
    kind = torch.optim.Adam if config.get("optimizer", {}).get("type") == "Adam" else torch.optim.AdamW
    known = {key: value for key, value in params.items() if key in ("lr", "betas", "eps", "weight_decay")}
    if "optimizer" in config and not params.get("torch_adam"):
        known.setdefault("weight_decay", 0.0)
    optimizer = kind(model.parameters(), **known)
    schedule = config.get("scheduler")
    if schedule is not None:
        made = getattr(deepspeed.runtime.lr_schedules, schedule["type"])(optimizer, **schedule["params"])
    losses = []
    for step in range(steps):
        for micro in range(accumulation):
            both = [model(data(step, micro, rank)) for rank in range(2)]
            losses.append(both[0].item())
            (sum(both) / 2 / accumulation).backward()
        limit = config.get("gradient_clipping")
        if limit:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            made.step()
    return losses


@pytest.mark.parametrize("name", CONFIGS)
@on_ranks(2)
def test_a_published_config_trains(name: str) -> None:
    config = as_the_client(CONFIGS[name])
    model = Net()
    given: dict[str, Any] = {"model_parameters": model.parameters()}
    if "optimizer" not in config:  # the client's own
        offloaded = "offload_optimizer" in config["zero_optimization"]
        made = deepspeed.ops.adam.DeepSpeedCPUAdam if offloaded else torch.optim.AdamW
        given = {"optimizer": made(model.parameters(), lr=1e-2, weight_decay=1e-2)}
    engine = deepspeed.initialize(model=model, config=config, **given)[0]
    accumulation, steps, losses = engine.gradient_accumulation_steps(), 4, []
    for step in range(steps):
        for micro in range(accumulation):
            loss = engine(data(step, micro, dist.get_rank()))
            losses.append(float(loss))
            engine.backward(loss)
            engine.step()
    assert engine.global_steps == steps and engine.skipped_steps == 0
    if dist.get_rank() == 0:
        half = engine.fp16_enabled() or engine.bfloat16_enabled()
        assert losses == pytest.approx(plain_losses(config, accumulation, steps), rel=2e-2 if half else 1e-5)
