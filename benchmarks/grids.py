"""One copy of the model over all ranks: tensor and pipeline parallelism, by PyTorch's own APIs and by zerolite.

PyTorch's are written as its tutorials and torchtitan write them: `parallelize_module` with column- and row-parallel
styles, a vocabulary-parallel embedding and head under `loss_parallel`; `PipelineStage` with a schedule. Both sides have
torch's fused AdamW and clip the norm over all ranks. All ranks are given all sequences of a step, so that the losses
are those of the data-parallel competitors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.model import GPT, loss_of
from benchmarks.setting import (
    CLIP,
    Competitor,
    Setting,
    Step,
    adamw_entry,
    autocast,
    engine_loop,
    json_config,
    optimizer_for,
)

PLAN = {
    "token_embedding": "vocab",
    "blocks.*.qkv": "column",
    "blocks.*.project": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "vocab",
}


def build_torch_tensor(model: GPT, setting: Setting, sequence_parallel: bool = False) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    check_heads(model, setting)
    for block in model.blocks:
        order_heads(block.qkv, setting.world_size)
        block.heads //= setting.world_size
    plan = torch_sequence_plan() if sequence_parallel else torch_plan()
    parallelize_module(model, init_device_mesh(setting.device, (setting.world_size,)), plan)
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [[p for p in model.parameters() if isinstance(p, DTensor)], *([whole] if whole else [])]
    optimizer = optimizer_for([{"params": group} for group in groups], fused=True)  # no mixture in one fused update

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            with autocast(setting):
                loss = model(tokens, targets)
            loss.backward()
        for group in groups:
            _sum_partial(group)
        norms = [_whole(get_total_norm([p.grad for p in group])) for group in groups]
        norm = torch.stack(norms).norm()
        for group in groups:
            clip_grads_with_norm_(group, CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        return _whole(loss.detach())

    return step


def _whole(value: Any) -> Tensor:
    """A DTensor's full value; a plain tensor as it is."""
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


def _sum_partial(parameters: list[nn.Parameter]) -> None:
    """Add up what ranks have of a gradient each, once: otherwise the norm does it and the update does it again."""
    from torch.distributed.tensor import DTensor, Replicate

    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            parameter.grad = grad.redistribute(placements=[Replicate()])


def check_heads(model: GPT, setting: Setting) -> None:
    heads = model.blocks[0].heads
    if heads % setting.world_size:
        raise ValueError(
            f"expected --heads to be a multiple of the {setting.world_size} ranks that share them, got {heads}; "
            "say --heads 8"
        )


def order_heads(fused: nn.Linear, ranks: int) -> None:
    """Order the rows [query; key; value] such that each of `ranks` equal parts has the three of its own heads: then the
    even cut of torch's column-parallel style is one by heads."""
    rows = torch.arange(fused.out_features, device=fused.weight.device)
    order = rows.view(3, ranks, -1).transpose(0, 1).flatten()
    with torch.no_grad():
        fused.weight.copy_(fused.weight[order])
        fused.bias.copy_(fused.bias[order])


def torch_plan() -> dict[str, Any]:
    """Norms are computed by every rank."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.qkv": ColwiseParallel(),
        "blocks.*.project": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def torch_sequence_plan() -> dict[str, Any]:
    """Between the layers that are cut, each rank has a part of the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    part = Shard(1)
    return {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=part, use_local_output=True),
        "blocks.*.norm_attention": SequenceParallel(),
        "blocks.*.qkv": ColwiseParallel(input_layouts=part),
        "blocks.*.project": RowwiseParallel(output_layouts=part),
        "blocks.*.norm_mlp": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=part),
        "blocks.*.down": RowwiseParallel(output_layouts=part),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False),
    }


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


def _grid_config(setting: Setting, **blocks: Any) -> dict[str, Any]:
    config = json_config(setting, stage=0) | blocks
    config["optimizer"] = adamw_entry(fused=True)
    config["train_micro_batch_size_per_gpu"] = setting.micro_batch * setting.world_size
    return config


def build_zerolite_tensor(model: GPT, setting: Setting, sequence_parallel: bool = False) -> Step:
    import zerolite

    check_heads(model, setting)
    block = {"size": setting.world_size, "plan": PLAN, "sequence_parallel": sequence_parallel}
    return engine_loop(zerolite.initialize(model, _grid_config(setting, tensor_parallel=block)))


def build_zerolite_pipeline(model: GPT, setting: Setting, schedule: str) -> Step:
    import zerolite

    starts = stage_starts(len(model.blocks), setting.world_size)
    split = [f"blocks.{start}" for start in starts]
    config = _grid_config(setting, pipeline={"stages": setting.world_size, "split": split, "schedule": schedule})
    count = setting.pipeline_micro_batches
    config["gradient_accumulation_steps"] = count
    config["train_micro_batch_size_per_gpu"] //= count
    engine = zerolite.initialize(model, config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine.train_batch(micro_batches(tokens, targets, count))
        return loss

    return step


def micro_batches(tokens: Tensor, targets: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    pairs: Iterable[tuple[Tensor, Tensor]] = zip(tokens.chunk(count), targets.chunk(count), strict=True)
    return iter(pairs)


def _all_grids() -> list[Competitor]:
    found: list[Competitor] = []
    for suffix, options in (("tp", {}), ("tp-sp", {"sequence_parallel": True})):
        found += _pair(suffix, build_torch_tensor, build_zerolite_tensor, options, options)
    for name, torchs in (("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")):
        ours, theirs = {"schedule": name}, {"schedule": torchs}
        found += _pair(f"pp-{name}", build_torch_pipeline, build_zerolite_pipeline, theirs, ours)
    return found


def _pair(suffix: str, theirs: Any, ours: Any, their_options: dict[str, Any], our_options: dict[str, Any]) -> Any:
    """PyTorch's row, then zerolite's, which is compared with it."""
    common: dict[str, Any] = {"joint": True, "extra": True, "peer": f"torch-{suffix}"}
    return [
        Competitor(f"torch-{suffix}", theirs, "torch", their_options, **common),
        Competitor(f"zerolite-{suffix}", ours, "zerolite", our_options, **common),
    ]


GRIDS = _all_grids()
