"""Training that DeepSpeed has begun, continued by zerolite."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import zerolite
from tests.checkpoint.deepspeed_writer import CASES, make_config, make_model, make_optimizer, tokens_at

KEYS = ("gradient_clipping", "scheduler", "bf16", "train_micro_batch_size_per_gpu")


def go_on(checkpoint: str, case: str, deepspeed_ranks: int, stage: int, start: int, count: int) -> list[float]:
    """The losses of this rank's first micro-batches of ``count`` steps from step ``start`` on, which are those of
    DeepSpeed's rank with the same number. Weights, settings and schedule of the engine are others until it has loaded
    the checkpoint."""
    model = make_model(CASES[case])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    config: dict[str, Any] = {key: v for key, v in make_config(CASES[case], deepspeed_ranks).items() if key in KEYS}
    config["zero_optimization"] = {"stage": stage}
    micro_batches = config["gradient_accumulation_steps"] = deepspeed_ranks // dist.get_world_size()
    optimizer = make_optimizer(model, CASES[case].get("optimizer", "adamw"))
    assert optimizer is not None
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.7
    engine = zerolite.initialize(model, config, optimizer=optimizer)
    path, client_state = engine.load_checkpoint(checkpoint)
    assert path is not None and path.endswith(f"global_step{start}") and client_state["epoch"] == 4
    assert (engine.global_steps, engine.micro_steps) == (start, start)
    losses = []
    for step in range(start, start + count):
        for micro_batch in range(micro_batches):
            loss = engine(tokens_at(step, dist.get_rank() + micro_batch * dist.get_world_size()))
            engine.backward(loss)
            if micro_batch == 0:
                losses.append(loss.item())
            engine.step()
    return losses
