"""Pipelines of a stage a rank, by PyTorch's own API and by zerolite.

PyTorch's are written as its tutorials and torchtitan write them: `PipelineStage` with a schedule. Both sides have
torch's fused AdamW and clip the norm over all ranks. All ranks are given all sequences of a step, so that the losses
are those of the data-parallel competitors.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.engines import grid_config, pair
from benchmarks.model import GPT, loss_of
from benchmarks.setting import CLIP, Competitor, Setting, Step, autocast, optimizer_for


class Stage(nn.Module):
    """The blocks of one stage, with what comes before them on the first one and behind them on the last."""

    def __init__(self, model: GPT, stage: int, stages: int) -> None:
        super().__init__()
        bounds = [0, *stage_starts(len(model.blocks), stages), len(model.blocks)]
        self.blocks = model.blocks[bounds[stage] : bounds[stage + 1]]
        self.front = model if stage == 0 else None
        self.back = nn.Sequential(model.norm, model.head) if stage == stages - 1 else None
        if self.front is not None:
            self.front.blocks, self.front.norm, self.front.head = nn.ModuleList(), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens on the first stage, otherwise `(batch, time, width)`. Returns logits on the last one."""
        if self.front is not None:
            x = self.front.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.back is None else self.back(x)


def stage_starts(blocks: int, stages: int) -> list[int]:
    """The first block of each stage but the first; earlier stages take what cannot be divided."""
    if blocks < stages:
        raise ValueError(f"expected --layers to be at least the {stages} stages, got {blocks}; say --layers {stages}")
    return [-(-blocks * stage // stages) for stage in range(1, stages)]


def build_torch_pipeline(model: GPT, setting: Setting, schedule: str) -> Step:
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, stages, device = dist.get_rank(), setting.world_size, torch.device(setting.device)
    module = Stage(model, rank, stages)
    parameters = list(module.parameters())
    optimizer = optimizer_for(parameters, fused=True)
    stage = PipelineStage(module, rank, stages, device)
    runner = getattr(schedules, schedule)(stage, setting.pipeline_micro_batches, loss_fn=loss_of)
    first, last = rank == 0, rank == stages - 1

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        with autocast(setting):
            runner.step(*([tokens] if first else []), **({"target": targets, "losses": losses} if last else {}))
        squares = get_total_norm([p.grad for p in parameters]).square()
        dist.all_reduce(squares)
        clip_grads_with_norm_(parameters, CLIP, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        # The mean over ranks is what counts: only the last stage knows the loss.
        return torch.stack(losses).mean().detach() * stages if last else torch.zeros((), device=device)

    return step


def build_zerolite_pipeline(model: GPT, setting: Setting, schedule: str) -> Step:
    import zerolite

    split = [f"blocks.{start}" for start in stage_starts(len(model.blocks), setting.world_size)]
    config = grid_config(setting, pipeline={"stages": setting.world_size, "split": split, "schedule": schedule})
    count = setting.pipeline_micro_batches
    config["gradient_accumulation_steps"] = count
    config["train_micro_batch_size_per_gpu"] //= count
    engine = zerolite.initialize(model, config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine.train_batch(zip(tokens.chunk(count), targets.chunk(count), strict=True))
        return loss

    return step


PIPELINES: list[Competitor] = [
    competitor
    for name, of_torch in (("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B"))
    for competitor in pair(
        f"pp-{name}", build_torch_pipeline, build_zerolite_pipeline, {"schedule": of_torch}, {"schedule": name}
    )
]
